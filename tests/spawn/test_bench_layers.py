"""The layer and train suites' variants on gloo ranks: what they compute passes, what is tampered with does not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from bench.blocks import manual, shapes
from bench.blocks.variants import COMPILED
from bench.context import Context
from bench.models import Model
from bench.records import Stats
from bench.suite import Options, Runnable, Skip, Suite, Workload
from bench.suites import layer as layer_module
from bench.suites.layer import SUITE as LAYER
from bench.suites.train import SUITE as TRAIN
from tpkernels.testing import RankContext, RankPool

PLAIN = Model(hidden=128, ffn=256, heads=8, kv_heads=8, head_dim=16, layers=2, gated=False)
GATED_BIASES = replace(PLAIN, gated=True, biases=True)
WIDE_HEADS = Model(hidden=96, ffn=192, heads=12, kv_heads=6, head_dim=16, layers=2)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """The demo's model takes the default group, which must be all ranks of the run."""
    with RankPool(2, "gloo", timeout=120.0) as pool:
        yield pool


def workload_of(ctx: RankContext, suite: Suite, **options: Any) -> Workload:
    layer_module._MODELS.update({"plain": PLAIN, "wide": WIDE_HEADS, "gated-biases": GATED_BIASES})
    given = Options(device="cpu", world=ctx.world, **options)
    group = dist.distributed_c10d._get_default_group()
    context = Context(given, ctx.rank, ctx.world, torch.device("cpu"), group, group)
    (case,) = suite.cases(given)
    return suite.workload(case, context)


def run_all(runnable: Runnable, times: int = 1) -> float:
    """Error over tolerance after the calls that the engine makes: above 1 is wrong."""
    runnable.poison()
    for i in range(times * runnable.copies):
        runnable.launch(i % runnable.copies)
    check = runnable.check()
    assert check.ok == (check.error <= check.tolerance)
    return check.error / check.tolerance


def check_variants(
    ctx: RankContext, suite: Suite, names: list[str] | None, options: dict[str, Any]
) -> dict[str, float]:
    workload = workload_of(ctx, suite, **options)
    ratios = {}
    for variant in suite.variants(Options(device="cpu", world=ctx.world)):
        if variant.name in COMPILED if names is None else variant.name not in names:
            continue
        runnable = workload.prepare(variant.name)
        for part in runnable.parts.values():
            part(0)
        ratios[variant.name] = max(run_all(runnable), run_all(runnable))
        runnable.poison()
        assert runnable.check().error == math.inf, f"{variant.name}: nothing was written, and it passed"
    workload.close()
    return ratios


@pytest.mark.parametrize("part", ["mlp", "attention", "block"])
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("tiny", "float32"),
        ("plain", "bfloat16"),
        ("wide", "float32"),
        ("tiny-biases", "float32"),
        ("gated-biases", "bfloat16"),
    ],
)
def test_layers_are_right(two_ranks: RankPool, part: str, model: str, dtype: str) -> None:
    options = {"ops": (part,), "models": (model,), "dtypes": (dtype,), "rows": (48,), "seed": 3}
    found = two_ranks.run(check_variants, LAYER, None, options)
    ours = {"ours", "ours:gloo+streamk", "ours:keep_gathered", "ours-styles"}
    assert set(found[0]) == {"gloo+blas", "gloo+blas-async", "torch-tp", *ours}
    for ratios in found:
        for name, ratio in ratios.items():
            assert 0 < ratio < 1, f"{name}: {ratio}"


@pytest.mark.parametrize(
    ("world", "models", "names"),
    [
        (4, ("tiny", "tiny-biases"), ["ours-2d", "ours-spatial-temporal"]),
        (8, ("plain", "gated-biases"), ["ours-2.5d", "ours-3d"]),
    ],
)
def test_layers_on_grids_are_right(world: int, models: tuple[str, str], names: list[str]) -> None:
    """Judged by the same reference as the others; bytes and buffers are told."""
    rows = 16 * world
    with RankPool(world, "gloo", timeout=240.0) as pool:
        for part, model in (("block", models[0]), ("attention", models[1]), ("mlp", models[1])):
            options = {"ops": (part,), "models": (model,), "rows": (rows,), "seed": 5}
            for ratios in pool.run(check_variants, LAYER, names, options, timeout=240.0):
                assert set(ratios) == set(names)
                assert all(0 < ratio < 1 for ratio in ratios.values()), (part, model, ratios)
        given: dict[str, Any] = {"models": models[:1], "rows": (rows,)}
        moved = pool.run(traffic_of, names[0], given)
        assert all(row["sent_bytes"] > 0 and row["buffer_elements"] > 0 for row in moved)
        assert sum(row["sent_bytes"] for row in moved) == sum(row["received_bytes"] for row in moved)
        errors = pool.run(tamper_weight, LAYER, names[0], given)
        assert max(errors) > 1, "a wrong weight of one rank is seen"


def traffic_of(ctx: RankContext, variant: str, options: dict[str, Any]) -> dict[str, int]:
    """What a call moves, from the row."""
    extra = workload_of(ctx, LAYER, ops=("mlp",), **options).prepare(variant).extra
    return {key: extra[key] for key in ("sent_bytes", "received_bytes", "buffer_elements")}


def misfit(ctx: RankContext) -> str:
    layer_module._MODELS["wide-4"] = replace(WIDE_HEADS, kv_heads=4)
    with pytest.raises(Skip) as found:
        workload_of(ctx, LAYER, ops=("attention",), models=("wide-4",)).prepare("ours-2d")
    return str(found.value)


def test_what_a_grid_has_not_is_skipped() -> None:
    with RankPool(4, "gloo", timeout=120.0) as pool:
        assert set(pool.run(misfit)) == {"attention on grids has heads of hidden / heads elements"}


def test_training_is_right(two_ranks: RankPool) -> None:
    for dtype in ("float32", "bfloat16"):
        for ratios in two_ranks.run(check_variants, TRAIN, None, {"dtypes": (dtype,)}):
            assert len(ratios) == 6
            for name, ratio in ratios.items():
                assert 0 < ratio < 1, f"{name}: {ratio}"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["torch-tp-compiled", "ours-styles-compiled", "ours-async-tp"])
def test_a_compiled_layer_is_right(two_ranks: RankPool, variant: str) -> None:
    found = two_ranks.run(check_variants, LAYER, [variant], {"ops": ("mlp",)}, timeout=280)
    assert all(0 < ratios[variant] < 1 for ratios in found)


def styles_used(ctx: RankContext) -> dict[str, dict[str, int]]:
    """Our operations in a call of each variant, forward and backward."""
    workload = workload_of(ctx, LAYER, ops=("block",))
    counts = {}
    for variant in ("torch-tp", "ours-styles", "ours", "ours:keep_gathered"):
        runnable = workload.prepare(variant)
        with tpk.record_paths() as log:
            runnable.launch(0)
        counts[variant] = {
            op: sum(n for (name, _), n in log.counts.items() if name == op) for op, _ in log.counts
        }
    return counts


def test_variants_run_what_they_say(two_ranks: RankPool) -> None:
    for counts in two_ranks.run(styles_used):
        assert counts["torch-tp"] == {}
        for name in ("ours-styles", "ours", "ours:keep_gathered"):  # forward, and the gradients of the others
            assert counts[name]["all_gather_matmul"] == counts[name]["matmul_reduce_scatter"] == 4, counts
        assert counts["ours"]["all_gather"] == 2  # gathered again for gradients of weights
        assert "all_gather" not in counts["ours:keep_gathered"]


def refusals(ctx: RankContext) -> list[str]:
    reasons = []
    for suite, options in (
        (LAYER, {"ops": ("mlp",)}),
        (LAYER, {"ops": ("mlp",), "rows": (49,)}),
    ):
        with pytest.raises(Skip) as found:
            workload_of(ctx, suite, **options).prepare("torch-tp-async")
        reasons.append(str(found.value))
    return reasons


def test_what_cannot_run_says_why(two_ranks: RankPool) -> None:
    for cpu, odd in two_ranks.run(refusals):
        assert cpu == "torch's async tensor parallelism needs CUDA: its fused products have no CPU kernels"
        assert odd == "2 ranks cannot share 49 tokens of a sequence evenly"


def tamper_weight(
    ctx: RankContext, suite: Suite, variant: str, options: dict[str, Any] | None = None
) -> float:
    """The same calls with one row of a weight of rank 1 too large by a tenth."""
    workload = workload_of(ctx, suite, ops=("block",), **(options or {}))
    calls = workload.prepare(variant).launch.__self__  # type: ignore[attr-defined]
    implementation = calls.implementation
    part = next(p for p in implementation.parts if p.name.endswith("up_proj.weight"))
    before = implementation.draw_

    @torch.no_grad()
    def draw(seed: int) -> None:
        before(seed)
        if ctx.rank == 1:
            part.of(calls.parameters[part.index].data)[5] *= 1.1

    implementation.draw_ = draw  # train draws again
    draw(0)
    return run_all(runnable_of(calls))


def tamper_gradients(ctx: RankContext, suite: Suite, variant: str, how: str) -> float:
    """The same calls, with the gradients of norms not summed over the ranks, or of all weights made twice."""
    workload = workload_of(ctx, suite, ops=("block",))
    calls = workload.prepare(variant).launch.__self__  # type: ignore[attr-defined]
    if how == "no sums":
        assert variant == "gloo+blas"
        calls.implementation.complete = list
    else:
        complete = calls.implementation.complete
        calls.implementation.complete = lambda gradients: [2 * g for g in complete(gradients)]
    return run_all(runnable_of(calls))


def runnable_of(calls: Any) -> Runnable:
    copies = len(calls.losses) if hasattr(calls, "losses") else len(calls.results)
    poison = calls.restart if hasattr(calls, "losses") else calls.poison
    return Runnable(calls.launch, copies, calls.check, poison)


@pytest.mark.parametrize("suite", [LAYER, TRAIN], ids=["layer", "train"])
def test_a_wrong_weight_or_gradient_is_found(two_ranks: RankPool, suite: Suite) -> None:
    for variant in ("gloo+blas", "torch-tp", "ours"):
        # The row is in rank 1's gradients; other ranks' outputs err by less than a row's share.
        assert max(two_ranks.run(tamper_weight, suite, variant)) > 1.5, variant
        assert min(two_ranks.run(tamper_gradients, suite, variant, "twice")) > 1.5, variant
    assert min(two_ranks.run(tamper_gradients, suite, "gloo+blas", "no sums")) > 1.5


def tamper_bias(ctx: RankContext, variant: str, name: str) -> float:
    """The same calls, rank 1 without one of its biases."""
    workload = workload_of(ctx, LAYER, ops=("block",), models=("tiny-biases",))
    calls = workload.prepare(variant).launch.__self__  # type: ignore[attr-defined]
    part = next(p for p in calls.implementation.parts if p.name == name)
    if ctx.rank == 1:
        part.of(calls.parameters[part.index].data).zero_()
    return run_all(runnable_of(calls))


def test_a_wrong_bias_is_found(two_ranks: RankPool) -> None:
    for variant in ("gloo+blas", "torch-tp", "ours"):
        for name in ("attention_norm.bias", "attention.v_proj.bias", "mlp.down_proj.bias"):
            assert max(two_ranks.run(tamper_bias, variant, name)) > 1.5, (variant, name)


def leftovers(ctx: RankContext, part: str, lag: int) -> list[float]:
    """Collectives that move nothing: a caller gets what the same one gave ``lag`` calls before."""
    calls = workload_of(ctx, LAYER, ops=(part,)).prepare("gloo+blas").launch.__self__  # type: ignore[attr-defined]
    results: list[list[torch.Tensor]] = []

    def old(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = collective(*args, **kwargs)
            tensor = out if isinstance(out, torch.Tensor) else out.wait()
            results[-1].append(tensor.clone())
            if len(results) > lag:
                tensor.copy_(results[-1 - lag][len(results[-1]) - 1])
            return out

        return run

    def launch(i: int) -> None:
        results.append([])
        calls.launch(i)

    names = ("gather", "reduce_scatter", "all_reduce")
    real = {name: getattr(manual._Comm, name) for name in names}
    try:
        for name in names:
            setattr(manual._Comm, name, old(real[name]))
        launch(0)  # as while preparing
        runnable = runnable_of(calls)
        runnable.launch = launch
        return [run_all(runnable), run_all(runnable, times=2)]  # at once, and as in a graph
    finally:
        for name in names:
            setattr(manual._Comm, name, real[name])


@pytest.mark.parametrize("lag", [1, 2])
def test_what_an_earlier_call_left_is_found(two_ranks: RankPool, lag: int) -> None:
    for part in ("mlp", "block"):
        for ratios in two_ranks.run(leftovers, part, lag):
            assert min(ratios) > 100, (part, ratios)


def test_inputs_differ_and_every_set_is_judged(two_ranks: RankPool) -> None:
    for found in two_ranks.run(one_set_wrong):
        assert len(found) >= 3
        assert min(found) > 1.5


def one_set_wrong(ctx: RankContext) -> list[float]:
    workload = workload_of(ctx, LAYER, ops=("mlp",))
    calls = workload.prepare("ours").launch.__self__  # type: ignore[attr-defined]
    sets = calls.sets
    for i, (x, dy) in enumerate(sets):
        others = [s for j, s in enumerate(sets) if j != i]
        assert all((x - s[0]).abs().mean() > 0.5 and (dy - s[1]).abs().mean() > 0.5 for s in others)
    ratios = []
    for i in range(len(sets)):
        assert run_all(runnable_of(calls)) < 1
        calls.results[i][0][-1] *= 1.1
        check = calls.check()
        ratios.append(check.error / check.tolerance)
    return ratios


def omit_last_rank(ctx: RankContext) -> dict[str, float]:
    """Training whose sums over the ranks' tokens (norms) lack those of the last rank; and the same as it should be."""
    shapes.SIZES["deep"] = replace(shapes.SIZES["tiny"], model=replace(shapes.TINY, layers=8))
    workload = workload_of(ctx, TRAIN, models=("deep",), dtypes=("bfloat16",))
    calls = workload.prepare("gloo+blas").launch.__self__  # type: ignore[attr-defined]
    right = run_all(runnable_of(calls))
    complete = calls.implementation.complete
    calls.implementation.complete = lambda gradients: complete(
        [g * (g.dim() > 1 or ctx.rank < ctx.world - 1) for g in gradients]
    )
    return {"right": right, "omitted": run_all(runnable_of(calls))}


def test_a_sum_without_one_of_four_ranks_is_found() -> None:
    with RankPool(4, "gloo", timeout=120.0) as pool:
        for found in pool.run(omit_last_rank, timeout=200):
            assert found["omitted"] > 2, found
            assert found["right"] < 0.8, found


def speeds(ctx: RankContext) -> tuple[dict[str, float], dict[str, float]]:
    trained = workload_of(ctx, TRAIN).prepare("ours").finish(Stats.of([2000.0]))
    runnable = workload_of(ctx, LAYER, ops=("mlp",)).prepare("ours")
    assert runnable.finish(Stats.of([50.0])) == {}
    runnable.extra["forward_us"] = 20.0  # as the engine does
    return dict(trained), dict(runnable.finish(Stats.of([50.0])))


def test_speeds_of_rows(two_ranks: RankPool) -> None:
    (case,) = TRAIN.cases(Options(device="cpu", world=2))
    for trained, layer in two_ranks.run(speeds):
        assert layer == {"backward_us": 30.0}
        assert trained["tokens_per_s"] == pytest.approx(48 / 2e-3)
        assert trained["peak_tflops"] == trained["matmul_tflops"] > 0  # no data sheet of a CPU
        assert trained["mfu"] == trained["mfu_of_matmul"]
        assert trained["mfu"] == pytest.approx(case.flops / 2e-3 / (trained["matmul_tflops"] * 1e12))


def test_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable, "-m", "bench", "layer,train", "--device", "cpu", "--gpus", "2", "--op", "mlp", "--variant",
        "ours,torch-tp-async", "--rounds", "2", "--no-live", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = {(r["suite"], r["variant"]): r for r in lines if r["kind"] == "row"}
    for suite in ("layer", "train"):
        assert rows[suite, "ours"]["status"] == rows[suite, "gloo+blas"]["status"] == "ok"
        assert rows[suite, "gloo+blas again"]["role"] == "noise"
        assert rows[suite, "torch-tp-async"]["status"] == "skipped"
        assert "needs CUDA" in rows[suite, "torch-tp-async"]["reason"]
    row = rows["layer", "ours"]
    both = row["us"]["p50"]
    assert row["extra"]["forward_us"] + row["extra"]["backward_us"] == pytest.approx(both)
    assert 0 < rows["train", "ours"]["extra"]["mfu"] < 1

"""Autotuning of grouped and of FP8 products, with times that the tests give."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tpkernels.fp8 import _product
from tpkernels.ops import _gemm, _grouped, _paths, _plans
from tpkernels.ops._paths import Choice, PlanArguments
from tpkernels.testing import assert_close_tiles
from tpkernels.tune import asked, candidates, cli, local, timer
from tpkernels.tune.calls import AnyCall
from tpkernels.tune.candidates import Candidate
from tpkernels.tune.grouped import GroupedCall, near
from tpkernels.tune.scaled import ScaledCall

Tensor = torch.Tensor
F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
HOPPER = _plans.Machine("sm90", 132)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TPK_CACHE_DIR", str(tmp_path / "cache"))
    local.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield tmp_path / "cache"
    local.forget()


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one candidate the fastest, by what it is. Returns the calls that were timed."""
    asked_for: list[AnyCall] = []

    def choose(wanted: Callable[[Candidate], bool]) -> list[AnyCall]:
        def times(call: AnyCall, library: str, finished: Any = None) -> list[tuple[Candidate, float]]:
            case = call.case()
            tried = candidates.candidates(case.product, case.machine(call.device), library)
            assert any(map(wanted, tried)), tried
            asked_for.append(call)
            return [(c, 10.0 if wanted(c) else 50.0) for c in tried]

        monkeypatch.setattr(local, "time_all", times)
        return asked_for

    return choose


def last() -> _paths.PathRecord:
    record = tpk.last_path()
    assert record is not None
    return record


# Groups


FOLLOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": (3, 150), "activation": "silu"},
    "gate": {"gate": (3, 300, 150), "activation": "silu"},
}


@pytest.mark.parametrize("follows", FOLLOWS)
@pytest.mark.parametrize("kept", [False, True])
def test_every_candidate_is_right(
    follows: str, kept: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed are the calls themselves, by plans that really differ."""
    if kept and follows == "plain":
        pytest.skip("nothing is kept of a plain product")
    monkeypatch.setattr(timer, "_BUDGET_S", 0.0)  # one round

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = [130, 0, 70]
    a, b = made(200, 300), made(3, 300, 150)
    given = {name: made(*x) if isinstance(x, tuple) else x for name, x in FOLLOWS[follows].items()}
    call = GroupedCall(a, b, _gemm.Epilogue(**given), sizes, F32, kept)
    timed = local.time_all(call, "blas")
    assert [c.gemm for c, _ in timed[:2]] == ["blas", "streamk"] and len(timed) >= 4
    plans = [c.plan for c, _ in timed[1:]]
    assert len(set(plans)) == len(plans) and len({plan.tile for plan in plans}) >= 3
    assert all(0 < us < math.inf for _, us in timed)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    want = tpk.grouped_matmul(a.double(), b.double(), sizes, path="blas", **wide)
    for candidate, _ in timed:
        choice = Choice(candidate.gemm, "", plan=candidate.plan)
        out = _grouped.run(choice, a, b, call.epilogue, sizes, F32, kept)
        assert len(out) == 1 + (0 if not kept else 2 if follows == "gate" else 1)
        # Up to 300 x 150 x 300 in a gate: errors of either factor times the other one.
        assert_close_tiles(out[0], want, F32, k=300, magnitude=1e3 + 0 * want, name=candidate.what)


def test_plans_reach_the_kernel(only: Any, generator: torch.Generator) -> None:
    """Of all groups; a split plan has other bits than whole tiles."""
    sizes = [64, 0, 40]
    a, b = torch.randn(104, 2000, generator=generator), torch.randn(3, 2000, 64, generator=generator)
    only(lambda c: c.plan.schedule == "split_k" and c.plan.splits == 4)
    with tpk.autotune():
        y = tpk.grouped_matmul(a, b, sizes)
        assert last().path == "streamk" and "split_k x4 10.0 us, the library 50.0" in last().why
        (entry,) = local.store_of(a.device).all().values()
        by_hand = torch.empty(104, 64)
        torch.ops.tpkernels.streamk_gemm_grouped(
            a, b, None, by_hand, None, "none", sizes, "split_k", 0, 4, entry.tile
        )
        assert torch.equal(y, by_hand) and torch.equal(tpk.grouped_matmul(a, b, sizes), y)
        told = tpk.explain("grouped_matmul", a, b, sizes)
        assert (told.path, told.why) == (last().path, last().why)
    assert not torch.equal(tpk.grouped_matmul(a, b, sizes, path="streamk"), y), "the model would not split"


def test_sizes_that_are_near_are_one_case(only: Any, generator: torch.Generator, cache: Path) -> None:
    """Routers deal rows out anew in every step: what was timed once serves the others, in other processes too."""
    timed = only(lambda c: c.gemm == "streamk" and c.plan.tile == "16x64x128")
    b = torch.randn(4, 30, 50, generator=generator)

    def run(*sizes: int) -> str:
        a = torch.randn(sum(sizes), 30, generator=generator)
        got = tpk.grouped_matmul(a, b, list(sizes))
        want = torch.cat([x.double() @ w.double() for x, w in zip(a.split(sizes), b, strict=True)])
        assert_close_tiles(got, want, F32, k=30)
        return last().path

    with tpk.autotune():
        assert run(50, 0, 10, 4) == "streamk" and len(timed) == 1  # 64 rows of 3 groups
        assert run(1, 0, 62, 1) == run(0, 20, 20, 21) == "streamk" and len(timed) == 1
        assert run(50, 0, 14, 0) == "streamk" and len(timed) == 2  # 2 groups
        assert run(50, 10, 20, 0) == "streamk" and len(timed) == 3  # 80 rows
    local.forget()
    with tpk.autotune("read"):
        assert run(0, 60, 1, 1) == "streamk" and local.counts.timed == 0
        assert run(100, 60, 1, 1) == "blas" and last().why.endswith("not in the cache of tuned plans")
    assert [near(n) for n in (0, 7, 16, 17, 100, 4096, 4097)] == [0, 7, 16, 18, 104, 4096, 4608]
    assert all(n <= near(n) < 9 / 8 * n for n in range(1, 3000))


def test_gradients(only: Any, generator: torch.Generator) -> None:
    """That of a is a grouped product like others; that of b is a product for each group, whose K is always new."""
    timed = only(lambda c: c.gemm == "streamk")
    a = torch.randn(20, 30, generator=generator, requires_grad=True)
    b = torch.randn(2, 30, 10, generator=generator, requires_grad=True)
    gate = torch.randn(2, 30, 10, generator=generator, requires_grad=True)
    with tpk.record_paths() as log, tpk.autotune():
        tpk.grouped_matmul(a, b, [5, 15], gate=gate, activation="silu").sum().backward()
    assert log.counts == {("grouped_matmul", "streamk"): 3, ("grouped_weight_grad", "blas"): 2}
    # Forward with both products kept, and the two parts of the gradient of a, which are alike.
    keys = [call.case().key for call in timed]
    assert [key.split()[1:3] for key in keys] == [["2", "of"]] * 2
    assert "gate+activation+preact" in keys[0] and "float32>float32 ko plain" in keys[1].replace("kk", "ko")


def test_a_named_path_and_nothing_to_time(only: Any) -> None:
    only(lambda c: c.gemm == "streamk")
    a, b = torch.randn(20, 30), torch.randn(2, 30, 10)
    with tpk.autotune():
        for path in ("streamk", "blas"):
            tpk.grouped_matmul(a, b, [5, 15], path=path)
        for rows, k, n in ((0, 30, 10), (20, 0, 10), (20, 30, 0)):
            tpk.grouped_matmul(torch.ones(rows, k), torch.ones(1, k, n), [rows])
            assert "tuned" not in last().why
        assert local.counts.timed == 0


@pytest.mark.parametrize(("library", "taken"), [(9.0, "blas"), (11.2, "blas"), (11.3, "streamk")])
def test_the_library_is_timed_where_ours_is_the_default(
    library: float, taken: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, where path "auto" takes one launch for all groups. Our fastest takes 11 us."""

    def times(call: AnyCall, name: str, finished: Any = None) -> list[tuple[Candidate, float]]:
        case = call.case()
        tried = candidates.candidates(case.product, case.machine(call.device), name)
        return [(c, library if c.gemm == name else 10.0 + i) for i, c in enumerate(tried)]

    monkeypatch.setattr(local, "time_all", times)
    ours = Choice("streamk", "one launch for all groups", open=True)
    monkeypatch.setattr(_grouped, "choose_grouped", lambda *_: ours)
    a, b = torch.randn(20, 30, generator=generator), torch.randn(2, 30, 10, generator=generator)
    with tpk.autotune():
        tpk.grouped_matmul(a, b, [5, 15])
    assert last().path == taken
    (entry,) = local.store_of(a.device).all().values()
    assert (entry.gemm, entry.library_us) == (taken, library)


def test_keys_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.empty(20, 24), torch.empty(3, 10, 24).mT
    e = _gemm.Epilogue(bias=torch.empty(3, 10), activation="relu")

    def key(
        a: Tensor, b: Tensor, e: _gemm.Epilogue = _gemm.PLAIN, sizes: Any = (8, 0, 12), **more: Any
    ) -> str:
        return GroupedCall(a, b, e, sizes, more.get("out", a.dtype), more.get("kept", False)).case(
            more.get("device", "")
        ).key  # fmt: skip

    threads = f" threads={torch.get_num_threads()}"
    assert key(a, b) == "grouped 2 of 20x10x24 float32>float32 kk plain" + threads
    assert key(a, b, e, out=BF16, kept=True).endswith("float32>bfloat16 kk bias+activation+preact" + threads)
    half = a.bfloat16(), b.bfloat16()
    assert key(*half, device="cuda") == "grouped 2 of 20x10x24 bfloat16>bfloat16 kk plain"
    columns = torch.empty(24, 24, dtype=BF16).t()
    begins = {(8, 0, 16): "o", (7, 0, 17): "o!", (24, 0, 0): "o"}
    for sizes, letter in begins.items():  # TMA loads groups that begin at multiples of 8 rows
        assert f" {letter}k plain" in key(columns, half[1], sizes=sizes, device="cuda")
    gates = {False: half[1], True: torch.empty(3, 24, 16, dtype=BF16)[:, :, :10]}
    monkeypatch.setattr(_plans, "machine_of", lambda *_: HOPPER)
    for other, gate in gates.items():
        case = GroupedCall(*half, _gemm.Epilogue(gate=gate), (8, 0, 12), BF16).case("cuda")
        assert ("gate!" in case.key) == other
        assert case.machine(torch.device("cuda", 0)).architecture == ("sm90-portable" if other else "sm90")


def test_names_tell_groups_apart_as_keys_do(generator: torch.Generator) -> None:
    """The short cut of a process must not join what the cache tells apart, nor depend on sizes that are near."""
    b = torch.empty(3, 16, 24, dtype=BF16)
    calls = []
    for sizes, columns, gated in itertools.product(
        [(8, 0, 16), (7, 0, 17), (23, 1, 0), (8, 8, 8), (40, 0, 8)], [False, True], [False, True]
    ):
        rows = sum(sizes)
        a = torch.empty(16, rows, dtype=BF16).t() if columns else torch.empty(rows, 16, dtype=BF16)
        e = _gemm.Epilogue(gate=b if gated else None)
        calls.append(GroupedCall(a, b, e, sizes, BF16))
    names = {call.name() for call in calls}
    pairs = {(call.name(), call.case("cuda").key) for call in calls}
    assert len(names) == len(pairs)
    assert calls[0].name() == calls[8].name()  # 24 rows of two groups, rows contiguous


def test_hopper_plans_of_groups() -> None:
    """No GPU is needed to list them; no whole tile is among them, and of gates none that cannot be halved."""
    sizes = (100, 0, 1, 500, 7)
    for gated in (False, True):
        product = _plans.Product(1, 608, 1536, 4096, gated, gated, group_sizes=sizes)
        found = candidates.candidates(product, HOPPER, "cublas")
        assert found[0].gemm == "cublas" and 4 <= len(found) <= 13
        tiles = {c.plan.tile for c in found[1:]}
        assert len(tiles) >= 2 and tiles <= set(_plans.tiles_of(product, HOPPER))
        assert not any(_plans.is_whole(tile) or (gated and "x192x" in tile) for tile in tiles)


# FP8


SCALINGS = {
    ("tensorwise", "tensorwise"): "sm90-fp8",
    ("rowwise", "rowwise"): "sm90-fp8",
    ("blockwise_1x128", "blockwise_128x128"): "sm90-fp8-blocks",
}


def scaled_call(
    m: int, n: int, k: int, scalings: tuple[str, str] = ("tensorwise", "tensorwise"), **more: Any
) -> ScaledCall:
    cpu = torch.device("cpu")
    a = asked.quantized(m, k, scalings[0], E4M3, cpu)
    b = asked.quantized(n, k, scalings[1], E4M3, cpu).t()
    bias = torch.randn(n) if more.get("bias") else None
    return ScaledCall(a.data, b.data, a.scale, b.scale, bias, BF16, more.get("fast", False))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Plans are those of Hopper, and the kernel notes what it is told and multiplies on the CPU."""
    told: list[dict[str, Any]] = []
    machine_of = _plans.machine_of
    monkeypatch.setattr(_plans, "machine_of", lambda *a: HOPPER if len(a) == 2 else machine_of(*a))

    def scaled_gemm(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Any,
        out: Tensor,
        fast: bool,
        **plan: Any,
    ) -> None:
        told.append(plan | {"fast": fast})
        out.copy_(_product._converted(a, b, scale_a, scale_b, bias, out.dtype))

    monkeypatch.setattr(torch.ops.tpkernels, "scaled_gemm", scaled_gemm)
    return told


@pytest.mark.parametrize(("scalings", "architecture"), SCALINGS.items())
def test_plans_of_fp8(scalings: tuple[str, str], architecture: str, on_hopper: list[Any]) -> None:
    """Every plan that is tried is one of the kernel's, and is told to it."""
    for m, n, k in ((1024, 4096, 4096), (32, 512, 4096), (200, 136, 72)):
        call = scaled_call(m, n, k, scalings, bias=True)
        case = call.case()
        machine = case.machine(call.device)
        assert machine == _plans.Machine(architecture, 132)
        found = candidates.candidates(case.product, machine, "cublas")
        assert found[0].gemm == "cublas" and len(found) >= 4 and len({c.plan for c in found}) == len(found)
        tiles = {c.plan.tile for c in found[1:]}
        assert tiles <= set(_plans.SCALED_TILES) and len(tiles) >= 2
        assert all(c.predicted_us > 0 and candidates.exists(c.plan, case.product, machine) for c in found[1:])
        assert not candidates.exists(PlanArguments("auto", 1, "128x256x64"), case.product, machine)
    want = call.runner()(Choice("blas", ""), call.operands())
    for candidate in found[1:]:
        out = call.runner()(Choice("streamk", "", plan=candidate.plan), call.operands())
        assert torch.equal(out, want)
        assert on_hopper[-1] == candidate.plan._asdict() | {"fast": False}


def test_fp8_is_timed_once(only: Any, on_hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = only(lambda c: c.plan.schedule == "hybrid_aligned" and c.plan.splits == 6)
    open_choice = Choice("cublas", "torch._scaled_mm is the default", open=True)
    monkeypatch.setattr(_product, "choose", lambda *_: open_choice)
    a, b = (torch.randn(64, 4096), torch.randn(128, 4096))
    quantized = tpk.quantize(a), tpk.quantize(b).t()
    with tpk.autotune("read"):
        assert tpk.explain("scaled_matmul", *quantized).why.endswith("not tuned yet: not in the cache")
    with tpk.autotune():
        y = tpk.scaled_matmul(*quantized)
        again = tpk.scaled_matmul(*quantized)
        assert len(timed) == 1 and last().path == "streamk" and "hybrid_aligned x6 10.0 us" in last().why
        told = tpk.explain("scaled_matmul", *quantized)
        assert (told.path, told.why) == (last().path, last().why)
        assert torch.equal(y, again)
        assert (on_hopper[-1]["schedule"], on_hopper[-1]["splits"]) == ("hybrid_aligned", 6)
        other = tpk.quantize(a, "rowwise"), tpk.quantize(b, "rowwise").t()
        tpk.scaled_matmul(*other)
        tpk.scaled_matmul(*other, fast_accumulation=True)
        assert len(timed) == 3, "scales and the way of sums are other kernels"
    local.forget()
    with tpk.autotune("read"):
        tpk.scaled_matmul(*quantized)
        assert "hybrid_aligned x6 10.0 us" in last().why and (local.counts.timed, local.counts.found) == (
            0,
            1,
        )
    want = quantized[0].dequantize(torch.float64) @ quantized[1].dequantize(torch.float64)
    assert_close_tiles(y, want, BF16, k=4096)


def test_keys_of_fp8() -> None:
    assert scaled_call(32, 48, 64).case().key == (
        "scaled 32x48x64 e4m3fnxe4m3fn>bfloat16 tensorwisextensorwise plain"
    )
    blocks = scaled_call(200, 136, 72, ("blockwise_1x128", "blockwise_128x128"), bias=True).case()
    assert blocks.layout.k == 72 and blocks.product.k == 80 and "bias copied ab" in blocks.key
    assert scaled_call(32, 48, 64, fast=True).case().key.endswith(" fast")
    empty = ScaledCall(
        *(torch.empty(s, dtype=E4M3) for s in ((0, 16), (16, 8))),
        torch.ones(1),
        torch.ones(1),
        None,
        BF16,
        False,
    )
    assert empty.case().is_empty and not scaled_call(1, 1, 1).case().is_empty


def test_fp8_on_a_device_without_the_kernel() -> None:
    """There is nothing to choose, so nothing is timed."""
    a, b = tpk.quantize(torch.randn(8, 32)), tpk.quantize(torch.randn(16, 32)).t()
    with tpk.autotune():
        tpk.scaled_matmul(a, b)
    assert last().path == "blas" and local.counts.timed == 0


# The command


def test_the_command_takes_groups(only: Any, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    only(lambda c: c.plan.tile == "16x64x128")
    options = ["--groups", "3", "--epilogue", "gate+activation", "--device", "cpu", "--plain"]
    assert cli.main(["tune", "20..40x24x30", *options]) == 0
    out = capsys.readouterr().out
    assert "2 products of float32 in 3 groups on " in out and out.count("16x64x128") >= 2
    a, b, gate = torch.randn(20, 30), torch.randn(3, 24, 30).mT, torch.randn(3, 24, 30).mT
    local.forget()
    with tpk.autotune("read"):
        tpk.grouped_matmul(a, b, [1, 18, 1], gate=gate, activation="gelu")
    assert last().why.startswith("tuned: 16x64x128") and last().path == "streamk"
    assert cli.main(["explain", "20x24x30", "--groups", "5,0,15", "--device", "cpu"]) == 0
    assert "M=20 N=24 K=30 float32 in 2 of 3 groups" in capsys.readouterr().out
    assert (
        cli.main(["explain", "20x24x32", "--fp8", "blockwise", "--epilogue", "bias", "--device", "cpu"]) == 0
    )
    assert "scaled_matmul: path blas" in capsys.readouterr().out


@pytest.mark.parametrize("layout", asked.LAYOUTS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_fp8_of_the_command_is_what_a_layer_calls(
    recipe: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and both gradients, of a linear layer."""
    keys: list[str] = []
    run = _product.run

    def noted(choice: Choice, *given: Any) -> Tensor:
        keys.append(ScaledCall(*given).case().key)
        return run(choice, *given)

    monkeypatch.setattr(_product, "run", noted)
    x, w = (torch.randn(*s, dtype=BF16, requires_grad=True) for s in ((32, 256), (128, 256)))
    tpk.fp8.matmul(x, w.t(), recipe=recipe).sum().backward()
    assert len(keys) == 3
    size = {"forward": "32x128x256", "dgrad": "32x256x128", "wgrad": "128x256x32"}[layout]
    line = ["tune", size, "--fp8", recipe, "--layout", layout, "--dtype", "bf16"]
    given = cli._parser().parse_args(line)
    shape = cli.shapes.of([size], None, 1, None)[0]
    call = asked.call_of(shape, given, asked.dtype_of(given, torch.device("cpu")), torch.device("cpu"))
    assert call.case().key in keys, keys


BAD = [
    (["--groups", "x"], "tpk tune: --groups: expected a number, or numbers of rows"),
    (["--groups", "0"], "tpk tune: --groups: expected a number"),
    (["--groups", "1,2"], "tpk tune: --groups: expected numbers that add up to M = 8, got '1,2', 3 in all"),
    (["--groups", "2", "--layout", "wgrad"], "tpk tune: --layout: expected forward or dgrad with --groups"),
    (
        ["--groups", "2", "--epilogue", "residual"],
        "tpk tune: --epilogue: expected names of activation, bias, gate",
    ),
    (["--groups", "2", "--fp8", "rowwise"], "tpk tune: --fp8 and --groups: expected one of them"),
    (["--fp8", "colwise"], "tpk tune: --fp8: expected one of tensorwise, rowwise, blockwise, got 'colwise'"),
    (
        ["--fp8", "rowwise"],
        "tpk tune: --fp8: there is nothing to choose: the cpu Stream-K kernel takes no FP8",
    ),
    (["--fp8", "rowwise", "--epilogue", "gate"], "tpk tune: --epilogue: expected names of bias with --fp8"),
    (["--fp8", "rowwise", "--dtype", "fp64"], "tpk tune: --dtype: expected bf16, fp16 or fp32 with --fp8"),
    (["--fast-accumulation"], "tpk tune: --fast-accumulation: it goes with --fp8"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_bad_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert cli.main(["tune", "8x8x8", *arguments, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out, (out, err)
    assert not cache.exists()

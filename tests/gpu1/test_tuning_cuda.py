"""Autotuning on a GPU: right values of all that it tries, one timing, none in a capture; constants of launches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gemm_checks import gemm, randn
from streamk_cases import filled, hopper_only

import tpkernels as tpk
from tpkernels.ops import _gemm as gemms
from tpkernels.ops import _plans
from tpkernels.testing import assert_close_tiles
from tpkernels.tune import calibrate, cli, constants, grouped, local, scaled

pytestmark = pytest.mark.gpu1
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TPK_CACHE_DIR", str(tmp_path))
    local.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path
    local.forget()


def operands(
    m: int, n: int, k: int, lies: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    a = (
        randn(m, k, dtype=BF16, generator=generator)
        if lies[0] == "k"
        else randn(k, m, dtype=BF16, generator=generator).t()
    )
    b = (
        randn(n, k, dtype=BF16, generator=generator).t()
        if lies[1] == "k"
        else randn(k, n, dtype=BF16, generator=generator)
    )
    return a, b


@pytest.mark.parametrize("lies", ["kk", "ko", "oo"])
@pytest.mark.parametrize("size", [(300, 520, 4096), (64, 2048, 1024), (77, 131, 515)])
def test_values(size: tuple[int, int, int], lies: str, generator: torch.Generator) -> None:
    """77 x 131 x 515 cannot be loaded by the Hopper kernel: no tile of it may be asked for."""
    m, n, k = size
    a, b = operands(m, n, k, lies, generator)
    bias = randn(n, dtype=BF16, generator=generator)
    want = torch.relu(a.double() @ b.double() + bias.double())
    magnitude = a.double().abs() @ b.double().abs() + bias.double().abs()
    with tpk.autotune():
        y = tpk.matmul(a, b, bias=bias, activation="relu")
        record = tpk.last_path()
        again = tpk.matmul(a, b, bias=bias, activation="relu")
    assert record is not None and record.why.startswith("tuned: "), record
    assert torch.equal(y, again) and local.counts.timed == 1
    assert_close_tiles(y, want, BF16, k=k, magnitude=magnitude)
    tried = local.time_all(local.Call(a, b, gemms.Epilogue(bias=bias, activation="relu"), BF16), "cublas")
    for candidate, us in tried:
        assert 0 < us < float("inf"), candidate
        choice = local.Choice(candidate.gemm, "", plan=candidate.plan)
        e = gemms.Epilogue(bias=bias, activation="relu")
        made = gemms.run(choice, a, b, e, out_dtype=BF16).out
        assert_close_tiles(made, want, BF16, k=k, magnitude=magnitude)


def test_another_process_reads_what_was_timed(generator: torch.Generator, cache: Path) -> None:
    a, b = operands(256, 512, 768, "kk", generator)
    with tpk.autotune():
        first = tpk.matmul(a, b)
    local.forget()
    with tpk.autotune("read"):
        assert torch.equal(tpk.matmul(a, b), first)
    assert (local.counts.timed, local.counts.found) == (0, 1)
    (file,) = cache.glob("tuned-*.json")
    assert '"cublas": "' in file.read_text() and torch.cuda.get_device_name() in file.read_text()


def test_nothing_is_timed_in_a_capture(generator: torch.Generator) -> None:
    a, b = operands(128, 256, 512, "kk", generator)
    want = tpk.matmul(a, b)
    untuned = tpk.last_path()
    graph = torch.cuda.CUDAGraph()
    with tpk.autotune():
        with torch.cuda.graph(graph):
            y = tpk.matmul(a, b)
        record = tpk.last_path()
        assert record is not None and untuned is not None
        assert "captured" in record.why and record.path == untuned.path
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want) and local.counts.timed == 0
        tpk.matmul(a, b)
        assert local.counts.timed == 1
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            y = tpk.matmul(a, b)
        record = tpk.last_path()
        assert record is not None and record.why.startswith("tuned: ")
        graph.replay()
        assert torch.equal(y, tpk.matmul(a, b))


def test_sums_into_a_tensor_are_timed_elsewhere(generator: torch.Generator) -> None:
    a, b = operands(384, 640, 512, "oo", generator)
    into = randn(384, 640, dtype=torch.float32, generator=generator)
    want = into.double() + a.double() @ b.double()
    with tpk.autotune():
        tpk.matmul(a, b, accumulate_into=into)
    assert local.counts.timed == 1
    assert_close_tiles(into, want, torch.float32, k=512)


@pytest.mark.parametrize("follows", ["plain", "bias", "gate"])
def test_groups(follows: str, generator: torch.Generator) -> None:
    """Every plan is right; sizes that are near are not timed again."""
    sizes, n, k = [300, 0, 129, 77, 6], 264, 1024
    a = randn(512, k, dtype=BF16, generator=generator)
    b, gate = (randn(5, n, k, dtype=BF16, generator=generator).mT / 16 for _ in range(2))
    bias = randn(5, n, dtype=BF16, generator=generator)
    e = {
        "plain": gemms.PLAIN,
        "bias": gemms.Epilogue(bias=bias, activation="relu"),
        "gate": gemms.Epilogue(gate=gate, activation="relu"),
    }[follows]
    given = {name: getattr(e, name) for name in ("bias", "gate") if getattr(e, name) is not None}
    given["activation"] = None if follows == "plain" else "relu"

    def exact(part: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """And of what size its terms are."""
        rows = part.double().split(sizes)
        up, sums, gated = (
            torch.cat([f(x) @ f(w.double()) for x, w in zip(rows, ws, strict=True)])
            for ws, f in ((b, lambda x: x), (b, torch.abs), (gate, lambda x: x))
        )
        of = torch.tensor(sizes, device="cuda")
        if follows == "gate":
            of_gate = torch.cat([x.abs() @ w.double().abs() for x, w in zip(rows, gate, strict=True)])
            return torch.relu(gated) * up, sums * of_gate
        if follows == "bias":
            added = bias.double().repeat_interleave(of, 0)
            return torch.relu(up + added), sums + added.abs()
        return up, sums

    want, magnitude = exact(a, sizes)
    with tpk.autotune():
        y = tpk.grouped_matmul(a, b, sizes, **given)
        record = tpk.last_path()
        assert record is not None and record.why.startswith("tuned: "), record
        assert torch.equal(y, tpk.grouped_matmul(a, b, sizes, **given)) and local.counts.timed == 1
        assert_close_tiles(y, want, BF16, k=k, magnitude=magnitude)
        others = [1, 400, 100, 0, 11]
        got = tpk.grouped_matmul(a, b, others, **given)
        assert local.counts.timed == 1 and tpk.last_path().why == record.why  # type: ignore[union-attr]
        ours = exact(a, others)
        assert_close_tiles(got, ours[0], BF16, k=k, magnitude=ours[1])
    call = grouped.GroupedCall(a, b, e, sizes, BF16)
    tried = local.time_all(call, "cublas")
    assert len({candidate.plan for candidate, _ in tried}) >= 4
    for candidate, us in tried:
        assert 0 < us < float("inf"), candidate
        choice = local.Choice(candidate.gemm, "", plan=candidate.plan)
        (made,) = call.runner()(choice, call.operands())  # type: ignore[misc]
        assert_close_tiles(made, want, BF16, k=k, magnitude=magnitude, name=candidate.what)


@hopper_only
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_fp8(scaling: str, generator: torch.Generator) -> None:
    """Every plan of every kernel for FP8 is right; one timing."""
    m, n, k = 320, 1024, 4096
    of_a, of_b = ("blockwise_1x128", "blockwise_128x128") if scaling == "blockwise" else (scaling, scaling)
    a = tpk.quantize(randn(m, k, dtype=BF16, generator=generator), of_a)
    b = tpk.quantize(randn(n, k, dtype=BF16, generator=generator), of_b).t()
    left, right = (x.dequantize(torch.float64) for x in (a, b))
    want, magnitude = left @ right, left.abs() @ right.abs()
    with tpk.autotune():
        y = tpk.scaled_matmul(a, b)
        record = tpk.last_path()
        assert record is not None and record.why.startswith("tuned: "), record
        assert torch.equal(y, tpk.scaled_matmul(a, b)) and local.counts.timed == 1
    assert_close_tiles(y, want, BF16, k=k, magnitude=magnitude)
    for fast in [False] if scaling == "blockwise" else [False, True]:
        call = scaled.ScaledCall(a.data, b.data, a.scale, b.scale, None, BF16, fast)
        tried = local.time_all(call, "cublas")
        assert len({candidate.plan for candidate, _ in tried}) >= 4
        for candidate, us in tried:
            assert 0 < us < float("inf"), candidate
            choice = local.Choice(candidate.gemm, "", plan=candidate.plan)
            made = call.runner()(choice, call.operands())
            assert isinstance(made, torch.Tensor)
            # The tensor cores add with some 14 bits: 128 of K before sums are promoted, or all of it.
            slack = 64.0 if fast else 4.0
            assert_close_tiles(made, want, BF16, k=k, magnitude=magnitude, slack=slack, name=candidate.what)


def test_the_command_takes_groups_and_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plain", "--device", "cuda"]
    assert cli.main(["tune", "256x512x512", "--groups", "4", "--epilogue", "gate+activation", *options]) == 0
    assert "in 4 groups" in capsys.readouterr().out
    if hasattr(torch.ops.tpkernels, "scaled_gemm") and torch.cuda.get_device_capability() == (9, 0):
        assert cli.main(["tune", "256x512x512", "--fp8", "blockwise", *options]) == 0
        assert "FP8, blockwise, to bfloat16" in capsys.readouterr().out


@hopper_only
def test_constants_reach_launches(generator: torch.Generator) -> None:
    """With cut tiles made too expensive a launch by "auto" has the bits of whole tiles."""
    m, n, k = 1024, 1024, 16384  # a few tiles with a long K: cut
    a = randn(1, m, k, dtype=BF16, generator=generator)
    b = randn(1, n, k, dtype=BF16, generator=generator).mT
    device = torch.device("cuda", torch.cuda.current_device())
    product = _plans.Product(1, m, n, k)

    def run(**options: str) -> torch.Tensor:
        out = filled(1, m, n, dtype=torch.float32)
        gemm(a, b, out, **options)
        return out

    usual, before = run(), constants.read("sm90")
    assert _plans.plan(product, _plans.machine_of("cuda", device))["partial_tiles"] > 0
    try:
        constants.use("sm90", before | {"split_launch_us": 1e6, "divided_us": 1e6})
        plan = _plans.plan(product, _plans.machine_of("cuda", device))
        assert plan["partial_tiles"] == 0
        whole = run()
        tile = _plans.tile_name(plan, _plans.machine_of("cuda", device))
        assert torch.equal(whole, run(schedule="data_parallel", tile=tile))
        assert not torch.equal(whole, usual)
    finally:
        constants.use("sm90", None)
    assert constants.read("sm90") == before and torch.equal(run(), usual)


def test_constants_of_the_portable_kernel_reach_launches(generator: torch.Generator) -> None:
    """With waits made too expensive a launch by "auto" has the bits of whole tiles, in float32 too."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind = constants.kinds_of(device)[-1]
    machine = _plans.machine_of("cuda", device)._replace(architecture=kind)
    m, n, k = 128, 128, 16384  # a few tiles with a long K: cut
    a = randn(1, m, k, dtype=torch.float32, generator=generator)
    b = randn(1, k, n, dtype=torch.float32, generator=generator)
    product = _plans.Product(1, m, n, k, dtype="float32")

    def run(**options: str) -> torch.Tensor:
        out = filled(1, m, n, dtype=torch.float32)
        gemm(a, b, out, **options)
        return out

    usual, before = run(), constants.read(kind)
    assert _plans.plan(product, machine)["partial_tiles"] > 0
    try:
        constants.use(kind, before | {"cut_us": 1e6})
        plan = _plans.plan(product, machine)
        assert plan["partial_tiles"] == 0
        whole = run()
        assert torch.equal(whole, run(schedule="data_parallel", tile=_plans.tile_name(plan, machine)))
        assert not torch.equal(whole, usual)
    finally:
        constants.use(kind, None)
    assert constants.read(kind) == before and torch.equal(run(), usual)


def test_the_portable_kernel_is_calibrated() -> None:
    """Every precision is timed by plans of its own tiles, TF32 as such."""
    device = torch.device("cuda", torch.cuda.current_device())
    precision = torch.backends.cuda.matmul.fp32_precision
    found = calibrate.calibrate(device, portable=True, shapes=((512, 512, 512), (256, 384, 2048)))
    assert found.kind in constants.PORTABLE and found.samples >= 2 * 2 * 4
    assert found.after.rms <= 1.1 * found.before.rms
    assert torch.backends.cuda.matmul.fp32_precision == precision


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "16..32x512x512", "--plain", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "2 products of bfloat16" in out and "cublas us" in out
    assert cli.main(["tune", "16..32x512x512", "--plain", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.count("(known)") == 2

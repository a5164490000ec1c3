"""The suite ``sweep``: its sample, its memory, what its check must see, and what becomes of variants that go wrong."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cli, resume, start
from bench.bars import SWEEP_SEED, SWEEP_SHAPES
from bench.checks import tolerance
from bench.context import Context
from bench.errors import BenchError
from bench.plan import Job, Selection, Settings, plan
from bench.projections import Projection
from bench.records import Header, Row, append
from bench.suite import Options
from bench.suites.gemm_planner import SAME_TILE, Planner, Request
from bench.suites.gemm_shapes import sweep
from bench.suites.sweep import SUITE
from bench.suites.sweep_memory import MOST_COPIES, Memory

CPU = Options(device="cpu", small=True)
GPU = Options(device="cuda")
BF16 = torch.bfloat16
OURS = ["streamk", SAME_TILE, "auto"]


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the sample ----------------------------------------------------------------------------------------------


def test_the_sample_is_that_of_the_bars():
    cases = SUITE.cases(GPU)
    assert len(cases) == SWEEP_SHAPES and GPU.seed == SWEEP_SEED
    assert [c.name for c in cases] == [s.name for s in sweep(SWEEP_SHAPES, SWEEP_SEED)]
    assert {c.dtype for c in cases} == {"bfloat16"} and {c.shape_set for c in cases} == {"sweep"}
    assert [c.params["index"] for c in cases] == list(range(SWEEP_SHAPES))


@pytest.mark.parametrize(("count", "parts"), [(1000, 10), (7, 3), (2, 5)])
def test_parts_are_the_sample(count: int, parts: int):
    whole = SUITE.cases(Options(sweep=count))
    pieces = [SUITE.cases(Options(sweep=count, part=(i, parts))) for i in range(1, parts + 1)]
    assert [c for piece in pieces for c in piece] == list(whole)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(dtypes=("int8",)), "--dtype: 'int8' is not known"),
        (Options(sets=("square",)), "sweep: --set does not choose among sampled shapes; use --shapes"),
        (Options(rows=(8,)), "sweep: --rows does not choose"),
        (Options(models=("llama8b",)), "sweep: --model does not choose"),
    ],
)
def test_what_a_sample_has_no_use_for_is_a_sentence(options: Options, sentence: str):
    with pytest.raises(BenchError, match=sentence):
        SUITE.cases(options)


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "a/b", "1/2/3"])
def test_a_part_is_one_of_several(capsys: pytest.CaptureFixture[str], text: str):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--part", text])
    assert f"expected a part of several such as 3/10, got {text}" in capsys.readouterr().err


def test_options_reach_the_ranks():
    (job,) = plan(
        SUITE, Options(device="cpu", small=True, part=(2, 3), sweep=6), Selection(), set(), Settings()
    )
    assert Job.from_json(job.to_json()).options == job.options
    assert [item.case for item in job.items] == [c.name for c in SUITE.cases(job.options)]


def test_tiles_are_forced_with_the_schedules_that_the_planner_chooses_from():
    names = [v.name for v in SUITE.variants(Options(tiles=("128x256x64/2x1", "64x64x32")))]
    assert names[:2] == ["cublas", "streamk"] and "auto" not in names
    assert [n for n in names if n.endswith("/2x1")] == [
        "streamk:data_parallel@128x256x64/2x1",
        "streamk:hybrid_aligned@128x256x64/2x1",
    ]
    assert "streamk:stream_k@64x64x32" in names
    planner = Planner(1000, 1000, 1000, "sm90", 132)
    assert planner.request("streamk@128x256x64/2x1") == Request("auto", 1, "128x256x64/2x1")


def test_plans_of_wide_dtypes_are_the_portable_kernels(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, str]] = []

    def streamk_plan(*arguments: Any, **more: str) -> Any:
        asked.append({"device": arguments[4], **more})
        return "data_parallel", [64, 64, 16, 4, 4, 4, 1, 0, 1, 1, 1, 0], 1.0

    monkeypatch.setattr(torch.ops.tpkernels, "streamk_plan", streamk_plan)
    Planner(128, 128, 128, "sm90-portable", 132, "float64").plan(Request())
    Planner(128, 128, 128, "sm90", 132).plan(Request())
    assert asked == [{"device": "sm90-portable", "dtype": "float64"}, {"device": "sm90"}]


def test_neither_torch_nor_a_gpu_is_needed_to_list():
    code = (
        "import sys; from bench.suites.sweep import SUITE; from bench.suite import Options; o = Options(sweep=2)\n"
        "assert SUITE.cases(o) and SUITE.variants(o) and SUITE.baseline(o); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_not_profiled():
    with pytest.raises(BenchError, match="bench gemm --sweep N --case NAME --profile"):
        SUITE.workload(SUITE.cases(CPU)[0], Context(CPU))


def test_a_run_goes_on_in_its_file_on_the_same_card_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    planned: list[list[str]] = []
    monkeypatch.setattr(start, "_run_all", lambda given, loaded, plans, *rest: planned.append(
        [item.case for job in plans["sweep"] for item in job.items]) or 0)  # fmt: skip
    monkeypatch.setattr(
        resume, "present", lambda *_: {"cards": ["A"], "torch": "", "nccl": "", "commit": "", "dirty": None}
    )
    path = tmp_path / "r.jsonl"
    command = ["sweep", "--device", "cpu", "--shapes", "6", "--out", str(path)]
    names = [case.name for case in SUITE.cases(Options(device="cpu", small=True, sweep=6))]
    assert cli.main(command) == 0 and planned.pop() == names
    done = [Row("sweep", name, "matmul", variant, "ours", dtype="float32", run="r")
            for name in names[:4] for variant in ("blas", *OURS)]  # fmt: skip
    append(path, Header("r", "sweep", "", [], {"gpu": "A"}), *done)
    assert cli.main(command) == 0 and planned.pop() == names[4:]
    assert cli.main([*command, "--part", "3/3"]) == 0 and planned.pop() == names[4:]
    assert cli.main([*command, "--part", "2/3"]) == 0 and planned.pop() == []
    monkeypatch.setattr(
        resume, "present", lambda *_: {"cards": ["B"], "torch": "", "nccl": "", "commit": "", "dirty": None}
    )
    assert cli.main(command) == 2 and not planned
    assert "was measured on A, this is B; choose another file with --out" in capsys.readouterr().err


# --- the check -----------------------------------------------------------------------------------------------


def product(
    generator: torch.Generator, m: int, n: int, k: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = (
        (torch.rand(s, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype) for s in ((m, k), (n, k))
    )
    b = b.t()
    return a, b, (a.double() @ b.double()).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n", "k"), [(512, 1024, 256), (64, 64, 4096), (130, 100, 72), (200, 333, 128)])
def test_right_products_pass(generator: torch.Generator, m: int, n: int, k: int, dtype: torch.dtype):
    a, b, out = product(generator, m, n, k, dtype)
    assert Projection.of(a, b, generator).error(out) < 0.9 * tolerance(dtype)


@pytest.fixture
def judged(generator: torch.Generator) -> tuple[Projection, torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, out = product(generator, 640, 896, 512)
    return Projection.of(a, b, generator), a, b, out


def test_a_wrong_tile_is_seen(judged: Any, generator: torch.Generator):
    projection, _, _, out = judged
    for m, n in ((0, 0), (512, 768), (128, 256)):
        wrong = out.clone()
        wrong[m : m + 128, n : n + 128] = wrong[m : m + 128, n : n + 128].roll(1, 0)
        assert projection.error(wrong) > 0.9
    # What one warp stores at a time, and one element of usual size.
    wrong = out.clone()
    wrong[304:320, 128:144] = 0
    assert projection.error(wrong) > 4 * tolerance(BF16)
    wrong = out.clone()
    wrong[300, 700] += math.sqrt(512) / 3
    assert projection.error(wrong) > 2 * tolerance(BF16)


def test_a_missing_slab_of_k_is_seen(judged: Any):
    projection, a, b, out = judged
    slab = slice(192, 256)
    less = (a[:, slab].double() @ b[slab].double()).to(BF16)
    wrong = out.clone()
    wrong[:128, 640:] -= less[:128, 640:]
    assert projection.error(wrong) > 50 * tolerance(BF16)
    assert projection.error((out.double() * (1 + 2**-6)).to(BF16)) > 2 * tolerance(
        BF16
    )  # systematic, everywhere


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_seen(judged: Any, value: float):
    projection, _, _, out = judged
    out[639, 895] = value
    assert projection.error(out) == math.inf


def test_nothing_to_add_up(generator: torch.Generator):
    a, b, out = product(generator, 64, 128, 0)
    projection = Projection.of(a, b, generator)
    assert projection.error(out) == 0.0
    out[5, 5] = 1e-3
    assert projection.error(out) == math.inf
    a, b, out = product(generator, 0, 128, 8)
    assert Projection.of(a, b, generator).error(out) == 0.0


# --- memory --------------------------------------------------------------------------------------------------


def test_operands_are_views_of_one_pool_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "copies", lambda self, set_bytes, at_least=2: 5)
    memory = Memory(Context(CPU), BF16)
    made = memory.products(100, 72, 40)
    assert len(made.sets) == 5 and made.outputs.shape == (5, 7200)
    spans = []
    for p in made.sets:
        assert (p.a.shape, p.b.shape, p.out.shape) == ((100, 40), (40, 72), (100, 72))
        assert p.a.stride() == (40, 1) and p.b.stride() == (1, 40) and p.out.is_contiguous()
        for x in (p.a, p.b, p.out):
            assert (x.untyped_storage().data_ptr() - x.data_ptr()) % 256 == 0
            spans.append((x.data_ptr(), x.data_ptr() + 2 * x.numel()))
        assert p.a.unique().numel() > 100 and bool((p.a.abs() <= 1).all())
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    made.outputs.fill_(math.nan)
    assert all(bool(p.out.isnan().all()) for p in made.sets)
    before = made.sets[0].a.data_ptr()
    again = memory.products(100, 72, 40)
    assert again.sets[0].a.data_ptr() != before  # other numbers for the next shape
    assert memory.products(3000, 72, 4000).sets[4].a.shape == (3000, 4000)  # grown


def test_many_small_sets_are_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "copies", lambda self, set_bytes, at_least=2: 512)
    assert len(Memory(Context(CPU), BF16).products(64, 64, 64).sets) == MOST_COPIES

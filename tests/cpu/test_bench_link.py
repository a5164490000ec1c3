"""The link suite without ranks: what it measures, the constants it fits, and its kernels compiled and emulated."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.context import Context
from bench.errors import BenchError
from bench.records import Row, Stats
from bench.suite import Options
from bench.suites.link import SUITE
from bench.suites.link_cases import EXCHANGES, MIB, layout, moved_bytes, size_name, transports
from bench.suites.link_fit import crossover, fit_line, link_constants

ROOT = Path(__file__).resolve().parents[2]


def measured(options: Options) -> dict[str, list[str]]:
    """Variants by case."""
    names = [v.name for v in SUITE.variants(options)]
    return {c.name: [n for n in names if SUITE.applies(c, n, options)] for c in SUITE.cases(options)}


# --- what is measured --------------------------------------------------------------------------------------------


def test_names_are_unique_and_every_case_and_variant_is_used():
    for options in (
        Options(world=4),
        Options(world=1),
        Options(world=8, sets=("full",)),
        Options(world=2, small=True),
        Options(world=2, small=True, device="cpu"),
    ):
        cases = [(c.name, c.dtype) for c in SUITE.cases(options)]
        names = [v.name for v in SUITE.variants(options)]
        assert len(cases) == len(set(cases)) and len(names) == len(set(names))
        found = measured(options)
        assert all(found.values()), "a case that nothing measures"
        unused = set(names) - {n for of_case in found.values() for n in of_case}
        assert not unused or options.world == 1, unused


def test_one_rank_measures_only_its_device():
    ops = {c.op for c in SUITE.cases(Options(world=1))}
    assert ops == {"copy", "matmul"}
    between = {*EXCHANGES, "beside", "flag_round_trip"}
    assert {c.op for c in SUITE.cases(Options(world=2))} == ops | between


def test_the_tables_of_the_design_are_covered():
    found = measured(Options(world=4))
    for sms in (4, 8, 16, 32):
        for op, kinds in (("push", ("bulk", "lsu")), ("pull", ("bulk pull", "lsu pull"))):
            assert {f"{kind} {sms} SMs" for kind in kinds} <= set(found[f"{op} 128 MiB"])
    for mib in (2, 8, 25):
        wanted = {"engine", "engine pull", "engine +flag", "engine x4", "nccl"}
        wanted |= {f"bulk {way}{sms} SMs" for way in ("", "pull ") for sms in (8, 16, 32)}
        assert wanted <= set(found[f"all_gather {mib} MiB"])
        assert {"engine", "bulk 8 SMs", "bulk 16 SMs", "bulk 32 SMs", "nccl"} <= set(
            found[f"scatter {mib} MiB"]
        )
    beside = {c.name: c.params for c in SUITE.cases(Options(world=4)) if c.op == "beside"}
    assert {name: tuple(p.values()) for name, p in beside.items()} == {
        "beside gpt3 M8192": (8192, 6144, 12288, 2048 * 12288 * 2),
        "beside llama70b M8192": (8192, 3584, 8192, 2048 * 8192 * 2),
        "beside llama70b M2048": (2048, 3584, 8192, 512 * 8192 * 2),
        "beside llama8b M8192": (8192, 1792, 4096, 2048 * 4096 * 2),
    }
    assert sum(map(len, found.values())) < 260, "the default set has to take about a minute"


def test_full_set_has_every_count_at_every_size():
    found = measured(Options(world=4, sets=("full",)))
    for size in ("256 KiB", "128 MiB"):
        for sms in (1, 2, 4, 8, 16, 32, "all"):
            assert {f"bulk {sms} SMs", f"lsu {sms} SMs"} <= set(found[f"push {size}"])


def test_options_select():
    assert {c.op for c in SUITE.cases(Options(world=4, ops=("push", "copy")))} == {"push", "copy"}
    assert {c.dtype for c in SUITE.cases(Options(world=1, dtypes=("float16",), ops=("matmul",)))} == {
        "float16"
    }
    beside = SUITE.cases(Options(world=4, ops=("beside",), models=("qwen32b",), rows=(4096, 100)))
    assert [(c.params["m"], c.params["n"], c.params["k"]) for c in beside] == [
        (4096, 3200, 5120),
        (100, 3200, 5120),
    ]
    assert all(c.params["bytes"] * 4 >= c.params["m"] * c.params["k"] * 2 for c in beside)
    assert all(c.params["bytes"] % 256 == 0 for c in beside)


@pytest.mark.parametrize(
    "options,expected",
    [
        (Options(ops=("psuh",)), "'psuh' is not known.*Did you mean 'push'"),
        (Options(sets=("huge",)), "set: 'huge'.*default, full"),
        (Options(dtypes=("float8",)), "dtype: 'float8'.*bfloat16, float16"),
        (Options(models=("gpt4",)), "model: 'gpt4'.*Did you mean 'gpt3'"),
    ],
)
def test_unknown_options_are_refused(options, expected):
    with pytest.raises(BenchError, match=expected):
        SUITE.cases(options)


def test_bytes():
    assert [size_name(n) for n in (512, 4096, 256 << 10, 25 * MIB, 1 << 30)] == [
        "512 B",
        "4 KiB",
        "256 KiB",
        "25 MiB",
        "1 GiB",
    ]
    s = 1000
    assert [moved_bytes(op, s, 4) for op in EXCHANGES] == [s, s, 3 * s, 3 * s, 3 * s, 1.5 * s]
    assert [layout(op, s, 4).total for op in EXCHANGES] == [2 * s, 2 * s, 4 * s, 8 * s, 5 * s, s]
    case = next(c for c in SUITE.cases(Options(world=4)) if c.name == "all_gather 25 MiB")
    assert case.bytes == 3 * 25 * MIB
    assert SUITE.bytes_needed(case, Options(world=4)) == 2 * 4 * 25 * MIB


def test_cases_import_no_torch():
    code = (
        "import sys; from bench.suites.link import SUITE; from bench.suite import Options; "
        "SUITE.cases(Options(world=4)); SUITE.variants(Options()); print('torch' in sys.modules, 'cupy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_copy_and_product_are_checked():
    context = Context(Options(device="cpu", small=True))
    for case in SUITE.cases(context.options):
        work = SUITE.workload(case, context)
        runnable = work.prepare("torch")
        runnable.poison()
        assert not runnable.check().ok
        for i in range(runnable.copies):
            runnable.launch(i)
        assert runnable.check().ok
        if case.op == "copy":
            work.targets[1][-1] += 1
        else:
            work.out[1][3:67] *= 1.01
        assert not runnable.check().ok


# --- constants ---------------------------------------------------------------------------------------------------


def test_line_is_recovered_from_noisy_points(rng):
    for overhead, gbps in ((5.0, 357.0), (0.0, 900.0), (30.0, 40.0)):
        slope = 1e-3 / gbps
        sizes = [n * 1024.0 for n in (256, 1024, 2048, 4096, 8192, 16384, 25600, 131072)]
        points = [(x, (overhead + slope * x) * float(1 + rng.uniform(-0.01, 0.01))) for x in sizes]
        found, per_byte = fit_line(points)
        assert found == pytest.approx(overhead, rel=0.05, abs=0.1)
        assert 1e-3 / per_byte == pytest.approx(gbps, rel=0.02)


def test_line_of_exact_points_and_bad_ones():
    assert fit_line([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]) == pytest.approx((1.0, 2.0))
    overhead, slope = fit_line([(1.0, 1.0), (2.0, 3.0)])  # no negative overhead
    assert overhead == 0.0
    assert slope == pytest.approx((1 / 1 + 2 / 3) / (1 + 4 / 9))
    for points in ([], [(1.0, 1.0)], [(2.0, 1.0), (2.0, 1.5)]):
        with pytest.raises(ValueError, match="at least two different x"):
            fit_line(points)


def test_crossover():
    engine = {1.0: 28.0, 2.0: 33.0, 4.0: 50.0, 8.0: 84.0}
    sms = {1.0: 15.0, 2.0: 25.0, 4.0: 54.0, 8.0: 100.0, 16.0: 1.0}
    assert crossover(sms, engine) == pytest.approx(2.0 + 2.0 * 8 / 12)
    assert crossover(sms, dict.fromkeys(engine, 1.0)) == 0.0
    assert crossover(sms, dict.fromkeys(engine, 1000.0)) == 8.0
    assert crossover({}, engine) is None and crossover({3.0: 1.0}, engine) is None
    # Noise at a small size does not hide a later crossing.
    assert crossover({1.0: 2.0, 2.0: 1.0, 4.0: 5.0}, {1.0: 1.0, 2.0: 2.0, 4.0: 4.0}) == pytest.approx(3.0)


def rows_of_a_machine(world: int = 4) -> list[Row]:
    """Rows as the suite writes them, of a machine whose constants are known."""

    def stats(us: float) -> Stats:
        return Stats(us * 0.99, us, us * 1.02, us * 0.98, 20)

    rows = []
    options = Options(world=world)
    for case in SUITE.cases(options):
        for t in transports(options):
            if not SUITE.applies(case, t.name, options):
                continue
            size = float(case.params.get("bytes", 0))
            pieces = world - 1 if case.op == "all_gather" else 1
            extra = {"kind": t.kind, "sms": t.sms or 132, "pull": t.pull, "flag": t.flag, "chunks": t.chunks}
            us = 1000.0
            if case.op == "copy":
                us = case.bytes / 3000e3
            elif case.op == "matmul":
                us = case.flops / (780e6 if case.dtype == "bfloat16" else 790e6)
            elif t.kind == "engine":
                us = pieces * (5.0 * t.chunks + size / 360e3 + 1.5 * t.flag)
            elif t.by_sms:
                us = 3.0 + pieces * size / min(330e3, (t.sms or 132) * 42e3) + 0.8 * t.flag
            elif t.kind == "nccl":
                us = 20 + case.bytes / 240e3
            elif case.op == "flag_round_trip":
                us = 2.4
            if case.op == "beside":
                extra |= {"gemm_slowdown": 1.02 if t.name == "engine" else 1.15}
            fields = {"dtype": case.dtype, "world": world, "params": dict(case.params), "us": stats(us)}
            fields |= {"flops": case.flops, "bytes": case.bytes, "extra": extra}
            rows.append(Row("link", case.name, case.op, t.name, "ceiling", **fields))
    return rows


def test_constants_of_a_known_machine():
    rows = rows_of_a_machine()
    (row,) = SUITE.summarise(rows)
    assert (row.op, row.variant, row.world, row.us, row.status) == ("constants", "fit", 4, None, "ok")
    found = row.extra
    expected = {
        "hbm_gbps": 3000.0,
        "peak_tflops_bf16": 780.0,
        "peak_tflops_fp16": 790.0,
        "copy_engine_gbps": 360.0,
        "copy_engine_overhead_us": 5.0,
        "flag_cost_us": 1.5,
        "sm_flag_cost_us": 0.8,
        "flag_round_trip_us": 2.4,
        "engine_beside_gemm_slowdown": 1.02,
        "sm_beside_gemm_slowdown": 1.15,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert found["sm_push_gbps_4sms"] == pytest.approx(168, rel=0.01)
    assert found["sm_pull_gbps_16sms"] == pytest.approx(330, rel=0.01)
    assert "sm_push_gbps_132sms" in found
    sent = 3 * 25 * MIB
    assert found["nccl_reduce_scatter_gbps"] == pytest.approx(sent * 1e-3 / (20 + sent / 240e3), rel=1e-3)
    # 15 + 3 x/360 = 3 + 3 x/330 at the crossing
    assert found["sm_crossover_bytes"] == pytest.approx(12 / (3 / 330e3 - 3 / 360e3), rel=0.02)


def test_constants_without_some_rows():
    rows = rows_of_a_machine()
    assert link_constants([]) == {} and SUITE.summarise([]) == []
    only = [r for r in rows if r.op == "copy"]
    assert set(link_constants(only)) == {"hbm_gbps"}
    failed = [Row(r.suite, r.case, r.op, r.variant, r.role, "failed", us=r.us, bytes=r.bytes) for r in only]
    assert link_constants(failed) == {}
    assert "copy_engine_gbps" not in link_constants([r for r in rows if r.case == "push 1 MiB"])
    random.Random(3).shuffle(rows)
    assert link_constants(rows) == link_constants(rows_of_a_machine())


def test_constants_are_plain_numbers():
    assert all(isinstance(value, (int, float)) for value in link_constants(rows_of_a_machine()).values())
    assert math.isfinite(sum(link_constants(rows_of_a_machine()).values()))

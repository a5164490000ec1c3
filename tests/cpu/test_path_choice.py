"""The model behind path "auto": what it chooses for shapes that were measured, and where it must be careful."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest

from bench import fit_paths
from bench.cli import main
from bench.errors import BenchError
from bench.records import Header, Row, Stats, append, load
from tpkernels.comm import choice, fitting, machines
from tpkernels.comm.choice import GATHER, SCATTER, SUM, Call, Machine, Overlap, Quick
from tpkernels.errors import ArgumentError

RESULTS = Path(fit_paths.__file__).parent / "results"
POINTS = ((1e6, 20.0), (1e8, 400.0))
MACHINE = Machine(
    "card",
    4,
    tflops=700.0,
    memory_gbps=4000.0,
    launch_us=4.0,
    apart=dict.fromkeys(choice.OPS, POINTS),
    fused=dict.fromkeys(choice.OPS, Overlap(300.0, 0.1, 30.0, 2.0)),
    quick=dict.fromkeys(choice.OPS, Quick(8.0, 100.0, 1 << 20)),
)
GPT3 = Call(GATHER, (2048,) * 4, 6144, 12288)


def with_fused(machine: Machine, **changes: float) -> Machine:
    fused = {op: overlap._replace(**changes) for op, overlap in machine.fused.items()}
    return dataclasses.replace(machine, fused=fused)


# Shapes that were measured, with the constants that are committed


def measured() -> list[tuple[str, Machine, str, fitting.Sample, float | None]]:
    """Both paths of every case, with the time of NCCL + cuBLAS; of each machine the last file with fused rows."""
    cases, latest = [], {}
    files = sorted(RESULTS.glob("*.jsonl"))
    for file in files:
        for key, samples in fit_paths.measured(load(file)).samples.items():
            if any(sample.fused_us is not None for sample in samples):
                latest[key] = file
    for key, file in latest.items():
        machine = machines.find(*key)
        assert machine is not None and machine.world == key[1], f"{key} is measured, but not in the table"
        # What auto runs where it does not fuse may stand in another file.
        found = fit_paths.measured(load(*[other for other in files if other != file], file))
        baseline = {
            row.case: row.us.p50 for row in load(file).rows if row.variant == "nccl+cublas" and row.us
        }
        for name, sample in zip(found.cases[key], found.samples[key], strict=True):
            if sample.fused_us is not None and sample.apart_us is not None:
                cases.append((f"{key[0]} x{key[1]}", machine, name, sample, baseline.get(name)))
    return cases


@pytest.mark.parametrize("case", measured(), ids=lambda case: f"{case[0]} {case[2]}")
def test_measured_shapes(case):
    """No more than 3 % are lost to the other path, and what wins by 10 % is fused."""
    _, machine, _, sample, baseline = case
    told = choice.choose(sample.call, machine)
    taken, other = (sample.fused_us, sample.apart_us)[:: 1 if told.fused else -1]
    assert taken <= 1.03 * other, told.why
    assert told.fused or sample.fused_us > sample.apart_us / 1.10, told.why
    # Slower than NCCL + cuBLAS is auto only where both of our paths are.
    if baseline is not None:
        assert taken <= 1.03 * max(baseline, min(taken, other)), told.why


def test_there_are_measured_shapes():
    assert len(measured()) >= 30


@pytest.mark.parametrize("machine", machines.MACHINES, ids=lambda m: f"{m.card} x{m.world}")
def test_small_calls_are_not_fused(machine):
    """Nor is what was not measured because it is small."""
    for op in choice.OPS:
        for m in (1, 16, 64):
            call = Call(op, (m,) + (0,) * (machine.world - 1), 4096, 4096)
            if not choice.is_quick(call, machine):
                told = choice.choose(call, machine)
                assert not told.fused, told.why


# The table


def test_unknown_card():
    assert machines.find("NVIDIA B200", 4) is None
    assert machines.find("NVIDIA H100 PCIe", 4) is None, "it has no NVLink to all"


def test_other_numbers_of_ranks():
    """The nearest that was measured counts, and the sentence says so."""
    two, eight = machines.find("NVIDIA H200", 2), machines.find("NVIDIA H200", 8)
    assert (two.world, eight.world) == (2, 4)
    call = GPT3._replace(rows=(1024,) * 8)
    assert choice.choose(call, eight).why.endswith("(constants of 4 ranks)")
    assert "constants" not in choice.choose(GPT3, eight).why


def test_json():
    for machine in (*machines.MACHINES, MACHINE):
        assert Machine.from_json(machine.to_json()) == machine
    for text in ("", "{}", "[1]", MACHINE.to_json().replace("all_gather", "gather"), '{"card": "x"}'):
        with pytest.raises(ArgumentError, match="Machine\\.to_json"):
            Machine.from_json(text)


# The model


def test_the_sentence():
    told = choice.choose(GPT3, MACHINE)
    assert (
        told.fused and told.why == f"fused: {told.fused_us:.0f} us predicted, nccl+cublas {told.apart_us:.0f}"
    )
    told = choice.choose(GPT3, with_fused(MACHINE, us=1e4), apart="gloo+blas")
    assert not told.fused and told.why.startswith(f"gloo+blas: {told.apart_us:.0f} us predicted, fused ")


def test_a_gain_within_the_margin_is_not_taken():
    level = choice.choose(GPT3, MACHINE)
    for part, takes in ((0.98, False), (0.96, True)):
        us = 30 + part * level.apart_us - level.fused_us
        assert choice.choose(GPT3, with_fused(MACHINE, us=us)).fused is takes


def test_slower_constants_predict_longer_times():
    for op in choice.OPS:
        call = Call(op, (2048,) * 4, 4096, 4096)
        before = choice.choose(call, MACHINE).fused_us
        for changes in ({"gbps": 30.0}, {"exposed": 0.5}, {"us": 60.0}, {"us_per_k": 9.0}):
            assert choice.choose(call, with_fused(MACHINE, **changes)).fused_us > before, changes


def test_more_work_takes_longer():
    for op in choice.OPS:
        for one in (Call(op, (64,) * 4, 512, 512), Call(op, (2048,) * 4, 4096, 4096)):
            before = choice.choose(one, MACHINE)
            rows = tuple(2 * m for m in one.rows)
            for more in (one._replace(rows=rows), one._replace(n=2 * one.n), one._replace(k=2 * one.k)):
                after = choice.choose(more, MACHINE)
                assert after.fused_us >= before.fused_us and after.apart_us >= before.apart_us


def test_many_pairs_are_put_side_by_side_by_copies():
    one, most = Call(SCATTER, (2048,) * 4, 4096, 4096), choice.MOST_PAIRS
    few, many = (choice.choose(one._replace(pairs=pairs), MACHINE).fused_us for pairs in (most, most + 1))
    assert many > few == choice.choose(one, MACHINE).fused_us
    header = Path(__file__).parents[2] / "csrc/kernels/gemm_hooks.hpp"
    assert f"kMaxPairs = {most};" in header.read_text()


def test_what_travels():
    rows, of_k, of_n = (3, 5, 0, 4), 100, 7
    assert choice.travelling(Call(GATHER, rows, of_n, of_k)) == 12 * of_k * 2
    assert choice.travelling(Call(SCATTER, rows, of_n, of_k, 2, 4)) == 12 * of_n * 4
    assert choice.travelling(Call(SUM, (3,) * 4, of_n, of_k)) == 2 * 9 * of_n * 2


def test_between_points():
    assert choice.between(POINTS, 1e6) == 20 and choice.between(POINTS, 1e8) == 400
    assert choice.between(POINTS, (1e6 + 1e8) / 2) == pytest.approx(210)
    assert choice.between(POINTS, 1.99e8) == pytest.approx(780)
    # Not measured: in proportion, but no less than latency.
    assert choice.between(POINTS, 5e5) == pytest.approx(10)
    assert choice.between(POINTS, 0) == choice.between(POINTS, 1e5) == pytest.approx(20 * 262144 / 1e6)


@pytest.mark.parametrize("op, rounds", [(GATHER, 1), (SCATTER, 1), (SUM, 2)])
def test_small_calls_take_the_kernel_of_low_latency(op, rounds):
    n, k = (1024, 8192)[:: 1 if op == GATHER else -1]
    small, large = Call(op, (16,) * 4, n, k), Call(op, (17,) * 4, n, k)
    assert choice.is_quick(small, MACHINE) and not choice.is_quick(large, MACHINE)
    off = dataclasses.replace(MACHINE, quick=MACHINE.quick | {op: Quick()})
    assert not choice.is_quick(small, off) and choice.is_quick(small._replace(rows=(0,) * 4), off)
    product = choice.product_us(small, MACHINE)
    us = product + 8 + rounds * 48 * 8192 * 2 / 1e5
    assert choice.fused_us(small, MACHINE, product) == pytest.approx(us)
    # Slots are as long as the longest shard, but in an all-reduce.
    assert choice.is_quick(small._replace(rows=(49, 5, 5, 5)), MACHINE) is (op == SUM)


# The fit


def samples_of(machine: Machine) -> list[fitting.Sample]:
    samples = []
    for op in choice.OPS:
        for m, n, k in [
            (8192, 4096, 8192),
            (8192, 1024, 8192),
            (4096, 8192, 1024),
            (1024, 8192, 8192),
            (16, 4096, 4096),
        ]:
            call = Call(op, (m // 4,) * 4, n, k)
            product = choice.product_us(call, machine)
            times = choice.apart_us(call, machine, product), choice.fused_us(call, machine, product)
            samples.append(fitting.Sample(call, product, *times))
    return samples


def test_a_fit_tells_what_it_was_made_from():
    start = dataclasses.replace(
        with_fused(MACHINE, us=90.0, gbps=120.0),
        tflops=300.0,
        quick=dict.fromkeys(choice.OPS, Quick(30.0, 40.0, 1 << 20)),
    )
    samples = samples_of(MACHINE)
    fitted = fitting.fit(samples, start)
    for sample in samples:
        told = choice.choose(sample.call, fitted)
        assert told.apart_us == pytest.approx(sample.apart_us, rel=0.03)
        assert told.fused_us == pytest.approx(sample.fused_us, rel=0.05)
    assert fitted == fitting.fit(samples, start), "not twice the same"


def test_what_no_sample_tells_stays():
    gathers = [sample for sample in samples_of(MACHINE) if sample.call.op == GATHER]
    start = with_fused(MACHINE, us=90.0)
    fitted = fitting.fit([sample._replace(fused_us=None) for sample in gathers], start)
    assert fitted.fused == start.fused and fitted.quick == start.quick
    assert fitted.apart[SUM] == start.apart[SUM] and fitted.apart[GATHER] != start.apart[GATHER]
    assert fitting.fit([], start) is start


# bench fit-paths


def result_file(path: Path, times: dict[str, float], card: str = "NVIDIA H200", world: int = 4) -> Path:
    append(path, Header("run", "overlap", "2026-01-01", env={"gpu": card}))
    for variant, us in times.items():
        append(
            path,
            Row(
                "overlap", "AG made M8192", GATHER, variant, "ours", dtype="bfloat16", world=world, run="run",
                params={"m": 8192, "n": 3584, "k": 8192}, us=Stats.of([us]),
            ),
        )  # fmt: skip
    return path


def test_bench_fits_and_writes(tmp_path, monkeypatch):
    table = tmp_path / "machines.py"
    table.write_text(Path(machines.__file__).read_text())
    monkeypatch.setattr(machines, "__file__", str(table))
    times = {"gemm": 600.0, "nccl+cublas": 900.0, "ours:nccl+cublas": 950.0, "ours:fused": 650.0}
    file = result_file(tmp_path / "r.jsonl", times)
    out = io.StringIO()
    assert fit_paths.run([file], stdout=out) == 0
    assert (
        table.read_text()
        == Path(fit_paths.__file__).parents[1].joinpath("tpkernels/comm/machines.py").read_text()
    )
    assert "AG made M8192" in out.getvalue() and "950 (" in out.getvalue(), "what auto runs counts first"
    assert fit_paths.run([file], write=True, stdout=out) == 0
    made: dict[str, object] = {}
    exec(compile(table.read_text(), str(table), "exec"), made)
    written = {(m.card, m.world): m for m in made["MACHINES"]}
    before = {(m.card, m.world): m for m in machines.MACHINES}
    changed = written.pop(("NVIDIA H200", 4))
    assert changed.apart[GATHER] == ((3 * 2048 * 8192 * 2, 350.0),)
    call = Call(GATHER, (2048,) * 4, 3584, 8192)
    assert choice.choose(call, changed).fused_us == pytest.approx(650, rel=0.02)
    before.pop(("NVIDIA H200", 4))
    assert written == before, "the others stay"


def test_another_card_gets_a_place(tmp_path, monkeypatch):
    table = tmp_path / "machines.py"
    table.write_text(Path(machines.__file__).read_text())
    monkeypatch.setattr(machines, "__file__", str(table))
    file = result_file(tmp_path / "r.jsonl", {"gemm": 600.0, "nccl+cublas": 900.0}, card="new", world=8)
    assert main(["fit-paths", str(file), "--write"]) == 0
    assert '"new", 8, tflops=' in table.read_text()


def test_what_overlapped_with_few_rows_is_outdated(tmp_path):
    """Rows from before these had a kernel say that ours multiplied; others count."""
    for path, m, counts in (
        ("fused+streamk", 256, False),
        ("fused+cublas", 256, True),
        ("fused+streamk", 8192, True),
    ):
        file = tmp_path / f"{path} {m}.jsonl"
        append(file, Header("run", "overlap", "2026-01-01", env={"gpu": "card"}))
        for variant, extra in (("gemm", {}), ("nccl+cublas", {}), ("ours:fused", {"path": path})):
            append(
                file,
                Row(
                    "overlap", "AG", GATHER, variant, "ours", dtype="bfloat16", world=4, run="run",
                    params={"m": m, "n": 3584, "k": 8192}, us=Stats.of([90.0]), extra=extra,
                ),
            )  # fmt: skip
        (sample,) = fit_paths.measured(load(file)).samples["card", 4]
        assert sample.apart_us == 90 and (sample.fused_us == 90) is counts, (path, m)


def test_files_without_such_rows(tmp_path):
    file = result_file(tmp_path / "r.jsonl", {"gemm": 600.0, "comm": 300.0})
    with pytest.raises(BenchError, match="fit-paths: expected rows of suite overlap"):
        fit_paths.run([file])

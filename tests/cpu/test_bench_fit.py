"""Fitting the Hopper cost model, on rows made from known constants."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path
from typing import Any

import pytest

from bench import fit
from bench.cli import main
from bench.errors import BenchError
from bench.records import Header, Row, Stats, append
from tpkernels import _host

SHAPES = [
    (4096, 4096, 4096),
    (2048, 5120, 8192),
    (8192, 1280, 8192),
    (512, 4096, 14336),
    (3072, 3072, 8192),
    (1024, 1024, 65536),
]
TILES = ["128x256x64/2x1", "128x128x64/1x2", "256x192x64/1x2"]


def made_row(size: tuple[int, int, int], tile: str, schedule: str, time: float, **changes: Any) -> Row:
    (found,) = _host.hopper_plans(*size, schedule=schedule, tile=tile)
    s = found.plan.schedule
    plan = dict(schedule=schedule, splits=found.plan.splits, tile_name=tile, multiprocessors=132)
    plan |= dict(workers=s.workers, partial_tiles=s.num_slots, k_iters=s.k_iters)
    values: dict[str, Any] = dict(
        suite="gemm",
        case="x".join(map(str, size)),
        op="matmul",
        variant=f"streamk:{schedule}@{tile}",
        role="ours",
    )
    values |= dict(params=dict(zip("mnk", size, strict=True)), us=Stats.of([time]), extra={"plan": plan})
    return Row(**(values | changes))


def made_rows(truth: dict[str, float], noise: float = 0.0) -> list[Row]:
    rng = random.Random(1)
    rows = []
    for size in SHAPES:
        for tile in TILES:
            for schedule in ("data_parallel", "hybrid_aligned", "stream_k"):
                (found,) = _host.hopper_plans(*size, schedule=schedule, tile=tile)
                us = _host.hopper_predict_us(*size, plan=found, cost=truth)
                rows.append(made_row(size, tile, schedule, us * math.exp(rng.gauss(0, noise))))
    return rows


def other_constants() -> dict[str, float]:
    truth = _host.hopper_cost()
    truth["launch_us"] *= 1.5
    for tile in TILES:
        truth[f"iter_us {tile}"] *= 0.85 if "128x128" in tile else 1.15
    return truth


def test_constants_behind_the_rows_are_found() -> None:
    truth, now = other_constants(), _host.hopper_cost()
    samples, changed = fit.samples_of(made_rows(truth, noise=0.01))
    assert changed == 0 and len(samples) == len(SHAPES) * len(TILES) * 3
    found = fit.fit(samples, now)
    assert fit.score(samples, now).median > 0.05 and fit.score(samples, found).median < 0.02
    for tile in TILES:
        assert found[f"iter_us {tile}"] == pytest.approx(truth[f"iter_us {tile}"], rel=0.05)
    assert found == fit.fit(samples, now)
    left_out = fit.cross_validate(samples, now)
    assert left_out.median < 0.03 and left_out.cases == len(SHAPES)


def test_what_no_row_depends_on_stays() -> None:
    now = _host.hopper_cost()
    samples, _ = fit.samples_of(made_rows(other_constants()))
    found = fit.fit(samples, now)
    for name in ("finish_us", "iter_us 256x128x64/1x1", "epilogue_us 256x128x64"):
        assert found[name] == now[name]


def test_right_constants_are_kept() -> None:
    now = _host.hopper_cost()
    samples, _ = fit.samples_of(made_rows(now))
    assert fit.fit(samples, now) == now
    assert fit.score(samples, now).rms == 0 and fit.score(samples, now).regret == 1


def test_regret_is_of_the_plan_that_is_picked() -> None:
    def sample(us: float, told: float) -> fit.Sample:
        return fit.Sample("case", us, lambda _: told)

    scored = fit.score([sample(100, 90), sample(80, 95), sample(300, 300)], {})
    assert scored.regret == pytest.approx(1.25) and scored.cases == 1
    assert fit.score([sample(100, 90)], {}).cases == 0


def test_rows_that_tell_nothing_are_left_out() -> None:
    good = made_row(SHAPES[0], TILES[0], "data_parallel", 200.0)
    plan = good.extra["plan"]
    others = [
        dict(status="failed"),
        dict(role="peer"),
        dict(op="swiglu"),
        dict(suite="overlap"),
        dict(us=None),
        dict(extra={}),
        dict(extra={"plan": plan | {"tile_name": "128x128x32"}}),
    ]
    rows = [good] + [made_row(SHAPES[0], TILES[0], "data_parallel", 200.0, **change) for change in others]
    assert len(fit.samples_of(rows)[0]) == 1
    again = made_row(SHAPES[0], TILES[0], "data_parallel", 200.0, case="the same in another set")
    assert (
        len({sample.case for sample in fit.samples_of([good, again])[0]}) == 1
    )  # no fold sees half of a shape
    planned = made_row(SHAPES[0], TILES[0], "data_parallel", 200.0, extra={"plan": plan | {"workers": 7}})
    assert fit.samples_of([planned]) == ([], 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    for file in (few, many):
        append(file, Header("run", "gemm", "2026-11-28T00:00:00+00:00"))
    append(few, made_row(SHAPES[0], TILES[0], "data_parallel", 200.0))
    for row in made_rows(other_constants()):
        append(many, row)
    assert main(["fit", str(few)]) == 2
    assert "expected right rows of the Hopper kernel from at least 4 shapes" in capsys.readouterr().err
    assert main(["fit", "--no-folds", str(many)]) == 0
    told = capsys.readouterr().out
    assert "present:" in told and "fitted:" in told and "left out:" not in told
    assert "finish_us" in told and "by 0 rows" in told
    out = io.StringIO()
    with pytest.raises(BenchError, match="measure some: python -m bench gemm --tiles"):
        fit.run([few], stdout=out)

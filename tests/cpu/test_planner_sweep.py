"""Where methods begin to pay: what is told is what plans of one strategy take, up to 10,000 ranks."""

from __future__ import annotations

import math

import pytest

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.grids import Cluster, Level
from tpkernels.planner import Plan, Topology, where_it_pays
from tpkernels.planner.model import LAYER, MODELS, ModelShape
from tpkernels.planner.plan import Single
from tpkernels.planner.strategies import METHODS, Strategy
from tpkernels.planner.sweep import Point, Sweep
from tpkernels.tune import cli

TINY = ModelShape("tiny", 3, 64, 16, 16, 128, 256, 64, 16)


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "gpt3", "--sweep", "weak", "--worlds", "8..64"]) == 0
    told = capsys.readouterr().out
    assert "a batch that grows with the ranks" in told and "fits from" in told
    model = MODELS["gpt3"]
    found = where_it_pays(model, [8, 64], "h200", scaling="weak")
    assert [p.batch for p in found.points] == [8, 64]
    for point in found.points:
        for single in point.singles:  # what is told is what a plan of that strategy takes
            whole = Plan(
                model.with_batch(point.batch),
                found.topology,
                point.world,
                (single.strategy,) * (2 + model.layers * len(LAYER)),
            )
            assert (single.us, single.peak_bytes) == (whole.us, whole.peak_bytes)
            alone = [s for s in METHODS if s == single.strategy.method]
            best = tpk.plan(whole.model, point.world, "h200", memory=math.inf, methods=alone)
            assert best.us <= single.us * (1 + 1e-9)


def test_ten_thousand_ranks() -> None:
    found = where_it_pays(MODELS["gpt3"].with_batch(10_000), [10_000], "h200")
    assert {"1-D, sequence parallel", "2-D", "3-D", "spatial-temporal"} <= set(found.methods)
    products = min(s.us for s in found.points[0].singles)
    flops = 6 * MODELS["gpt3"].parameters * 10_000 * 2048
    assert products > flops / 10_000 / 6.5e8


def test_where_it_pays_by_hand() -> None:
    """2-D does not fit at 4, is slower at 8, missing at 16, and faster at 32; at 64 one dimension does not fit."""

    def point(world: int, **given: tuple[float, float]) -> Point:
        names = {"one": "1-D, sequence parallel", "two": "2-D"}
        some = (Single(names[k], Strategy("1d", 1, world), *v) for k, v in given.items())
        return Point(world, 8, tuple(some))

    points = (
        point(4, one=(1.0, 5.0), two=(0.5, 20.0)),
        point(8, one=(1.0, 5.0), two=(2.0, 5.0)),
        point(16, one=(1.0, 5.0)),
        point(32, one=(1.0, 5.0), two=(0.9, 5.0)),
        point(64, one=(1.0, 11.0), two=(3.0, 9.0)),
    )
    sweep = Sweep(TINY, Topology("t", Cluster(1.0, (Level("a", 64, 1.0, 1.0),))), "strong", 10.0, points)
    assert sweep.methods == ("1-D, sequence parallel", "2-D")
    assert sweep.pays("2-D") == (32, 64) and sweep.pays("1-D, sequence parallel") == ()
    assert sweep.fits_from("2-D") == 8 and sweep.fits_from("1-D, sequence parallel") == 4
    rows = {line.split("  ")[0]: line.split() for line in str(sweep).splitlines() if line}
    assert rows["pays"] == ["pays", "-", "32..64"]
    assert rows["64"] == ["64", "8", "(0.0)", "0.0*"] and rows["16"] == ["16", "8", "0.0*", "-"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"worlds": []}, "worlds: expected rising numbers of ranks"),
        ({"worlds": [8, 4]}, "worlds: expected rising numbers of ranks, got"),
        ({"worlds": [8, 1 << 20]}, "joins 16384 ranks, but the last world has 1048576"),
        ({"scaling": "both"}, "scaling: it must be 'strong' or 'weak', but it is 'both'"),
        ({"worlds": [32, 33], "scaling": "weak"}, "a batch of 16 on 32 ranks is no whole number on 33"),
        ({"worlds": [7]}, "no method can cut tiny over any of"),
    ],
)
def test_sweeps_that_are_none(changed: dict, message: str) -> None:
    given = {"model": TINY, "worlds": [4, 8], "topology": "h200", **changed}
    with pytest.raises(ArgumentError, match=message):
        where_it_pays(**given)

"""What the planner counts, beside the full simulation of all ranks, and beside figures by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from bench.models import MODELS as MEASURED
from tpkernels.errors import ArgumentError, GroupError
from tpkernels.grids import Cluster, Level, backward, exchange_us, forward, messages, predict, sent_elements
from tpkernels.planner.costs import Cost, Costs, ParameterBytes
from tpkernels.planner.model import MODELS, ModelShape, model_of
from tpkernels.planner.strategies import (
    METHODS,
    Placement,
    Strategy,
    misfits,
    moved_bytes,
    moved_us,
    placements,
    strategies,
)
from tpkernels.planner.topology import TOPOLOGIES, Topology

TINY = ModelShape("tiny", 2, 64, 16, 16, 128, 256, 4, 16)
# Hosts of 4, and latencies that are 0, so that trees and direct messages cost the same.
FLAT = (Level("in", 4, 100.0, 0.0), Level("out", 64, 10.0, 0.0))
LATENT = (Level("in", 4, 100.0, 3.0), Level("out", 64, 10.0, 7.0))
THREE = (Level("pair", 2, 300.0, 0.0), Level("host", 8, 100.0, 0.0), Level("out", 64, 10.0, 0.0))


def costs(world: int, levels: tuple[Level, ...], model: ModelShape = TINY, **more: object) -> Costs:
    return Costs(model, Topology("test", Cluster(1e4, levels), **more), world)  # type: ignore[arg-type]


def test_models_are_those_that_bench_measures() -> None:
    for name, model in MODELS.items():
        of = MEASURED[name]
        same = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "layers", "gated")
        assert [getattr(model, k) for k in same] == [getattr(of, k) for k in same], name
    # As published.
    assert MODELS["llama8b"].parameters == 8_030_261_248
    assert MODELS["llama70b"].parameters == 70_553_706_496
    assert MODELS["llama405b"].parameters == 405_853_388_800
    # 175 billion; with a head of its own, and without learned positions.
    assert 175e9 < MODELS["gpt3"].parameters < 175.5e9
    assert model_of("gpt3-175b") is MODELS["gpt3"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 0}, "hidden: it must be an integer, 1 or more, but it is 0"),
        ({"batch": 2.5}, "batch: it must be an integer"),
        ({"style": "bert"}, "style: a model's style is 'llama' or 'gpt', but it is 'bert'"),
        (
            {"heads": 12, "kv_heads": 12},
            "heads: 64 hidden features are no multiple of 12 heads; give head_dim",
        ),
        ({"kv_heads": 3}, "kv_heads: the 16 heads must be a multiple of it, but it is 3"),
        ({"rows": 3}, "model: expected the sizes of a model"),
    ],
)
def test_models_that_are_none(changed: dict[str, object], message: str) -> None:
    given = {**TINY.to_dict(), "head_dim": 0, **changed}
    with pytest.raises(ArgumentError, match=message):
        ModelShape.from_dict(given)
    assert ModelShape.from_dict(TINY.to_dict()) == TINY


def test_strategies_of_a_world() -> None:
    """Every method on every number of ranks that divides it."""
    found = {s.text for s in strategies(16)}
    assert found == {
        "16 copies",
        *(
            f"{copies}1-D{sp} of {n}"
            for copies, n in (("8 x ", 2), ("4 x ", 4), ("2 x ", 8), ("", 16))
            for sp in ("", ", sequence parallel")
        ),
        "4 x 2-D of 2 x 2", "2-D of 4 x 4", "2 x 3-D of 2 x 2 x 2",
        "2 x 2.5-D of 2 x 2 x 2", "2.5-D of 2 x 2 x 4",
        "4 x spatial-temporal of 2 x 2", "spatial-temporal of 4 x 4",
    }  # fmt: skip
    for world in (1, 6, 8, 18, 64, 10000):
        for strategy in strategies(world):
            assert strategy.world == world and strategy.one(True).grid.world == strategy.ranks
            assert Strategy.from_dict(strategy.to_dict()) == strategy
    assert {s.text for s in strategies(9, ["2d"])} == {"9 copies", "2-D of 3 x 3"}
    assert {s.text for s in strategies(27)} >= {"3-D of 3 x 3 x 3", "3 x 2-D of 3 x 3", "2.5-D of 3 x 3 x 3"}
    assert {s.method for s in strategies(64)} == set(METHODS)


def test_strategies_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="strategy: expected a method of 1d, "):
        Strategy.from_dict({"method": "4d", "ranks": 2, "copies": 1})
    with pytest.raises(ArgumentError, match="strategy: expected"):
        Strategy.from_dict({"method": "2d", "ranks": 4, "copies": 0})
    with pytest.raises(GroupError, match="a square number, but the group has 6"):
        Strategy.from_dict({"method": "2d", "ranks": 6, "copies": 1})


def test_what_does_not_fit_is_named() -> None:
    odd = ModelShape("odd", 1, 60, 6, 3, 90, 102, 5, 6)
    sentences = misfits(Strategy("2d", 4, 2), odd)
    assert sentences[0] == (
        "batch: 2 x 2-D of 2 x 2 cuts whole sequences (for attention) in 4 equal parts, but it is 6; 4 or 8 would fit."
    )
    assert any(s.startswith("kv_heads: ") and s.endswith("but it is 3; 2 or 4 would fit.") for s in sentences)
    assert not misfits(Strategy("1d-sp", 3, 2), odd)
    assert [s.split(":")[0] for s in misfits(Strategy("1d-sp", 7, 1), odd)] == [
        "batch x sequence", "heads", "heads x head_dim", "ffn", "vocab", "vocab",
    ]  # fmt: skip


@pytest.mark.parametrize("levels", [LATENT, THREE], ids=["two", "three"])
@pytest.mark.parametrize("world", [4, 8, 16])
def test_ways_between_placements_are_those_of_all_ranks(world: int, levels: tuple[Level, ...]) -> None:
    """What is looked at of repeated patterns is what all ranks together do: time and bytes, and who agrees."""
    fitting = [s for s in strategies(world) if not misfits(s, TINY)]
    every = [p for outer in (True, False) for p, _ in placements(fitting, outer=outer)]
    cluster = Cluster(1.0, levels)
    agree = 0
    for one, other in itertools.product(every, every):
        full = exchange_us(one.full, other.full, 64, 128, cluster)
        assert moved_us(one, other, 64, 128, cluster, 2) == pytest.approx(full)
        sent = sent_elements(messages(one.full, other.full), 64, 128)
        assert moved_bytes(one, other, 64, 128, 2) == pytest.approx(2 * sent / world)
        assert one.same(other) == (one.full.blocks == other.full.blocks)
        agree += one.same(other)
    assert agree >= len(every)


def test_placements_are_there_once() -> None:
    """Rows over all ranks are the same however many copies they are of; 2-D lies as copies of a line do."""
    fitting = strategies(8)
    outer = [s.text for _, s in placements(fitting, outer=True)]
    assert sum("sequence parallel" in text for text in outer) + ("8 copies" in outer) == 1
    assert Strategy("2d", 4, 2).inner.same(Strategy("1d", 2, 4).inner)
    assert not Strategy("2d", 4, 2).inner.same(Strategy("1d", 4, 2).inner)
    for copies in (1, 2):  # depths lie as copies do
        deep, many = Strategy("2.5d", 8, copies, 2), Strategy("2d", 4, 2 * copies)
        assert deep.outer.same(many.outer) and deep.inner.same(many.inner)


@pytest.mark.parametrize("levels", [FLAT, LATENT, THREE], ids=["flat", "latent", "three"])
@pytest.mark.parametrize("world", [8, 16])
def test_linear_layers_are_those_of_all_ranks(world: int, levels: tuple[Level, ...]) -> None:
    """One copy and the sums over copies, beside the program of all ranks. With latency a tree of 2 is a message."""
    looked = 0
    for strategy in strategies(world):
        if levels is LATENT and strategy.copies > 2:
            continue
        of = costs(world, levels)
        for name in ("qkv", "down"):
            linear = TINY.linears[name]
            method = strategy.whole(linear.back)
            ahead = forward(method)
            held = {o: h.layout for o, h in ahead.outputs.items() if o in "XW"}
            programs = ahead, backward(method, held=held)
            full = sum(predict(method, p, TINY.sizes(name), of.cluster).us for p in programs)
            found = of._linear(name, linear, strategy)
            assert found.us == pytest.approx(full), (strategy.text, name)
            sent = sum(p.sent_elements(TINY.sizes(name)) for p in programs)
            norm = of._norm_sent(strategy.outer) if linear.norm else 0.0
            assert of.sent_bytes(name, strategy) - norm == pytest.approx(2 * sent / world), strategy.text
            looked += 1
    assert looked >= 10


def test_path_fused_is_of_one_host() -> None:
    """Exchanges of one dimension run beneath products where all its ranks are in the innermost level."""
    for method, ranks, gains in (("1d-sp", 4, True), ("1d-sp", 8, False), ("2d", 4, False)):
        strategy = Strategy(method, ranks, 8 // ranks)
        apart, fused = (costs(8, FLAT, fused=f).operator("out", strategy).us for f in (False, True))
        assert (fused < apart) == gains


def test_memory_by_hand() -> None:
    """2 x 2-D of 2 x 2, in bf16 with Adam: 18 bytes a parameter, or 12/2 of them over copies."""
    strategy = Strategy("2d", 4, 2)
    of = costs(8, FLAT)
    down = of.operator("down", strategy)
    assert down.parameter_bytes == 18 * 128 * 64 / 4
    assert down.kept_bytes == 2 * 64 * 128 / 8
    assert of.operator("core", strategy).kept_bytes == 2 * 64 * (64 + 64 + 64) / 8
    assert of.operator("activation", strategy).kept_bytes == 3 * 2 * 64 * 128 / 8
    shared = Costs(TINY, of.topology, 8, ParameterBytes(optimizer_over_copies=True)).operator(
        "down", strategy
    )
    assert shared.parameter_bytes == (6 + 12 / 2) * 128 * 64 / 4
    x, w, y = 64 * 128 / 8, 128 * 64 / 4, 64 * 64 / 8
    # Backward of 2 x 2 ranks: the present blocks and the next ones, products in float32.
    assert 2 * (x + w + y) < down.passing_bytes <= 4 * (3 * x + 3 * w + 2 * y)
    one, other = Cost(1, 2, 3, 4, 5, 6, 7), Cost(10, 20, 30, 40, 50, 60, 70)
    assert one.plus(other) == (11, 22, 33, 44, 55, 66, 70)


def test_every_rank_together_has_all_parameters_once() -> None:
    """Where no method keeps replicas: 3-D, whatever the operator, but for norms' weights."""
    strategy, world = Strategy("3d", 8, 1), 8
    of = costs(world, FLAT)
    names = ["embedding", "qkv", "out", "up", "down", "head"]
    held = sum(
        of.operator(n, strategy).parameter_bytes * (1 if n in ("embedding", "head") else 2) for n in names
    )
    assert held * world / 18 == TINY.parameters


def test_reads_and_writes_take_the_memorys_rate() -> None:
    slow = Costs(TINY, Topology("slow", Cluster(1e4, FLAT, 1.0)), 8)
    sp, whole = Strategy("1d-sp", 4, 2), Strategy("1d", 4, 2)
    for name in (
        "attention_residual",
        "qkv",
    ):  # every rank of a copy does all rows without sequence parallelism
        assert slow.operator(name, whole).products_us > slow.operator(name, sp).products_us
    assert costs(8, FLAT).operator("activation", sp).us == 0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_in_json(name: str) -> None:
    topology = TOPOLOGIES[name]
    again = Topology.from_dict(topology.to_dict())
    assert again.to_dict() == topology.to_dict() and again.ranks == topology.ranks
    assert again.cluster.flops_per_us == pytest.approx(topology.cluster.flops_per_us)


def test_placement_shares() -> None:
    assert Strategy("1d", 4, 2).outer.share == 1 / 2 and Strategy("1d-sp", 4, 2).outer.share == 1 / 8
    inner: Placement = Strategy("3d", 8, 2).inner
    assert (inner.share, inner.row_parts, inner.column_parts) == (1 / 16, 8, 2)
    assert math.isclose(Strategy("2.5d", 8, 1, 2).outer.share, 1 / 8)

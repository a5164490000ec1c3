"""``tpkernels.plan`` and ``tpk plan``: the best plan by brute force, limits, JSON, pictures, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tpkernels as tpk
from tpkernels.comm.machines import MACHINES
from tpkernels.errors import ArgumentError
from tpkernels.grids import Cluster, Level
from tpkernels.planner import ParameterBytes, Plan, Topology
from tpkernels.planner.costs import Costs
from tpkernels.planner.make import fitting_strategies, plan_of
from tpkernels.planner.model import LAYER, ModelShape
from tpkernels.planner.problem import Planned, input_of, names_of, output_of
from tpkernels.planner.search import evaluate, search
from tpkernels.planner.strategies import METHODS, Strategy
from tpkernels.tune import cli

TINY = ModelShape("tiny", 3, 64, 16, 16, 128, 256, 64, 16)


def machine(seed: int) -> Topology:
    """Some machine, on which other plans are best than on others."""
    draw = random.Random(seed)
    levels = tuple(
        Level(name, ranks, 10 ** draw.uniform(1, 4), draw.uniform(0, 3))
        for name, ranks in (("in", 4), ("out", 64))
    )
    return Topology(
        "drawn",
        Cluster(10 ** draw.uniform(3, 7), levels, 10 ** draw.uniform(2, 6)),
        fused=draw.random() < 0.5,
    )


def test_the_best_by_brute_force(seed: int) -> None:
    """A tiny model with its real costs on random machines: no assignment of all operators takes less, and under limits
    none takes less than the bound."""
    model = ModelShape("tiny", 1, 64, 16, 16, 128, 256, 64, 16)
    for k in range(2):
        topology = machine(seed + k)
        planned = Planned(Costs(model, topology, 2), fitting_strategies(model, 2, METHODS))
        problem = planned.problem
        sizes = [range(len(planned.states(name))) for name in names_of(1)]
        assert math.prod(map(len, sizes)) == 3**6 * 2**2 * 2**2
        every = [evaluate(problem, states) for states in itertools.product(*sizes)]
        found, best = search(problem), min(e.time for e in every)
        assert found is not None and found.totals.time == pytest.approx(best)
        plan = tpk.plan(model, 2, topology)
        assert plan.us == pytest.approx(best) and plan.bound_us == pytest.approx(best)
        least, most = min(e.peak for e in every), max(e.peak for e in every)
        for part in (0.02, 0.3, 0.7):
            limit = least + part * (most - least)
            best = min(e.time for e in every if e.peak <= limit)
            plan = tpk.plan(model, 2, topology, memory=limit)
            assert plan.peak_bytes <= limit and plan.bound_us <= best * (1 + 1e-9) <= plan.us * (1 + 2e-9)


@pytest.mark.parametrize("world", [4, 8, 16])
def test_plans_add_up(world: int, seed: int) -> None:
    """What the plan tells is what the search has added up, within the limit, and never above one method alone."""
    topology = machine(seed)
    free = tpk.plan(TINY, world, topology)
    for part in (1.0, 0.8, 0.6):
        plan = free
        limit = math.inf
        if part < 1:
            limit = part * free.peak_bytes
            try:
                plan = tpk.plan(TINY, world, topology, memory=limit)
            except ArgumentError as error:
                assert "nothing fits" in str(error)
                continue
        assert (
            plan.peak_bytes <= limit
            and plan.bound_us <= plan.us * (1 + 1e-9)
            and plan.us >= free.us * (1 - 1e-9)
        )
        fitting = [single.us for single in plan.singles if single.peak_bytes <= limit]
        assert plan.us <= min(fitting, default=math.inf) * (1 + 1e-9)
        assert plan.bound_us <= min(fitting, default=math.inf) * (1 + 1e-9)
        assert len(plan.lines) == len(plan.choices) == 2 + TINY.layers * len(LAYER)
        assert sum(run.last - run.first + 1 for run in plan.runs) == TINY.layers


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_search_adds_up_what_plans_do(layers: int, seed: int) -> None:
    """Any assignment: time and memory of its nodes and edges, also of residual ones, are those of the plan's lines."""
    draw = random.Random(seed)
    model = replace(TINY, layers=layers)
    planned = Planned(Costs(model, machine(seed), 8), fitting_strategies(model, 8, METHODS))
    names = names_of(layers)
    for _ in range(10):
        states = [draw.randrange(len(planned.states(name))) for name in names]
        totals, plan = evaluate(planned.problem, states), plan_of(planned, states)
        assert plan.us == pytest.approx(totals.time) and plan.peak_bytes == pytest.approx(totals.peak)
        assert sum(line.moved_us > 0 for line in plan.lines) > layers


def test_placements_are_told_by_a_neighbour() -> None:
    """An operator between is said to lie as a linear layer beside it does, where it does."""
    plan = tpk.plan("llama8b", 8, "h200x8")
    for layer in range(plan.model.layers):
        at = dict(zip(LAYER, plan.lines[plan.layer(layer)], strict=True))
        core = at["core"].strategy
        if output_of("qkv", at["qkv"].strategy).same(input_of("core", core)):
            assert core == at["qkv"].strategy


def test_it_is_quick() -> None:
    """An 80-layer model on 32 devices, in a process that has computed nothing yet; the bar is 10 s on one core."""
    code = (
        "import time, tpkernels as tpk, tpkernels.planner.make\n"
        "began = time.process_time()\n"
        "plan = tpk.plan('llama70b', 32, 'h200')\n"
        "print(time.process_time() - began, len(plan.choices), plan.peak_bytes <= plan.limit)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, choices, fits = done.stdout.split()
    assert float(seconds) < 5 and int(choices) == 2 + 80 * 8 and fits == "True"


def test_json(tmp_path: Path) -> None:
    plan = tpk.plan(TINY, 8, "h200", memory="3MB")
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.choices == plan.choices and again.model == plan.model and again.limit == 3e6
    assert (again.us, again.peak_bytes, again.bound_us) == (plan.us, plan.peak_bytes, plan.bound_us)
    assert str(again) == str(plan)
    assert json.loads(path.read_text())["predicted"]["us"] == plan.us
    assert again.on("h200x8").us == plan.on("h200x8").us != 0


def test_more_ranks_than_kv_heads() -> None:
    """In one dimension ranks share heads of keys and values, and attention stays where these are made."""
    model = replace(TINY, kv_heads=2)
    plan = tpk.plan(model, 8, "h200", methods=["1d-sp"], memory=math.inf)
    alone = Strategy("1d-sp", 8, 1)
    choices = [alone] * len(plan.choices)
    whole = replace(plan, choices=tuple(choices))
    whole.check()
    assert plan.us <= whole.us
    # q of 64 features, and k and v of 8 each on four ranks instead of one.
    parameters = whole.lines[1].cost.parameter_bytes / 18
    assert parameters == 64 * (64 + 4 * 2 * 8) / 8 + 64
    more, equal = (
        Costs(m, plan.topology, 8).operator("qkv", alone) for m in (model, replace(TINY, kv_heads=8))
    )
    assert more.messages_us > equal.messages_us  # sums of the shared heads' gradients
    choices[2] = Strategy("1d-sp", 4, 2)
    with pytest.raises(
        ArgumentError, match="attention of layers 0 to 0 must be where its keys and values are made"
    ):
        replace(plan, choices=tuple(choices)).check()


def test_json_that_is_none(tmp_path: Path) -> None:
    plan = tpk.plan(TINY, 8, "h200")
    good = plan.to_dict()

    def changed(*keys: object, to: object) -> dict:
        copy = json.loads(json.dumps(good))
        at = copy
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to
        return copy

    for given, message in (
        (changed("format", to=7), "format 7"),
        (changed("layers", to=[]), "0 layers of 3"),
        (changed("layers", 0, "layers", to=[1, 2]), "layers from 1, where 0 is next"),
        (changed("world", to=4), "plan: it is for 4 ranks, but .* has 8; plan again"),
        (changed("per_parameter", "optimizer", to="12"), "per_parameter: optimizer must be a number"),
        (
            changed("head", to={"method": "2.5d", "ranks": 8, "copies": 1, "depth": 3}),
            "depth: a 2.5-D grid has q x q x depth ranks, but 8 ranks and depth 3 leave no square",
        ),
        (changed("head", "method", to="5d"), "strategy: expected a method"),
        (changed("model", "batch", to=7), "plan: batch: .* but it is 7; "),
        (changed("topology", "levels", to=[]), "levels: a cluster needs one"),
        ({}, "KeyError"),
        ([], "plan: expected what"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Plan.from_dict(given)
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(ArgumentError, match="plan: expected JSON in"):
        Plan.load(path)
    with pytest.raises(ArgumentError, match=r"plan: cannot read .*No such file"):
        Plan.load(tmp_path / "none")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    tpk.plan(TINY, 4, "h200").picture(path)
    assert path.stat().st_size > 5000
    with pytest.raises(ArgumentError, match=r"picture: cannot write .*plan\.what"):
        tpk.plan(TINY, 4, "h200").picture(tmp_path / "plan.what")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "llama9b"}, "model: expected a ModelShape or one of llama8b, .*, got 'llama9b'"),
        ({"world": 0}, "world: expected a number of ranks, 1 or more, got 0"),
        ({"world": 16, "topology": "h200x8"}, "world: topology 'h200x8' joins 8 ranks, but it is 16"),
        ({"topology": "tpu"}, "topology: expected a Topology, .* got 'tpu'"),
        ({"methods": ["4d"]}, "methods: expected some of '1d', .*, got '4d'"),
        ({"methods": []}, "methods: at least one"),
        ({"methods": ["2d"], "world": 7}, "methods: '2d' on 7 ranks: .* a square number, but the group has 7"),
        ({"methods": ["3d"], "world": 4}, "methods: '3d' on 4 ranks: .* a cube, but the group has 4; .* 2-D|1-D|one"),
        ({"methods": ["spatial-temporal"], "world": 6}, "a power of 4, but the group has 6"),
        ({"methods": ["2.5d"], "world": 4}, "methods: 2.5-D has q x q ranks at two depths or more, and 4 ranks"),
        ({"world": 7}, "model: none of .* ways to cut tiny over 7 ranks fits; the nearest: batch"),
        ({"memory": "lots"}, "memory: expected bytes above 0, or a text such as '80GB' .*, got 'lots'"),
        ({"memory": -1}, "memory: expected bytes above 0"),
        ({"memory": "5 TB"}, "memory: expected bytes above 0"),
        ({"memory": "1MB"}, r"memory: nothing fits 0\.0 GB a rank; the plan that needs least takes .* too many: "),
    ],
)  # fmt: skip
def test_what_is_refused(changed: dict, message: str) -> None:
    given = {"model": TINY, "world": 4, "topology": "h200", **changed}
    with pytest.raises(ArgumentError, match=message):
        tpk.plan(**given)


def test_bytes_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="per_parameter: weight must be a number of bytes, but it is -1"):
        ParameterBytes(weight=-1)


def test_the_nearest_that_does_not_fit_is_told() -> None:
    """The sentence has the least that any plan needs: with so much there is one."""
    with pytest.raises(ArgumentError, match="nothing fits") as caught:
        tpk.plan("llama70b", 8, "h200")
    least = float(str(caught.value).split("needs least takes ")[1].split(" GB")[0])
    plan = tpk.plan("llama70b", 8, "h200", memory=(least + 0.1) * 1e9)
    assert plan.peak_bytes <= (least + 0.1) * 1e9
    with pytest.raises(ArgumentError, match="nothing fits"):
        tpk.plan("llama70b", 8, "h200", memory=(least - 0.1) * 1e9)


def test_topology_files(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(machine(seed).to_dict()))
    assert tpk.plan(TINY, 4, str(path)).us == pytest.approx(tpk.plan(TINY, 4, machine(seed)).us)
    level = {"name": "a", "ranks": 8, "gbps": 100, "message_us": 5}
    good = {"tflops": 500, "levels": [level]}
    for given, message in (
        ("[]", "expected an object with levels, tflops"),
        ("{", "expected JSON in"),
        ({"tflops": 500}, "levels must be there, but it has"),
        ({**good, "speed": 1}, "there is no speed; what may be there is"),
        ({**good, "tflops": "fast"}, "tflops: expected a number, got 'fast'"),
        ({**good, "tflops": -1}, "flops_per_us: it must be above 0"),
        ({**good, "memory_gb": 0}, "memory_gb: it must be above 0"),
        ({**good, "fused": 1}, "fused: expected true or false"),
        ({**good, "levels": {}}, "levels: expected a list"),
        ({**good, "levels": [{**level, "ranks": 2.5}]}, r"levels\[0\].ranks: expected an integer"),
        ({**good, "levels": [{**level, "gbps": 0}]}, "'a' must send more than 0 bytes"),
        ({**good, "levels": [level, {**level, "ranks": 12}]}, "must join a multiple of the 8 ranks inside"),
        ({**good, "levels": [{"ranks": 8}]}, r"levels\[0\]: gbps, message_us must be there"),
    ):
        path.write_text(given if isinstance(given, str) else json.dumps(given))
        with pytest.raises(ArgumentError, match=message) as caught:
            tpk.plan(TINY, 4, path)
        assert "topology" in str(caught.value)
    with pytest.raises(ArgumentError, match="topology: cannot read"):
        tpk.plan(TINY, 4, tmp_path / "none.json")


def test_what_calibrate_measured(tmp_path: Path) -> None:
    """A ``Machine``, or the text that it keeps: one host of its rates."""
    known = next(m for m in MACHINES if m.card == "NVIDIA H200" and m.world == 4)
    path = tmp_path / "machine.json"
    path.write_text(known.to_json())
    plans = [tpk.plan(TINY, 4, given) for given in (known, path)]
    assert plans[0].us == plans[1].us and plans[0].topology.ranks == 4
    assert plans[0].topology.cluster.flops_per_us == known.tflops * 1e6
    assert plans[0].topology.cluster.levels[0].bytes_per_us == known.fused["all_gather_matmul"].gbps * 1e3
    path.write_text(known.to_json().replace("tflops", "flops"))
    with pytest.raises(ArgumentError, match=r"topology .*machine.json': text: expected what Machine.to_json"):
        tpk.plan(TINY, 4, path)


def ran(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept, drawn = str(tmp_path / "p.json"), str(tmp_path / "p.svg")
    assert ran("llama8b", "--world", "8", "--topology", "h200x8", "--json", kept, "--picture", drawn) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "llama8b: 32 layers, 8.0 billion parameters; 8 sequences of 8192 tokens\non 8 ranks of h200x8"
    )
    for words in (
        "Predicted, not measured",
        "norm, qkv",
        "whole step",
        "this plan",
        "copies alone",
        "spatial-temporal",
    ):
        assert words in told
    assert str(Plan.load(kept)) in told and (tmp_path / "p.svg").exists()
    model = tmp_path / "model.json"
    model.write_text(json.dumps(TINY.to_dict()))
    arguments = [
        str(model),
        "--world",
        "4",
        "--batch",
        "32",
        "--methods",
        "2d",
        "--memory",
        "none",
        "--share-optimizer",
    ]
    assert ran(*arguments) == 0
    told = capsys.readouterr().out
    assert "32 sequences of 64 tokens" in told and "no limit of memory" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama9b"], "model: expected a ModelShape or one of"),
        (["none.json"], "model: cannot read 'none.json'"),
        (["llama8b", "--methods", "3d", "--world", "4"], "a cube, but the group has 4"),
        (["llama8b", "--worlds", "8..16"], "--worlds: it is of --sweep"),
        (["llama8b", "--sweep", "weak", "--world", "8"], "--world: it is of a plan"),
        (
            ["llama8b", "--sweep", "weak", "--worlds", "8-16"],
            "--worlds: expected FROM..TO, such as 8..8192, got",
        ),
        (["llama8b", "--memory", "80"], "memory: expected bytes above 0, or a text such as '80GB'"),
        (["llama8b", "--memory", "8GB"], "memory: nothing fits 8.0 GB a rank"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert ran(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_package_is_not_imported_for_nothing() -> None:
    code = "import sys, tpkernels; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [m for m in done.stdout.split() if m.startswith(("tpkernels.planner", "matplotlib"))]

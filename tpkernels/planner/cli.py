"""``tpk plan``: plans, and where methods begin to pay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tpkernels.errors import ArgumentError
from tpkernels.planner.costs import ParameterBytes
from tpkernels.planner.make import make_plan
from tpkernels.planner.model import MODELS, ModelShape, model_of
from tpkernels.planner.strategies import METHODS
from tpkernels.planner.sweep import doubling, where_it_pays
from tpkernels.planner.topology import TOPOLOGIES

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    known = ", ".join(MODELS)
    parser.add_argument("model", metavar="MODEL", help=f"{known}, or a JSON file with the sizes of one")
    parser.add_argument("--world", type=int, metavar="RANKS", help="ranks to plan for (8)")
    parser.add_argument(
        "--topology",
        default="h200",
        help=f"{', '.join(TOPOLOGIES)}, or a JSON file: a description, or what tpkernels.calibrate() gave (h200)",
    )
    parser.add_argument("--memory", help="of a rank, such as 80GB (the topology's); none: no limit")
    parser.add_argument("--methods", help=f"those that may be used, of {','.join(METHODS)} (all)")
    parser.add_argument("--batch", type=int, help="sequences of a batch over all ranks (the model's)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (the model's)")
    parser.add_argument(
        "--share-optimizer", action="store_true", help="copies share the optimizer's states, as in ZeRO-1"
    )
    parser.add_argument("--json", metavar="FILE", help="keep the plan, for tpkernels.planner.Plan.load")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw time and memory by layer")
    parser.add_argument(
        "--sweep",
        choices=("strong", "weak"),
        help="tell where each method begins to pay: the same batch on all worlds, or one that grows",
    )
    parser.add_argument("--worlds", metavar="FROM..TO", help="of --sweep, by doubling (8..8192)")


def run(given: argparse.Namespace) -> None:
    """Prints what was asked for."""
    model = _model(given)
    memory = float("inf") if given.memory == "none" else given.memory
    of_parameters = ParameterBytes(optimizer_over_copies=given.share_optimizer)
    if given.sweep:
        for option in ("world", "methods", "json", "picture"):
            if getattr(given, option) is not None:
                raise ArgumentError(
                    f"--{option}: it is of a plan, and --sweep makes none; leave one of them out."
                )
        worlds = list(doubling(*_worlds(given.worlds or "8..8192")))
        print(
            where_it_pays(
                model, worlds, given.topology, scaling=given.sweep, memory=memory, per_parameter=of_parameters
            )
        )
        return
    if given.worlds is not None:
        raise ArgumentError("--worlds: it is of --sweep; give --world RANKS for a plan.")
    methods = None if given.methods is None else given.methods.split(",")
    world = 8 if given.world is None else given.world
    plan = make_plan(
        model, world, given.topology, memory=memory, methods=methods, per_parameter=of_parameters
    )
    print(plan)
    if given.json is not None:
        plan.save(given.json)
        print(f"\nkept in {given.json}")
    if given.picture is not None:
        plan.picture(given.picture)
        print(f"\ndrawn in {given.picture}")


def _model(given: argparse.Namespace) -> ModelShape:
    if given.model.endswith(".json"):
        try:
            model = ModelShape.from_dict(json.loads(Path(given.model).read_text()))
        except OSError as error:
            raise ArgumentError(f"model: cannot read {given.model!r} ({error.strerror}).") from None
        except json.JSONDecodeError as error:
            raise ArgumentError(f"model: expected JSON in {given.model!r}, but {error}.") from None
    else:
        model = model_of(given.model)
    batch = model.batch if given.batch is None else given.batch
    return model.with_batch(batch, given.sequence)


def _worlds(text: str) -> tuple[int, int]:
    first, _, last = text.partition("..")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ArgumentError(f"--worlds: expected FROM..TO, such as 8..8192, got {text!r}.")
    return int(first), int(last)

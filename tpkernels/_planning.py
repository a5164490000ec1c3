"""``tpkernels.plan`` and ``tpkernels.build``. What they need is imported when they are called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpkernels.comm.choice import Machine
    from tpkernels.ops._groups import GroupLike
    from tpkernels.planner import ModelShape, ParameterBytes, Plan, Topology
    from tpkernels.planner.build import PlannedModel

__all__ = ["build", "plan"]


def plan(
    model: ModelShape | str,
    world: int,
    topology: Topology | Machine | str | Path,
    *,
    memory: float | str | None = None,
    methods: Iterable[str] | None = None,
    per_parameter: ParameterBytes | None = None,
) -> Plan:
    """The way to cut every operator of a model over ranks that should take least time.

    Predicted, not measured: ``docs/planner.md`` has what is counted, and what is not.

    Args:
        model: ``tpkernels.planner.ModelShape``, or the name of one: "llama8b", "llama70b", "llama405b", "gpt3".
        world: ranks.
        topology: ``tpkernels.planner.Topology``, the name of one ("h200x8", "h200", "h100"), a JSON file, or what
            ``tpkernels.calibrate`` measured of a host.
        memory: bytes of a rank, or a text such as "80GB"; None: the topology's.
        methods: those that may be used, of "1d", "1d-sp", "2d", "2.5d", "3d", "spatial-temporal"; None: all.
        per_parameter: bytes of a parameter, its gradient and optimizer states; None: mixed precision with Adam.
    Returns:
        A plan: ``print`` shows it, ``save`` and ``picture`` keep it, ``tpkernels.build`` makes the model. Where memory
        does not matter it is the best of all; else it is within the limit, and ``bound_us`` says how near to the best.
    Raises:
        ArgumentError: an unknown name, a world that is no grid of the methods, sizes that nothing can cut, and what
            would fit; a topology with nonsense; a memory limit that nothing fits, and what the nearest plan lacks.
    Source:
        PrimePar (Wang et al., ASPLOS 2024), sections 4 and 5.
    """
    from tpkernels.planner.make import make_plan

    return make_plan(model, world, topology, memory=memory, methods=methods, per_parameter=per_parameter)


def build(plan: Plan, group: GroupLike = None, **options: Any) -> PlannedModel:
    """The model of a plan, on the ranks of a group, which all call it.

    Args:
        plan: for as many ranks as the group has.
        group: as in ``tpkernels.all_gather_matmul``.
        options: ``seed``, ``dtype``, ``device`` of the parameters, ``path`` of the products.
    Raises:
        ArgumentError: a plan for another number of ranks. GroupError: no such group.
    """
    from tpkernels.planner.build import build_model

    return build_model(plan, group, **options)

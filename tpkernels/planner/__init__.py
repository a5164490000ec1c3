"""A planner: which tensor-parallel method, on which grid, with how many data-parallel copies, for every operator.

    model           sizes of a model, and its operators in a row
    topology        described machines
    strategies      methods on grids, with copies; where tensors lie then, and their ways from one to another
    costs           microseconds and bytes of an operator
    problem         both as nodes and edges
    search          the best assignment: segmented dynamic programming
    plan            plans, in JSON
    make            plans made
    report, picture plans as tables and as a picture
    sweep           where each method begins to pay
    build           models built from plans (the only one that needs torch)

``tpkernels.plan`` and ``tpkernels.build`` are the way in, ``tpk plan`` on the command line.
"""

from __future__ import annotations

from tpkernels.planner.costs import ParameterBytes
from tpkernels.planner.model import MODELS, ModelShape
from tpkernels.planner.plan import Plan
from tpkernels.planner.sweep import Sweep, where_it_pays
from tpkernels.planner.topology import TOPOLOGIES, Topology

__all__ = [
    "MODELS",
    "TOPOLOGIES",
    "ModelShape",
    "ParameterBytes",
    "Plan",
    "Sweep",
    "Topology",
    "where_it_pays",
]

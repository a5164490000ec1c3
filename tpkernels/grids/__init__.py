"""Process grids, and tensor-parallel methods on them as pure functions: 2-D, 2.5-D, 3-D and spatial-temporal.

    grid            how many ranks lie along which axes
    spans, layout   which block of a matrix each rank has, and the messages from one layout to another
    method          a method: what each rank multiplies at each step, and where operands lie at rest
    one_d, summa, three_d, spatial_temporal     the methods
    data_parallel   copies of any of them, with rows of their own
    stationary      any of them with results that stay where they are made, whose passes can be one launch each
    features        layouts of biases, of norms' weights and of statistics of rows
    program         what the ranks do, step by step, derived from a method
    collectives     what exchanges are called, and what each step asks of compute and links
    volume          bytes and memory: counted, and as closed formulas
    timing          how long a program takes on a described cluster

None of that needs a process group, or torch. What does is not imported here:

    mesh            a grid bound to a process group or a DeviceMesh
    execute         programs carried out
    one_launch      passes of a layer as one launch each, path "fused"
    redistribute    tensors from one layout to another

>>> method = summa(grid_2d(4))
>>> program = backward(method)
>>> program.sent_elements(Sizes(m=8, k=4, n=6))
112
"""

from __future__ import annotations

from tpkernels.grids.collectives import Collective, Load, collectives, loads
from tpkernels.grids.data_parallel import data_parallel
from tpkernels.grids.grid import (
    Grid,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    with_replicas,
)
from tpkernels.grids.layout import (
    Block,
    Layout,
    Message,
    from_blocks,
    messages,
    rows_over,
    sent_elements,
    whole,
)
from tpkernels.grids.method import Method, Pass, Sizes, Work
from tpkernels.grids.one_d import column_parallel, row_parallel
from tpkernels.grids.program import Program, backward, forward
from tpkernels.grids.spans import Span, part
from tpkernels.grids.spatial_temporal import spatial_temporal
from tpkernels.grids.stationary import stationary
from tpkernels.grids.summa import summa
from tpkernels.grids.three_d import three_d
from tpkernels.grids.timing import Cluster, Level, Timing, exchange_us, predict
from tpkernels.grids.volume import Memory, at_rest, formula, peak

__all__ = [
    "Block",
    "Cluster",
    "Collective",
    "Grid",
    "Layout",
    "Level",
    "Load",
    "Memory",
    "Message",
    "Method",
    "Pass",
    "Program",
    "Sizes",
    "Span",
    "Timing",
    "Work",
    "at_rest",
    "backward",
    "collectives",
    "column_parallel",
    "data_parallel",
    "exchange_us",
    "formula",
    "forward",
    "from_blocks",
    "grid_1d",
    "grid_2d",
    "grid_2p5d",
    "grid_3d",
    "grid_spatial_temporal",
    "loads",
    "messages",
    "part",
    "peak",
    "predict",
    "row_parallel",
    "rows_over",
    "sent_elements",
    "spatial_temporal",
    "stationary",
    "summa",
    "three_d",
    "whole",
    "with_replicas",
]

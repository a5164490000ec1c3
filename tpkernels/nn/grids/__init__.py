"""Layers on process grids of two and three dimensions; what they compute and send is derived in
``tpkernels.grids``."""

from __future__ import annotations

from tpkernels.grids.execute import Traffic, record_traffic
from tpkernels.grids.mesh import ProcessGrid, bind
from tpkernels.grids.redistribute import redistribute, take_block
from tpkernels.nn.grids.linear import GridLinear, Linear2D, Linear2p5D, Linear3D, LinearSpatialTemporal

__all__ = [
    "GridLinear",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LinearSpatialTemporal",
    "ProcessGrid",
    "Traffic",
    "bind",
    "record_traffic",
    "redistribute",
    "take_block",
]

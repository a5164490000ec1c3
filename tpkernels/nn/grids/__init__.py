"""Layers on process grids of two and three dimensions; what they compute and send is derived in
``tpkernels.grids``."""

from __future__ import annotations

from tpkernels.grids.execute import Traffic, record_traffic
from tpkernels.grids.mesh import ProcessGrid, bind
from tpkernels.grids.redistribute import redistribute, take_block
from tpkernels.nn.grids.block import MLP, Attention, TransformerBlock
from tpkernels.nn.grids.embedding import Embedding
from tpkernels.nn.grids.linear import (
    GridLinear,
    Linear2D,
    Linear2p5D,
    Linear3D,
    LinearSpatialTemporal,
    shared_input,
)
from tpkernels.nn.grids.loss import cross_entropy
from tpkernels.nn.grids.norm import LayerNorm, RMSNorm
from tpkernels.nn.grids.strategy import GridStrategy, Residual, check_chain, check_residual

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "GridLinear",
    "GridStrategy",
    "LayerNorm",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LinearSpatialTemporal",
    "ProcessGrid",
    "RMSNorm",
    "Residual",
    "Traffic",
    "TransformerBlock",
    "bind",
    "check_chain",
    "check_residual",
    "cross_entropy",
    "record_traffic",
    "redistribute",
    "shared_input",
    "take_block",
]

"""Checks of path "fused" with one way of moving rows that leave a product (comm/departures.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import tpkernels as tpk
from tpkernels.comm.departures import DEPARTURE


def departing(ctx: Any, way: str, check: Callable[..., Any], *args: Any) -> Any:
    """``check`` with ``TPK_DEPARTURE`` set to ``way``, on every rank alike."""
    os.environ[DEPARTURE] = way
    try:
        return check(ctx, *args)
    finally:
        del os.environ[DEPARTURE]


def check_who_moves(ctx: Any, path: str, copies: str) -> None:
    """Whether anything is copied to a peer, as the profiler calls that: nothing where the product stores."""
    generator = torch.Generator(ctx.device).manual_seed(ctx.rank)
    a = torch.randn(2048, 256, dtype=torch.bfloat16, generator=generator)
    b = torch.randn(256, 4096, dtype=torch.bfloat16, generator=generator)
    for op, stored in (("matmul_all_reduce", True), ("matmul_reduce_scatter", False)):
        for way in ("auto", "copies", "stores"):
            call = getattr(tpk, op)
            departing(ctx, way, lambda ctx, call=call: call(a, b, ctx.group, path=path))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                departing(ctx, way, lambda ctx, call=call: call(a, b, ctx.group, path=path))
                torch.cuda.synchronize()
            moves = [event.name for event in profile.events() if copies in event.name]
            assert bool(moves) == (way == "copies" or (way == "auto" and not stored)), (op, way, moves)

"""Constants of the machine, from the link suite's rows. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..records import Row, geomean
from .link_cases import sm_name

__all__ = ["crossover", "fit_line", "link_constants"]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(overhead, slope) of ``t = overhead + slope * x`` with the least squared *relative* error, overhead >= 0.

    Args:
        points: (x, t) with x >= 0 and t > 0, at least two different x.
    """
    # Weighted normal equations, weights 1 / t^2.
    w = [1.0 / (t * t) for _, t in points]
    sw = sum(w)
    swx = sum(wi * x for wi, (x, _) in zip(w, points, strict=True))
    swt = sum(wi * t for wi, (_, t) in zip(w, points, strict=True))
    swxx = sum(wi * x * x for wi, (x, _) in zip(w, points, strict=True))
    swxt = sum(wi * x * t for wi, (x, t) in zip(w, points, strict=True))
    scale = sw * swxx - swx * swx
    if len({x for x, _ in points}) < 2 or scale <= 0:
        raise ValueError("points: expected at least two different x.")
    overhead, slope = (swt * swxx - swx * swxt) / scale, (sw * swxt - swx * swt) / scale
    return (overhead, slope) if overhead >= 0 else (0.0, swxt / swxx)


def crossover(first: Mapping[float, float], second: Mapping[float, float]) -> float | None:
    """The size up to which ``first`` takes less time than ``second``: the last crossing, linear between sizes.

    Args:
        first, second: time by size, at least one common size.

    Returns:
        The largest common size where ``first`` is faster even there, 0 where it is faster nowhere, None without a
        common size.
    """
    sizes = sorted(set(first) & set(second))
    if not sizes:
        return None
    faster = [size for size in sizes if first[size] < second[size]]
    if not faster:
        return 0.0
    low = faster[-1]
    if low == sizes[-1]:
        return low
    high = sizes[sizes.index(low) + 1]
    gain, loss = second[low] - first[low], first[high] - second[high]
    return low + (high - low) * gain / (gain + loss)


def link_constants(rows: Sequence[Row]) -> dict[str, Any]:
    """What the cost and schedule models need, of the rows of one world; what was not measured is left out.

    Bandwidths are per rank with all ranks at once, in 10^9 bytes a second, of the largest piece measured; copies on the
    device count bytes read and written. ``copy_engine_overhead_us`` and ``copy_engine_gbps`` are the line through the
    pushes of one copy a call. A slow-down is the time of a product beside a transfer over its time alone.
    """
    good = [
        row for row in rows if row.suite == "link" and row.status == "ok" and row.best and row.role != "noise"
    ]
    found: dict[str, Any] = {}
    best: dict[str, float] = {}
    for row in good:
        if row.op == "copy":  # torch's is the copy engine's in a graph, a kernel's and faster from the host
            us = min(stats.p50 for stats in (row.us, row.host_us) if stats)
            best["hbm_gbps"] = max(best.get("hbm_gbps", 0.0), row.bytes / us * 1e-3)
        if row.op == "matmul" and row.tflops:
            name = f"peak_tflops_{ {'bfloat16': 'bf16', 'float16': 'fp16'}.get(row.dtype, row.dtype) }"
            best[name] = max(best.get(name, 0.0), row.tflops)
    found |= best

    pushes = _times(good, "push", "engine")
    if len(pushes) >= 2:
        overhead, slope = fit_line(sorted(pushes.items()))
        found["copy_engine_overhead_us"] = overhead
        found["copy_engine_gbps"] = 1e-3 / slope if slope > 0 else math.inf
    for op, prefix in (("push", "sm_push"), ("pull", "sm_pull"), ("all_gather", "sm_all_gather")):
        found |= _sm_bandwidths(good, op, prefix)
    engine = _times(good, "all_gather", "engine")
    world = max((row.world for row in good), default=1)
    if engine:
        found["copy_engine_all_gather_gbps"] = max(s * (world - 1) * 1e-3 / t for s, t in engine.items())
    crossing = crossover(_times(good, "all_gather", sm_name("bulk")), engine)
    if crossing is not None:
        found["sm_crossover_bytes"] = crossing
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        rates = [
            (float(r.params["bytes"]), r.gbps) for r in good if r.op == op and r.variant == "nccl" and r.gbps
        ]
        if rates:
            found[f"nccl_{op}_gbps"] = max(rates)[1]
    found |= _flags(good, world)
    found |= _beside(good)
    for row in good:
        if row.op == "flag_round_trip" and row.best:
            found["flag_round_trip_us"] = row.best.p50
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def _times(rows: Sequence[Row], op: str, variant: str) -> dict[float, float]:
    """us by bytes of a piece."""
    return {
        float(row.params["bytes"]): row.best.p50
        for row in rows
        if row.op == op and row.variant == variant and row.best
    }


def _sm_bandwidths(rows: Sequence[Row], op: str, prefix: str) -> dict[str, float]:
    """GB/s by number of SMs, bulk copies, of the largest piece."""
    largest: dict[int, tuple[float, float]] = {}
    for row in rows:
        e = row.extra
        pushed = op == "pull" or not e.get("pull")
        if row.op == op and e.get("kind") == "bulk" and pushed and not e.get("flag") and row.gbps:
            candidate = (float(row.params["bytes"]), row.gbps)
            largest[int(e["sms"])] = max(candidate, largest.get(int(e["sms"]), candidate))
    return {f"{prefix}_gbps_{sms}sms": gbps for sms, (_, gbps) in sorted(largest.items())}


def _flags(rows: Sequence[Row], world: int) -> dict[str, float]:
    """What a flag behind a piece costs: the median over sizes, per flag."""
    found = {}
    for name, plain in (("flag_cost_us", "engine"), ("sm_flag_cost_us", sm_name("bulk"))):
        costs = []
        for op, flags in (("push", 1), ("all_gather", world - 1)):
            without, with_flag = _times(rows, op, plain), _times(rows, op, f"{plain} +flag")
            # One kernel raises all its flags together, the engine one after the other.
            each = flags if plain == "engine" else 1
            costs += [
                (with_flag[size] - without[size]) / each for size in sorted(set(without) & set(with_flag))
            ]
        if costs:
            found[name] = median(costs)
    return found


def _beside(rows: Sequence[Row]) -> dict[str, float]:
    """Slow-downs of products beside a gather, geometric means over the shapes."""
    found = {}
    for name, variant in (
        ("engine_beside_gemm_slowdown", "engine"),
        ("sm_beside_gemm_slowdown", sm_name("bulk")),
    ):
        of = [row.extra.get("gemm_slowdown") for row in rows if row.op == "beside" and row.variant == variant]
        known = [float(value) for value in of if value]
        if known:
            found[name] = geomean(known)
    return found

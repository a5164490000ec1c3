"""``explain()``: what a call would run, and why, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.ops import _checks, _gemm, _groups, _paths

_OPS = ("matmul", "all_gather_matmul", "matmul_replicated", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Explanation:
    """What a call would run.

    Attributes:
        op: the operation.
        path: transport and product, as the ``path`` argument takes it.
        product: sizes of the product on this rank (the first, if there are several).
        why: reason for the choice of the product's implementation.
        wire_bytes: bytes that this rank receives from others in the forward pass.
        plan: how the Stream-K kernel would cut this product (schedule, tile, workers, splits, predicted time),
            whether or not the path uses it; None where no such kernel takes this dtype.
    """

    op: str
    path: str
    product: str
    why: str
    wire_bytes: int
    plan: dict[str, Any] | None = field(default=None)

    def __str__(self) -> str:
        lines = [f"{self.op}: path {self.path}", f"  product   {self.product}", f"  because   {self.why}"]
        if self.path != self.path.partition("+")[0]:
            lines.append(f"  receives  {self.wire_bytes:,} bytes from other ranks")
        if self.plan is not None:
            used = "" if self.path.endswith("streamk") else " (not on this path)"
            p = self.plan
            lines.append(
                f"  stream-k  {p['schedule']}, tile {'x'.join(map(str, p['tile']))}, {p['tiles']} tiles of "
                f"{p['k_iters']} iterations over {p['workers']} workers, {p['partial_tiles']} partial tiles, "
                f"predicted {p['predicted_us']:.0f} us{used}"
            )
        return "\n".join(lines)


def explain(
    op: str,
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    group: _groups.GroupLike = None,
    *,
    path: str = "auto",
    gather_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    **_: Any,
) -> Explanation:
    """Tell what ``tpkernels.<op>(a, b, group, ...)`` would run.

    Only shapes, strides, dtypes and devices are read: tensors made by ``torch.empty(..., device="meta")`` do.
    No communication takes place. Other keyword arguments of the operation are accepted and ignored.

    Args:
        op: "matmul", "all_gather_matmul", "matmul_replicated", "matmul_reduce_scatter" or "matmul_all_reduce".
        a: left operand as the operation takes it.
        b: weight or list of weights.
        group: process group of a distributed operation.
        path: as in the operation.
        gather_dim: as in all_gather_matmul.
        shard_sizes: as in all_gather_matmul.

    Raises:
        ArgumentError: unknown operation, or a path that does not exist.
        ShapeError, DTypeError, DeviceError: as the operation itself.
        BackendError: a path that was asked for cannot run here.
    """
    if op not in _OPS:
        raise ArgumentError(f"op: expected one of {', '.join(_OPS)}, got {op!r}.")
    weight = b if isinstance(b, Tensor) else b[0]
    operand = a if isinstance(a, Tensor) else a[0]
    _checks.check_product("a", operand, "b", weight)
    distributed = op != "matmul"
    request = _paths.parse(path, operand.device.type, distributed=distributed)
    choice = _paths.choose_gemm(request, operand.device.type, operand.dtype)
    transport, wire, shape = "none", 0, list(operand.shape)
    if distributed:
        members = _groups.resolve(_groups.group_name_of(group))
        transport = _groups.transport_of(members, operand.device, "a")
        _paths.check_transport(request, transport, members.name)
        if op == "all_gather_matmul":
            dim = _checks.check_dim("gather_dim", gather_dim, "a", operand)
            shape[dim] = sum(_groups.gather_sizes(operand.shape[dim], shard_sizes, members, "a"))
        wire = _wire_bytes(op, operand, shape, weight.shape[-1], members.world)
    if wire == 0:
        transport = "none"
    name = choice.gemm if transport == "none" else f"{transport}+{choice.gemm}"
    whole = torch.empty(shape, dtype=operand.dtype, device="meta")
    product = _gemm.describe(whole, weight)
    return Explanation(op, name, product, choice.why, wire, _streamk_plan(operand, whole, weight))


def _wire_bytes(op: str, a: Tensor, whole: Sequence[int], n: int, world: int) -> int:
    rows, item = math.prod(whole[:-1]), a.element_size()
    if op == "all_gather_matmul":
        return (math.prod(whole) - a.numel()) * item
    share = rows * n * item * (world - 1) // world
    return {"matmul_replicated": 0, "matmul_reduce_scatter": share, "matmul_all_reduce": 2 * share}[op]


def _streamk_plan(operand: Tensor, whole: Tensor, weight: Tensor) -> dict[str, Any] | None:
    device = "cuda" if operand.device.type in ("cuda", "meta") else operand.device.type
    if operand.dtype not in _paths.STREAMK_DTYPES.get(device, ()):
        return None
    batch = math.prod(whole.shape[:-2]) if weight.dim() > 2 else 1
    m = whole.shape[-2] if weight.dim() > 2 else math.prod(whole.shape[:-1])
    workers = 0
    if operand.is_cuda:
        workers = torch.cuda.get_device_properties(operand.device).multi_processor_count
    kind, numbers, predicted = torch.ops.tpkernels.streamk_plan(
        batch, m, weight.shape[-1], weight.shape[-2], device, "auto", workers, 1
    )
    bm, bn, bk, tiles, k_iters, used_workers, splits, partial_tiles = numbers
    return {
        "schedule": kind,
        "tile": (bm, bn, bk),
        "tiles": tiles,
        "k_iters": k_iters,
        "workers": used_workers,
        "splits": splits,
        "partial_tiles": partial_tiles,
        "predicted_us": predicted,
    }

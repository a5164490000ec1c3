"""``explain()``: what a call would run, and why, without running it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm import auto, departures, described, small
from tpkernels.comm.auto import Asked
from tpkernels.errors import ArgumentError
from tpkernels.fp8 import api as fp8
from tpkernels.ops import _collectives, _gemm, _grouped, _groups, _paths, _plans, _preferred, api
from tpkernels.ops._arrays import tensor
from tpkernels.ops.grouped import grouped_matmul
from tpkernels.tune import mode

_LOCAL = ("matmul", "grouped_matmul")
_OPS = (*_LOCAL, "all_gather_matmul", "matmul_replicated", "matmul_reduce_scatter", "matmul_all_reduce")
_SCALED = "scaled_matmul"
_SHOWN = 6  # plans that an explanation lists


@dataclass(frozen=True)
class Explanation:
    """What a call would run.

    Attributes:
        op: the operation.
        path: transport and product, as the ``path`` argument takes it.
        product: sizes of the product on this rank (the first, if there are several).
        why: reason for the choice; where path "auto" may fuse, with the predicted times of both paths; of ``matmul``,
            with the times of tuning, where that is on.
        wire_bytes: bytes that this rank receives from others in the forward pass.
        plan: how the Stream-K kernel would cut this product (schedule, tile of a CTA, cluster, workers, splits,
            predicted time), whether or not the path uses it; None where no such kernel takes this dtype. A cluster
            counts as one tile and one worker. With a gate the Hopper kernel gives half of a tile's columns to it, the
            others make two products of this plan; predicted for both. Where gradients make a gated ``matmul``
            compute its products apart (see ``save_preact``), it is the plan of one. On path "fused" it is that of this
            rank, with the rows that come from others, or go to them; predicted with what is waited for.
        plan_why: why that plan cuts tiles, or does not.
        candidates: predicted times of the best plans of other tiles, and of cuBLAS where there is an estimate, cheapest
            first: (microseconds, what).
        transfers: how rows travel on path "fused"; on another path, whether "fused" could be asked for instead. Empty
            where the operation cannot be fused, or nothing travels.
    """

    op: str
    path: str
    product: str
    why: str
    wire_bytes: int
    plan: dict[str, Any] | None = field(default=None)
    plan_why: str = ""
    candidates: tuple[tuple[float, str], ...] = ()
    transfers: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op}: path {self.path}", f"  product   {self.product}", f"  because   {self.why}"]
        if "+" in self.path:
            lines.append(f"  receives  {self.wire_bytes:,} bytes from other ranks")
        if self.transfers:
            lines.append(f"  fused     {self.transfers}")
        if self.plan is not None:
            used = "" if self.path.endswith("streamk") else " (not on this path)"
            p = self.plan
            tile, cluster = ("x".join(map(str, p[key])) for key in ("tile", "cluster"))
            tile += p["suffix"]
            clusters = "" if cluster == "1x1" else f" in clusters of {cluster}"
            lines.append(
                f"  stream-k  {p['schedule']}, tile {tile}{clusters}, {p['tiles']} tiles of "
                f"{p['k_iters']} iterations over {p['workers']} workers, {p['partial_tiles']} partial tiles, "
                f"predicted {p['predicted_us']:.0f} us{used}"
            )
            if self.plan_why:
                lines.append(f"  why so    {self.plan_why}")
            for i, (us, what) in enumerate(self.candidates):
                lines.append(f"  {'' if i else 'predicted':9} {us:9.1f} us  {what}")
        return "\n".join(lines)


def explain(op: str, a: Any, b: Any, group: _groups.GroupLike = None, **options: Any) -> Explanation:
    """Tell what ``tpkernels.<op>(a, b, group, **options)`` would run.

    Only shapes, strides, dtypes and devices are read: tensors made by ``torch.empty(..., device="meta")`` do, and
    stand for tensors on the group's device (for ``matmul``, on CUDA where there is a GPU). Nothing is computed and
    nothing is communicated.

    Args:
        op: "matmul", "grouped_matmul", "all_gather_matmul", "matmul_replicated", "matmul_reduce_scatter" or
            "matmul_all_reduce"; or "scaled_matmul", whose operands are what ``tpkernels.quantize`` returns, and which
            has no plan here.
        a: left operand, or a list of them, as the operation takes it.
        b: weight, or a list of weights.
        group: process group of a distributed operation; of "grouped_matmul" its ``group_sizes``, which may also be
            given by name.
        options: other arguments of the operation.

    Raises:
        ArgumentError: unknown operation.
        TypeError: an option that the operation does not have.
        TpkError: whatever the operation itself would raise, ``BackendError`` included.
    """
    if op == _SCALED:
        place = _place(a.data, _device_type(a.data, None))
        return Explanation(op, *fp8.foresee(a, b, place, **options), wire_bytes=0)
    if op not in _OPS:
        raise ArgumentError(f"op: expected one of {', '.join((*_OPS, _SCALED))}, got {op!r}.")
    operand, weight = _tensors("a", a)[0], _tensors("b", b)[0]
    sizes_of_groups: tuple[int, ...] = ()
    groups: tuple[Any, ...] = () if op == "matmul" else (group,)
    if op == "grouped_matmul":
        options = {"group_sizes": group, "offs": None} | options
        sizes_of_groups = tuple(_grouped.sizes_of(options.pop("group_sizes"), options.pop("offs")))
        groups = (list(sizes_of_groups),)
    # The operation on meta tensors runs all its checks and gives the result's shape.
    function = grouped_matmul if op == "grouped_matmul" else getattr(api, op)
    result = function(_meta(a), _meta(b), *groups, **{k: _meta(v) for k, v in options.items()})
    out = _tensors("result", result)[0]

    members = None if op in _LOCAL else _groups.resolve(_groups.group_name_of(group))
    device = _device_type(operand, members)
    request = _paths.parse(options.get("path", "auto"), device, distributed=members is not None)
    shape = list(operand.shape)
    if op == "all_gather_matmul":
        dim = options.get("gather_dim", 0) % operand.dim()
        shape[dim] = out.shape[dim]
    whole = torch.empty(shape, dtype=operand.dtype, device="meta")
    prefix, wire, transfers, decision, way = "", 0, "", None, None
    choice = _paths.choose_gemm(request, device, operand.dtype)
    if op == "matmul" and options.get("accumulate_into") is None:
        choice = _preference(choice, operand, weight, options, out.dtype)
    if op == "grouped_matmul":
        place, path = _place(operand, device), options.get("path", "auto")
        gate = None if options.get("gate") is None else tensor("gate", options["gate"])
        choice = _grouped.choose_grouped(path, place, operand, weight, sizes_of_groups, gate)
    if members is not None and members.world > 1 and op != "matmul_replicated":
        transport = _groups.transport_of(members, torch.device(device), "a")
        if op in described.OPS:
            place, rows = _place(operand, device), _rows(op, operand, members, options)
            asked = _asked(op, a, b, out.dtype)
            if request.open:
                decision = auto.foresee(asked, rows, members, place, transport, choice.gemm)
            transfers = described.transfers(asked, rows, request, members, place, decision)
        if decision is not None:
            choice = _paths.Choice("streamk" if decision.fused else choice.gemm, decision.why)
        if request.transport == _paths.FUSED or (decision is not None and decision.fused):
            transport = _paths.FUSED
            if op in described.OPS:
                way = asked.way(rows)
        else:
            _paths.check_transport(request, transport, members.name)
        prefix = f"{transport}+"
        wire = _wire_bytes(op, operand, out, members, options, padded=transport not in ("nccl", _paths.FUSED))
        if way is not None:
            beside = _paths.choose_beside(request, device, operand.dtype)
            choice = _paths.beside(choice, beside, request.open)
            if op == "matmul_all_reduce":
                wire = small.wire_bytes(way, out.numel() * out.element_size(), members.world)
    if op in _LOCAL and choice.open and mode.active() and (device == "cpu" or torch.cuda.is_available()):
        sizes_or_none = sizes_of_groups if op == "grouped_matmul" else None
        choice = _tuned(choice, operand, weight, out.dtype, _place(operand, device), options, sizes_or_none)
    name = prefix + choice.gemm
    sizes = _gemm.describe(whole, weight, gated=options.get("gate") is not None)
    sizes += f"; {way}" if way is not None else ""
    if op == "grouped_matmul":
        sizes = _grouped.describe(
            _place(operand, device),
            operand,
            weight,
            sizes_of_groups,
            choice.gemm,
            gated=options.get("gate") is not None,
        )
    if operand.dtype not in _paths.STREAMK_DTYPES.get(device, ()):
        return Explanation(op, name, sizes, choice.why, wire, transfers=transfers)
    product = _product(whole, weight, _follows(op, operand, weight, options))
    product = product._replace(out_bytes=out.element_size())
    if op == "grouped_matmul":
        product = product._replace(batch=1, m=whole.shape[0], group_sizes=sizes_of_groups)
    if op in _LOCAL:  # the others gather or keep rows of K
        outer = operand.stride(-1) != 1 and weight.stride(-1) == 1
        product = product._replace(outer_major=outer, biased=_only_a_bias(options, out.dtype))
    if device == "cuda":
        product = product._replace(dtype=_plans.dtype_name(operand.dtype))
    if members is not None and prefix == f"{_paths.FUSED}+" and way is None and op in described.OPS:
        product = product._replace(collective=op, shard_rows=tuple(rows), rank=members.rank)
        if op != "all_gather_matmul":
            row_bytes = product.n * product.out_bytes
            product = product._replace(stored=departures.stores(op, rows, row_bytes, os.environ))
    machine = _plans.machine_of(device, operand.device, product.dtype)
    plans = _plans.candidates(product, machine)
    plan_why = _plans.why(product, machine, plans[0])
    listed = _listed(product, machine, plans)
    return Explanation(op, name, sizes, choice.why, wire, plans[0], plan_why, listed, transfers)


def _tensors(name: str, value: Any) -> list[Tensor]:
    """The tensors of an operand or result, which may be one, a list, or a list and the gathered operand."""
    if isinstance(value, (list, tuple)):
        if len(value) == 0:
            raise ArgumentError(f"{name}: expected at least one tensor, got an empty list.")
        return [x for item in value for x in _tensors(name, item)]
    return [tensor(name, value)]


def _meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_meta(item) for item in value]
    if isinstance(value, Tensor) or hasattr(value, "__dlpack__"):
        return tensor("argument", value).detach().to("meta")
    return value


def _device_type(operand: Tensor, members: _groups.Group | None) -> str:
    if operand.device.type != "meta":
        return operand.device.type
    types = ["cpu", "cuda"] if members is None else [d.type for d in members.process_group._device_types]
    return "cuda" if "cpu" not in types or ("cuda" in types and torch.cuda.is_available()) else "cpu"


def _place(operand: Tensor, device: str) -> torch.device:
    """The device itself, with its index, as tensors name it."""
    if operand.device.type != "meta":
        return operand.device
    indexed = device == "cuda" and torch.cuda.is_available()
    return torch.device(device, torch.cuda.current_device()) if indexed else torch.device(device)


def _rows(op: str, a: Tensor, members: _groups.Group, options: dict[str, Any]) -> list[int]:
    """Rows of every rank's shard, of all leading dimensions."""
    if op == "matmul_all_reduce":
        return _groups.shard_sizes(math.prod(a.shape[:-1]), members.world)
    gather = op == "all_gather_matmul"
    dim = options.get("gather_dim" if gather else "scatter_dim", 0) % a.dim()
    sizes = options.get("shard_sizes")
    if sizes is None:
        sizes = [a.shape[dim]] * members.world if gather else _groups.shard_sizes(a.shape[dim], members.world)
    others = math.prod(n for d, n in enumerate(a.shape[:-1]) if d != dim)
    return [size * others for size in sizes]


def _asked(op: str, a: Any, b: Any, out_dtype: torch.dtype) -> Asked:
    """The call, as path choice sees it."""
    operands, weights = _tensors("a", a), _tensors("b", b)
    gather = op == "all_gather_matmul"
    ns = tuple(w.shape[-1] for w in (weights if gather else weights[:1]))
    return Asked(op, tuple(x.shape[-1] for x in operands), ns, operands[0].dtype, out_dtype)


def _wire_bytes(
    op: str, a: Tensor, out: Tensor, members: _groups.Group, options: dict[str, Any], *, padded: bool
) -> int:
    """Bytes that this rank receives in the forward pass. padded: shorter shards travel as long as the longest."""
    others = members.world - 1
    if op == "all_gather_matmul":
        dim = options.get("gather_dim", 0) % a.dim()
        sizes = options.get("shard_sizes") or [a.shape[dim]] * members.world
        row = math.prod(n for d, n in enumerate(a.shape) if d != dim)
        received: int = others * max(sizes) if padded else sum(sizes) - sizes[members.rank]
        return received * row * a.element_size()
    size = out.numel() * out.element_size()
    if op == "matmul_reduce_scatter" or size <= _collectives.ONE_SHOT_BYTES:
        return others * size
    blocks = _collectives.block_sizes(out.numel(), members.world)
    mine = blocks[members.rank]
    gathered: int = others * max(blocks) if padded else sum(blocks) - mine
    return (others * mine + gathered) * out.element_size()


def _tuned(
    choice: _paths.Choice,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
    sizes: tuple[int, ...] | None,
) -> _paths.Choice:
    """What tuning has chosen for a ``matmul``, or a ``grouped_matmul`` with ``sizes``, if it has."""
    from tpkernels.tune import grouped, local

    gate, bias, residual, into = (
        None if options.get(name) is None else tensor(name, options[name])
        for name in ("gate", "bias", "residual", "accumulate_into")
    )
    activation = options.get("activation") or "none"
    follows = _gemm.Epilogue(gate, bias, residual, float(options.get("alpha", 1.0)), activation)
    kept = into is None and api.keeps_preact(
        activation, options.get("save_preact", True), a, b, gate, bias, gated=gate is not None
    )
    if sizes is not None:
        call = grouped.GroupedCall(a, b, follows, sizes, out_dtype, kept)
        return local.foreseen(choice, call, device)
    return local.foreseen(choice, local.Call(a, b, follows, out_dtype, kept, into), device)


def _product(whole: Tensor, weight: Tensor, follows: tuple[bool, bool]) -> _plans.Product:
    *batch, m, n = _gemm.output_shape(whole, weight)
    if weight.dim() == 2:  # all rows are one matrix
        batch, m = [], math.prod([*batch, m])
    return _plans.Product(math.prod(batch), m, n, weight.shape[-2], *follows)


def _preference(
    choice: _paths.Choice, a: Tensor, b: Tensor, options: dict[str, Any], out_dtype: torch.dtype
) -> _paths.Choice:
    """What path "auto" takes for a product as ``matmul`` calls it."""
    names = ("gate", "bias", "residual")
    gate, bias, residual = (x if isinstance(x, Tensor) else None for x in map(options.get, names))
    if not _preferred.suits(a, b, gate):
        return choice
    activation = options.get("activation") or "none"
    if gate is not None and api.keeps_preact(
        activation, options.get("save_preact", True), a, b, gate, gated=True
    ):
        return choice
    return _preferred.choose(choice, a, b, _gemm.Epilogue(gate, bias, residual, 1.0, activation), out_dtype)


def _follows(op: str, operand: Tensor, weight: Tensor, options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether this rank's (first) product is gated in one call, and whether more than rounding follows it."""
    if op in ("matmul_reduce_scatter", "matmul_all_reduce"):  # all follows the sum over the ranks
        return False, False
    activation = options.get("activation") or "none"
    if op not in _LOCAL:
        biases = options.get("biases")
        first = biases[0] if isinstance(biases, (list, tuple)) else biases
        return False, first is not None or activation != "none"
    given = {name: options.get(name) for name in ("gate", "bias", "residual", "accumulate_into")}
    if getattr(given["accumulate_into"], "dtype", None) == torch.float32:
        given["accumulate_into"] = None  # sums are made where they are stored
    if given["gate"] is None:
        return False, activation != "none" or any(x is not None for x in given.values())
    factors = (x for x in (operand, weight, given["gate"]) if isinstance(x, Tensor))
    apart = api.keeps_preact(activation, options.get("save_preact", True), *factors, gated=True)
    return not apart, not apart


def _only_a_bias(options: dict[str, Any], out_dtype: torch.dtype) -> bool:
    """Whether all that follows the product is a bias, and the result has two bytes an element."""
    others = ("gate", "residual", "accumulate_into")
    if options.get("bias") is None or any(options.get(name) is not None for name in others):
        return False
    return (options.get("activation") or "none") == "none" and out_dtype.itemsize == 2


def _listed(
    product: _plans.Product, machine: _plans.Machine, plans: list[dict[str, Any]]
) -> tuple[tuple[float, str], ...]:
    listed = []
    for p in plans[:_SHOWN]:
        cuts = f"{p['schedule']}, {p['partial_tiles']} partial tiles" if p["partial_tiles"] else p["schedule"]
        listed.append((float(p["predicted_us"]), f"{_plans.tile_name(p, machine)} {cuts}"))
    if machine.architecture == "sm90":
        calls = "cuBLAS, two products" if product.gated else "cuBLAS"
        if product.group_sizes:
            calls = "cuBLAS, a product for each group"
        listed.append((_plans.estimate_us(product, machine.multiprocessors), f"{calls}, a rough estimate"))
    return tuple(sorted(listed, key=lambda one: one[0]))

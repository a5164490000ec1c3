"""``tpkernels::grouped_matmul``: rows in groups, each multiplied by a weight of its own.

``grouped_matmul`` returns ``[out]``, or what the backward pass wants too: ``[out, preact]``, and with a gate
``[out, a b, a gate]``.

Who multiplies: "streamk" is one call of the kernels for all groups, one launch on Hopper (up to 64 groups that have
rows); "cublas" and "blas" are a product of the library for each group. Path "auto" takes the former on Hopper, for
operands that its kernel loads. The gradient of the weights: :mod:`._grouped_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.ops import _activation, _checks, _gemm, _main_grad, _nvtx, _paths, _plans
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Target
from tpkernels.ops._matmul import half_grads, preact_grad
from tpkernels.ops._registry import register
from tpkernels.tune import mode

_ops = torch.ops.tpkernels


def sizes_of(group_sizes: Any, offs: Any) -> list[int]:
    """Rows of every group, from either of the two ways to name them; see :func:`tpkernels.grouped_matmul`."""
    if (group_sizes is None) == (offs is None):
        raise ArgumentError(
            "group_sizes, offs: expected one of the two, the rows of every group or where each ends, got "
            f"{'neither' if offs is None else 'both'}."
        )
    if offs is None:
        return _integers("group_sizes", group_sizes)
    ends = _integers("offs", offs)
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _integers(name: str, values: Any) -> list[int]:
    if isinstance(values, Tensor):
        if (
            values.dim() != 1
            or values.is_floating_point()
            or values.is_complex()
            or values.dtype == torch.bool
        ):
            raise ShapeError(
                f"{name}: expected integers, a list or a tensor of one dimension, got {values.dtype} of shape "
                f"{list(values.shape)}."
            )
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                f"{name}: a CUDA tensor is read by the host, which has to wait for the device and cannot while a CUDA "
                "graph is captured; pass a list or a CPU tensor, whose values the graph keeps."
            )
        return values.tolist()  # of a CUDA tensor: waits for the device
    if not isinstance(values, (list, tuple)):
        raise DTypeError(
            f"{name}: expected a list of integers or a tensor of them, got {type(values).__name__}."
        )
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise DTypeError(f"{name}: expected integers, got {value!r} for group {i}.")
    return list(values)


def check_sizes(sizes: Sequence[int], a: Tensor, groups: int) -> None:
    """One size for each group, none negative, that add up to the rows of ``a``."""
    if len(sizes) != groups:
        raise ShapeError(
            f"group_sizes: expected one number of rows for each of the {groups} weights, got {len(sizes)}."
        )
    for i, size in enumerate(sizes):
        if guard_or_false(size < 0):
            raise ShapeError(f"group_sizes: expected numbers of rows, 0 or more, got {size} for group {i}.")
    if guard_or_false(sum(sizes) != a.shape[0]):
        raise ShapeError(
            f"group_sizes: expected numbers that add up to the rows of a, {a.shape[0]}, got {_listed(sizes)}, "
            f"{sum(sizes)} in all."
        )


def _listed(sizes: Sequence[int]) -> str:
    most = 16
    return (
        str(list(sizes[:most]))
        if len(sizes) <= most
        else f"{list(sizes[:most])} and {len(sizes) - most} more"
    )


def _validate(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    sizes: Sequence[int],
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    _checks.check_operand("a", a)
    _checks.check_operand("b", b, min_dim=3)
    _checks.check_like("b", b, "a", a)
    if a.dim() != 2:
        raise ShapeError(
            f"a: expected 2 dimensions [rows of all groups, K], got shape {list(a.shape)}; groups of as many rows each "
            "are batches of tpkernels.matmul."
        )
    if b.dim() != 3:
        raise ShapeError(f"b: expected 3 dimensions [groups, K, N], got shape {list(b.shape)}.")
    if a.shape[1] != b.shape[1]:
        raise ShapeError(
            f"b: expected {a.shape[1]} rows in each matrix (K, the last dimension of a {list(a.shape)}), got "
            f"{b.shape[1]} in b {list(b.shape)}; weights stored [groups, out, in] are passed as weight.mT."
        )
    check_sizes(sizes, a, b.shape[0])
    _checks.check_gate(gate, b, bias, a)
    if bias is not None:
        _checks.check_operand("bias", bias)
        _checks.check_like("bias", bias, "a", a)
        if bias.shape != b.shape[::2]:
            raise ShapeError(
                f"bias: expected shape {[b.shape[0], b.shape[2]]} (a row for each group), got {list(bias.shape)}."
            )
    _checks.check_activation(activation)
    return _checks.check_out_dtype(out_dtype, a.dtype)


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Number and rows of every group that has rows."""
    begin = 0
    for group, size in enumerate(sizes):
        if size > 0:
            yield group, slice(begin, begin + size)
        begin += size


def describe(
    device: torch.device, a: Tensor, b: Tensor, sizes: Sequence[int], gemm: str, *, gated: bool = False
) -> str:
    """For a path record: sizes, and whether the groups share a launch on that device."""
    used = sum(size > 0 for size in sizes)
    hopper = gemm == "streamk" and _plans.machine_of(device.type, device).architecture == "sm90"
    how = "all in one list of tiles" if hopper else "a product for each"
    return f"{_gemm.describe(a, b, gated=gated)} in {used} of {len(sizes)} groups, {how}"


def _implementation(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    group_sizes: list[int],
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
    *_: Any,
) -> list[Tensor]:
    dtype = _validate(a, b, gate, bias, group_sizes, activation, out_dtype)
    choice = choose_grouped(path, a.device, a, b, group_sizes, gate)
    epilogue = _gemm.Epilogue(gate, bias, activation=activation)
    if choice.open and mode.active():
        from tpkernels.tune import grouped, local

        call = grouped.GroupedCall(a, b, epilogue, group_sizes, dtype, return_preact)
        choice = local.tuned(choice, call, _paths.library_of(a.device.type))
    choice = choice._replace(open=False)  # products of single groups are not tuned: there are too many
    with _nvtx.phase("product", choice.gemm):
        made = run(choice, a, b, epilogue, group_sizes, dtype, return_preact)
    detail = describe(a.device, a, b, group_sizes, choice.gemm, gated=gate is not None)
    _paths.record("grouped_matmul", "none", choice.gemm, detail, choice.why)
    return made


def run(
    choice: _paths.Choice,
    a: Tensor,
    b: Tensor,
    epilogue: _gemm.Epilogue,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    want_preact: bool = False,
) -> list[Tensor]:
    """The products of all groups, and if asked for what was there before activation and gate. Arguments are checked."""
    if choice.gemm != "streamk":
        return _by_library(choice, a, b, epilogue, sizes, out_dtype, want_preact)
    if epilogue.gate is not None and want_preact:  # the kernel cannot store both products
        wide, alone = accumulate_dtype(a.dtype), _gemm.Epilogue()
        up, gated = (run(choice, a, w, alone, sizes, wide)[0] for w in (b, epilogue.gate))
        both = [x if out_dtype == wide else x.to(out_dtype) for x in (up, gated)]
        return [(_activation.forward(gated, epilogue.activation) * up).to(out_dtype), *both]
    out = a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype)
    preact = torch.empty_like(out) if want_preact else None
    _ops.streamk_gemm_grouped(
        a,
        b,
        epilogue.bias,
        out,
        preact,
        epilogue.activation,
        sizes,
        gate=epilogue.gate,
        allow_tf32=_plans.may_use_tf32(a.dtype),
        **_gemm.arguments(choice.plan),
    )
    return [out] if preact is None else [out, preact]


def choose(path: str, device: torch.device, dtype: torch.dtype) -> _paths.Choice:
    """Who makes a product for each group."""
    return _paths.choose_gemm(_paths.parse(path, device.type, distributed=False), device.type, dtype)


def choose_grouped(
    path: str, device: torch.device, a: Tensor, b: Tensor, sizes: Sequence[int], gate: Tensor | None = None
) -> _paths.Choice:
    """Who multiplies ``a`` and ``b`` on that device.

    One launch of our kernel took 0.70 to 1.03 times as long as torch.mm for each group, over ten lists of 8 to 64
    groups of models, bfloat16, on one H200 (docs/grouped.md).
    """
    choice = choose(path, device, a.dtype)
    if choice.gemm != "cublas" or not _paths.parse(path, device.type, distributed=False).open:
        return choice
    hopper = _plans.machine_of(device.type, device).architecture == "sm90"
    if not hopper or _paths.streamk_missing(device.type, a.dtype) is not None:
        return choice
    if sum(size > 0 for size in sizes) < 2 or not (_has_rows(a) and _are_loaded(b, gate)):
        return choice
    why = "one launch for all groups; path='cublas' takes a product for each"
    return _paths.Choice("streamk", why, open=True)


def _are_loaded(b: Tensor, gate: Tensor | None) -> bool:
    """Whether TMA can load the weights, and a gate in the same way."""
    ways = ([b, gate], [b.mT, None if gate is None else gate.mT])
    return any(all(x is None or _has_rows(x) for x in way) for way in ways)


def _has_rows(x: Tensor) -> bool:
    """Whether TMA can load it by rows: contiguous, and beginning at multiples of 16 bytes. For elements of 2 bytes."""
    pitched = ((x.stride(d) % 8 == 0 and x.stride(d) > 0) or x.shape[d] <= 1 for d in range(x.dim() - 1))
    aligned = x.is_meta or x.data_ptr() % 16 == 0
    return x.numel() > 0 and aligned and (x.stride(-1) == 1 or x.shape[-1] == 1) and all(pitched)


def _by_library(
    choice: _paths.Choice,
    a: Tensor,
    b: Tensor,
    epilogue: _gemm.Epilogue,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    want_preact: bool,
) -> list[Tensor]:
    """A product for each group."""
    kept = 0 if not want_preact else 1 if epilogue.gate is None else 2
    made = [a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype) for _ in range(1 + kept)]
    for group, rows in spans(sizes):
        if epilogue.is_plain and not want_preact:
            product_into(choice, a[rows], b[group], made[0][rows])
            continue
        gate, bias = (None if x is None else x[group] for x in (epilogue.gate, epilogue.bias))
        one = _gemm.run(
            choice,
            a[rows],
            b[group],
            epilogue._replace(gate=gate, bias=bias),
            out_dtype=out_dtype,
            want_preact=want_preact,
        )
        for x, part in zip(made, [one.out, *one.kept], strict=True):
            x[rows] = part
    return made


def product_into(choice: _paths.Choice, left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right`` of one group."""
    if choice.gemm == "streamk":
        tf32 = _plans.may_use_tf32(left.dtype)
        _ops.streamk_gemm(left[None], right[None], None, out[None], None, "none", False, allow_tf32=tf32)
    elif left.is_cuda and out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(_gemm.run(choice, left, right, out_dtype=out.dtype).out)


def _fake(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    group_sizes: list[int],
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
    *_: Any,
) -> list[Tensor]:
    dtype = _validate(a, b, gate, bias, group_sizes, activation, out_dtype)
    kept = 0 if not return_preact else 1 if gate is None else 2
    return [a.new_empty(a.shape[0], b.shape[2], dtype=dtype) for _ in range(1 + kept)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, gate, bias, sizes, activation, _, return_preact, path, *into = inputs
    ctx.set_materialize_grads(False)
    ctx.sizes, ctx.activation, ctx.path, ctx.has_bias = sizes, activation, path, bias is not None
    ctx.targets = _main_grad.taken([b] if gate is None else [b, gate], *into)
    keep_bias = bias if activation != "none" and not return_preact else None
    ctx.save_for_backward(a, b, gate, keep_bias, *output[1:])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    need_a, need_b, _, need_bias = ctx.needs_input_grad[:4]
    a, b, gate, bias, *kept = ctx.saved_tensors
    if gate is not None:
        return _gated_grads(ctx, grads, a, b, gate, kept)
    grad = preact_grad(
        grads[0],
        grads[1] if kept else None,
        ctx.activation,
        lambda: kept[0] if kept else product(a, b, bias, ctx.sizes, ctx.path),
    )
    grad_a = grad_b = grad_bias = None
    if grad is not None:
        grad = grad.to(a.dtype)
        if need_a:
            grad_a = product(grad, b.mT, None, ctx.sizes, ctx.path)
        if need_b:
            grad_b = _weight_grad(a, grad, b, ctx.sizes, ctx.path, ctx.targets[0])
        if ctx.has_bias and need_bias:
            grad_bias = torch.stack([part.sum(0) for part in grad.split(ctx.sizes)]) if ctx.sizes else None
    return grad_a, grad_b, None, grad_bias


def _gated_grads(
    ctx: Any, grads: list[Tensor | None], a: Tensor, b: Tensor, gate: Tensor, kept: list[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a, b and gate of ``activation(a gate) * (a b)``."""
    need_a, need_b, need_gate = ctx.needs_input_grad[:3]
    d_up, d_gate = half_grads(
        grads,
        ctx.activation,
        a.dtype,
        lambda: kept or [product(a, w, None, ctx.sizes, ctx.path) for w in (b, gate)],
        has_kept=bool(kept),
    )
    if d_up is None or d_gate is None:
        return None, None, None
    grad_a = grad_b = grad_gate = None
    if need_a:  # two products, the sum rounded once
        wide = accumulate_dtype(a.dtype)
        halves = [(d_up, b), (d_gate, gate)]
        first, second = (product(d, w.mT, None, ctx.sizes, ctx.path, wide) for d, w in halves)
        grad_a = (first + second).to(a.dtype)
    if need_b:
        grad_b = _weight_grad(a, d_up, b, ctx.sizes, ctx.path, ctx.targets[0])
    if need_gate:
        grad_gate = _weight_grad(a, d_gate, gate, ctx.sizes, ctx.path, ctx.targets[1])
    return grad_a, grad_b, grad_gate


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    sizes: list[int],
    path: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The grouped product as an op, for use in backward formulas."""
    out: list[Tensor] = _ops.grouped_matmul(
        a, b, None, bias, sizes, "none", out_dtype, False, path, *_main_grad.NOWHERE
    )
    return out[0]


def _weight_grad(
    a: Tensor, grad: Tensor, b: Tensor, sizes: list[int], path: str, target: Target | None
) -> Tensor | None:
    """``a_g^T grad_g`` for every group, stored as ``b`` is; with a target it is added there."""
    if target is None:
        made: Tensor = _ops.grouped_weight_grad(a, grad, sizes, is_transposed(b), path)
        return made
    if not target.wanted():
        return None
    _ops.grouped_weight_grad_accumulate(a, grad, target.into(), sizes, path)
    return target.added(grad)


def is_transposed(b: Tensor) -> bool:
    """Whether a stack of weights [groups, K, N] is a view of one that is stored [groups, N, K]."""
    return b.stride(1) == 1 and b.stride(2) != 1


register("grouped_matmul", _implementation, _fake, setup_context=_setup_context, backward=_backward)


def _streamk_fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    preact: Tensor | None,
    activation: str,
    group_sizes: list[int],
    schedule: str = "auto",
    workers: int = 0,
    splits: int = 1,
    tile: str = "",
    multiprocessors: int = 0,
    gate: Tensor | None = None,
    allow_tf32: bool = False,
) -> None:
    """The kernel writes into ``out`` and ``preact`` and returns nothing."""


torch.library.register_fake("tpkernels::streamk_gemm_grouped", _streamk_fake)

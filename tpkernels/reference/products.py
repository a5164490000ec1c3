"""Matrix products and their fusions with collectives, all ranks in one process, float64.

``b`` is [K, N] (a stored weight [out, in] is passed as ``weight.T``) and ``a`` is [..., K]. A sharded value is a list,
one array per rank; a replicated one is a single array, and its gradient is the complete one (summed over the ranks).
Where a rank may have several weights, each entry of ``bs`` is an array or a list of them; results and gradients follow.

``rounding`` ("bfloat16", "float16", "float32") models the product's output type: partial sums are rounded to it for the
wire and added in rank order in float32, then bias and residual are added in float32 and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tpkernels.reference._array import Array, as_f64, flatten_rows, get_array_module, round_to, sum_to
from tpkernels.reference.activations import activation as apply_activation
from tpkernels.reference.activations import activation_backward
from tpkernels.reference.collectives import all_gather, sizes_along, split, sum_ranks


class ProductGrads(NamedTuple):
    """Gradients in the form of the inputs (array, list by rank, list by rank of lists); None where none was given."""

    a: Any
    b: Any
    bias: Any
    residual: Any
    gate: Any = None


def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    *,
    gate: Array | None = None,
    alpha: float = 1.0,
    rounding: str | None = None,
    return_preact: bool = False,
) -> Any:
    """activation(alpha * a @ b + bias) + residual: a [..., K], b [K, N], bias [N], residual [..., N] -> [..., N].

    With a gate (shape of b, no bias): activation(alpha * a @ gate) * (alpha * a @ b) + residual. b and gate may have
    batch dimensions that broadcast with those of a [..., M, K].

    With ``return_preact`` also alpha * a @ b + bias, as (out, preact).
    """
    if gate is not None and bias is not None:
        raise ValueError("bias must be None where there is a gate")
    preact = alpha * (as_f64(a) @ as_f64(b))
    if bias is not None:
        preact = preact + as_f64(bias)
    if gate is None:
        out = apply_activation(preact, activation)
    else:
        out = apply_activation(alpha * (as_f64(a) @ as_f64(gate)), activation) * preact
    if residual is not None:
        out = out + as_f64(residual)
    out = round_to(out, rounding)
    return (out, round_to(preact, rounding)) if return_preact else out


def matmul_backward(
    dy: Array,
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    *,
    gate: Array | None = None,
    alpha: float = 1.0,
) -> ProductGrads:
    """Gradients of :func:`matmul` for dy [..., N].

    dz = dy * f'(alpha * a @ b + bias),  da = alpha * dz @ b.T,  db = alpha * a.T @ dz over all rows,  dbias = rows of
    dz summed,  dresidual = dy. With a gate, g = alpha * a @ gate:  dz = dy * f(g),  dg = dy * (alpha * a @ b) * f'(g),
    da also + alpha * dg @ gate.T,  dgate = alpha * a.T @ dg.
    """
    a, b, dy = as_f64(a), as_f64(b), as_f64(dy)
    dz, dg, da_gate = dy, None, 0.0
    if gate is not None:
        gate = as_f64(gate)
        gated = matmul(a, gate, alpha=alpha)
        dz = dy * apply_activation(gated, activation)
        dg = activation_backward(dy * matmul(a, b, alpha=alpha), gated, activation)
        da_gate = dg @ gate.swapaxes(-1, -2)
    elif activation is not None and activation != "none":
        dz = activation_backward(dy, matmul(a, b, bias, alpha=alpha), activation)
    return ProductGrads(
        a=alpha * sum_to(dz @ b.swapaxes(-1, -2) + da_gate, a.shape),
        b=alpha * _weight_grad(a, dz, b.shape),
        bias=None if bias is None else flatten_rows(dz).sum(axis=0),
        residual=None if residual is None else dy,
        gate=None if dg is None else alpha * _weight_grad(a, dg, b.shape),
    )


def _weight_grad(a: Array, dz: Array, shape: tuple[int, ...]) -> Array:
    """a.T @ dz over all rows, or, for a weight with batch dimensions, over those that it was broadcast in."""
    if len(shape) == 2:
        return flatten_rows(a).T @ flatten_rows(dz)
    return sum_to(a.swapaxes(-1, -2) @ dz, shape)


def grouped_matmul(
    a: Array,
    b: Array,
    group_sizes: Sequence[int],
    bias: Array | None = None,
    activation: str | None = None,
    *,
    gate: Array | None = None,
    rounding: str | None = None,
) -> Array:
    """:func:`matmul` of every group of rows: a [rows, K] in groups of group_sizes rows, b [groups, K, N] -> [rows, N].

    bias: [groups, N]. gate: shape of b, no bias.
    """
    xp = get_array_module(a)
    outs = [
        matmul(rows, b[g], _of(bias, g), activation, gate=_of(gate, g), rounding=rounding)
        for g, rows in enumerate(_groups(a, group_sizes))
    ]
    return xp.concatenate([*outs, xp.zeros((0, b.shape[2]))])


def grouped_matmul_backward(
    dy: Array,
    a: Array,
    b: Array,
    group_sizes: Sequence[int],
    bias: Array | None = None,
    activation: str | None = None,
    *,
    gate: Array | None = None,
) -> ProductGrads:
    """Gradients of :func:`grouped_matmul` for dy [rows, N]: zero for the b[g], gate[g] and bias[g] of a group without
    rows."""
    xp = get_array_module(a)
    grads = [
        matmul_backward(dy_g, rows, b[g], _of(bias, g), activation, gate=_of(gate, g))
        for g, (dy_g, rows) in enumerate(zip(_groups(dy, group_sizes), _groups(a, group_sizes), strict=True))
    ]
    return ProductGrads(
        a=xp.concatenate([*(g.a for g in grads), xp.zeros((0, a.shape[1]))]),
        b=xp.stack([g.b for g in grads]) if grads else xp.zeros(b.shape),
        bias=None if bias is None else xp.stack([g.bias for g in grads]) if grads else xp.zeros(bias.shape),
        residual=None,
        gate=None if gate is None else xp.stack([g.gate for g in grads]) if grads else xp.zeros(gate.shape),
    )


def _of(stack: Array | None, g: int) -> Array | None:
    return None if stack is None else stack[g]


def _groups(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive blocks of rows, of these sizes."""
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    if any(size < 0 for size in sizes) or sum(sizes) != x.shape[0]:
        raise ValueError(
            f"group_sizes must not be negative and add up to {x.shape[0]} rows, got {list(sizes)}"
        )
    return [x[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _like(values: list[Any], model: Any) -> Any:
    """``values`` as a list if the rank's weights were a list, else its one entry."""
    return values if isinstance(model, (list, tuple)) else values[0]


def _rank_biases(biases: Sequence[Any] | None, rank: int, count: int) -> list[Array | None]:
    if biases is None or biases[rank] is None:
        return [None] * count
    return _listed(biases[rank])


def matmul_replicated(
    a: Array, bs: Sequence[Any], biases: Sequence[Any] | None = None, activation: str | None = None
) -> list[Any]:
    """Column-parallel product of a replicated a [..., K]: bs[rank] [K, N_rank] or a list -> each rank's [..., N_rank].

    biases[rank] has the form of bs[rank], with [N_rank] entries (or None).
    """
    outs = []
    for rank, entry in enumerate(bs):
        weights = _listed(entry)
        pairs = zip(weights, _rank_biases(biases, rank, len(weights)), strict=True)
        outs.append(_like([matmul(a, b, bias, activation) for b, bias in pairs], entry))
    return outs


def matmul_replicated_backward(
    dys: Sequence[Any],
    a: Array,
    bs: Sequence[Any],
    biases: Sequence[Any] | None = None,
    activation: str | None = None,
) -> ProductGrads:
    """Gradients of :func:`matmul_replicated`: that of a is the sum over all ranks and weights; b and bias by rank."""
    a_terms, b_grads, bias_grads = [], [], []
    for rank, entry in enumerate(bs):
        weights = _listed(entry)
        triples = zip(_listed(dys[rank]), weights, _rank_biases(biases, rank, len(weights)), strict=True)
        grads = [matmul_backward(dy, a, b, bias, activation) for dy, b, bias in triples]
        a_terms += [g.a for g in grads]
        b_grads.append(_like([g.b for g in grads], entry))
        bias_grads.append(_like([g.bias for g in grads], entry))
    return ProductGrads(sum_ranks(a_terms), b_grads, None if biases is None else bias_grads, None)


def all_gather_matmul(
    a_shards: Sequence[Array],
    bs: Sequence[Any],
    *,
    gather_dim: int = 0,
    biases: Sequence[Any] | None = None,
    activation: str | None = None,
) -> list[Any]:
    """Gather a along ``gather_dim`` (not its last dim), then multiply by each rank's weights.

    Args:
        a_shards: one [..., K] per rank; sizes along gather_dim may differ and may be 0.
        bs: bs[rank] is [K, N_rank], or a list of such.
        biases: bs' form with [N_rank] entries (or None).

    Returns:
        For each rank the full [..., N_rank], or the list of them. ``all_gather`` gives the gathered input.
    """
    _check_gather_dim(a_shards, gather_dim)
    return matmul_replicated(all_gather(a_shards, gather_dim), bs, biases, activation)


def all_gather_matmul_backward(
    dys: Sequence[Any],
    a_shards: Sequence[Array],
    bs: Sequence[Any],
    *,
    gather_dim: int = 0,
    biases: Sequence[Any] | None = None,
    activation: str | None = None,
) -> ProductGrads:
    """Gradients of :func:`all_gather_matmul`: a's summed over ranks and cut back into shards; b and bias by rank."""
    _check_gather_dim(a_shards, gather_dim)
    grads = matmul_replicated_backward(dys, all_gather(a_shards, gather_dim), bs, biases, activation)
    return grads._replace(a=split(grads.a, gather_dim, len(a_shards), sizes_along(a_shards, gather_dim)))


def _check_gather_dim(a_shards: Sequence[Array], gather_dim: int) -> None:
    ndim = a_shards[0].ndim
    if gather_dim % ndim == ndim - 1:
        raise ValueError(
            f"gather_dim must not be the last dim, which is summed over; got {gather_dim} of {ndim} dims"
        )


def matmul_all_reduce(
    as_: Sequence[Array],
    bs: Sequence[Array],
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    rounding: str | None = None,
) -> Array:
    """sum over ranks of as_[r] @ bs[r], + bias + residual, each once.

    as_[r] [..., K_r], bs[r] [K_r, N], bias [N] and residual [..., N] replicated -> [..., N], the same on every rank.
    """
    total = sum_ranks([as_f64(a) @ as_f64(b) for a, b in zip(as_, bs, strict=True)], rounding)
    if bias is not None:
        total = total + as_f64(bias)
    if residual is not None:
        total = total + as_f64(residual)
    return round_to(total, rounding)


def matmul_all_reduce_backward(
    dy: Array,
    as_: Sequence[Array],
    bs: Sequence[Array],
    bias: Array | None = None,
    residual: Array | None = None,
) -> ProductGrads:
    """Gradients of :func:`matmul_all_reduce` for the replicated dy [..., N]: a and b by rank, the others complete."""
    grads = [matmul_backward(dy, a, b, bias, None, residual) for a, b in zip(as_, bs, strict=True)]
    return ProductGrads([g.a for g in grads], [g.b for g in grads], grads[0].bias, grads[0].residual)


def matmul_reduce_scatter(
    as_: Sequence[Array],
    bs: Sequence[Array],
    *,
    scatter_dim: int = 0,
    sizes: Sequence[int] | None = None,
    bias: Array | None = None,
    residuals: Sequence[Array] | None = None,
    rounding: str | None = None,
) -> list[Array]:
    """sum over ranks of as_[r] @ bs[r], + bias, cut along ``scatter_dim``, + each rank's residual.

    Args:
        as_, bs: [..., K_r] and [K_r, N] per rank.
        scatter_dim: a dim of the output [..., N].
        sizes: of the shards along it, one per rank; None: ceil split.
        bias: [N], replicated; added once.
        residuals: one per rank, of its shard's shape.

    Returns:
        Each rank's shard.
    """
    total = sum_ranks([as_f64(a) @ as_f64(b) for a, b in zip(as_, bs, strict=True)], rounding)
    if bias is not None:
        total = total + as_f64(bias)
    shards = split(total, scatter_dim, len(as_), sizes)
    if residuals is not None:
        shards = [shard + as_f64(residual) for shard, residual in zip(shards, residuals, strict=True)]
    return [round_to(shard, rounding) for shard in shards]


def matmul_reduce_scatter_backward(
    dys: Sequence[Array],
    as_: Sequence[Array],
    bs: Sequence[Array],
    *,
    scatter_dim: int = 0,
    bias: Array | None = None,
    residuals: Sequence[Array] | None = None,
) -> ProductGrads:
    """Gradients of :func:`matmul_reduce_scatter` for shard gradients dys: a, b, residual by rank; bias complete."""
    grads = matmul_all_reduce_backward(all_gather(dys, scatter_dim), as_, bs, bias)
    return grads._replace(residual=None if residuals is None else [as_f64(dy) for dy in dys])

"""Vocabulary-parallel embedding and cross-entropy, all ranks in one process, float64.

The vocabulary is cut along its dim into one contiguous shard per rank (uneven and empty allowed); one shard gives the
unsharded operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpkernels.reference._array import Array, as_f64, get_array_module
from tpkernels.reference.collectives import all_reduce


def _shards(shards: Sequence[Array], dim: int, ids: Array) -> Iterator[tuple[Array, Array, Array]]:
    """For each rank (shard, own ids' mask, local ids with foreign ones set to 0)."""
    start = 0
    for shard in shards:
        size = shard.shape[dim]
        mine = (ids >= start) & (ids < start + size)
        yield as_f64(shard), mine, (ids - start) * mine
        start += size


def vocab_parallel_embedding(ids: Array, weights: Sequence[Array]) -> Array:
    """Rows of the table: ids [...], weights[r] [V_r, H] -> [..., H] (each rank looks up its own, then all-reduce)."""
    xp = get_array_module(ids, *weights)
    partials = []
    for weight, mine, local in _shards(weights, 0, ids):
        rows = weight[local] if weight.shape[0] else xp.zeros((*ids.shape, weight.shape[1]))
        partials.append(rows * mine[..., None])
    return all_reduce(partials)


def vocab_parallel_embedding_backward(dy: Array, ids: Array, weights: Sequence[Array]) -> list[Array]:
    """Gradient of each table shard [V_r, H] for the replicated dy [..., H]: rows of dy added by id."""
    xp = get_array_module(ids, *weights)
    grads = []
    for weight, mine, local in _shards(weights, 0, ids):
        grad = xp.zeros_like(weight)
        xp.add.at(grad, local[mine], as_f64(dy)[mine])
        grads.append(grad)
    return grads


def _softmax(logits: Sequence[Array]) -> tuple[list[Array], Array, Array]:
    """(probability shards, max [...], log of the sum of exp(logit - max) [...]) over the whole vocabulary."""
    xp = get_array_module(*logits)
    full = [as_f64(x) for x in logits]
    # An empty shard has no maximum (and CuPy's max no initial value).
    tops = [x.max(axis=-1) if x.shape[-1] else xp.full(x.shape[:-1], -xp.inf) for x in full]
    top = all_reduce(tops, "max")
    exps = [xp.exp(x - top[..., None]) for x in full]
    total = all_reduce([e.sum(axis=-1) for e in exps])
    return [e / total[..., None] for e in exps], top, xp.log(total)


def vocab_parallel_cross_entropy(
    logits: Sequence[Array], targets: Array, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Array:
    """Loss of each token: logits[r] [..., V_r], targets [...] global ids -> [...]; 0 where it is ``ignore_index``.

    (1 - s) * (-log p[target]) + s * mean over the WHOLE vocabulary of (-log p), s = label_smoothing.
    """
    xp = get_array_module(*logits)
    _, top, log_total = _softmax(logits)
    picked, sums = [], []
    for x, mine, local in _shards(logits, -1, targets):
        value = (
            xp.take_along_axis(x, local[..., None], axis=-1)[..., 0]
            if x.shape[-1]
            else xp.zeros(targets.shape)
        )
        picked.append(value * mine)
        sums.append(x.sum(axis=-1))
    vocab = sum(x.shape[-1] for x in logits)
    nll = log_total + top - all_reduce(picked)
    uniform = log_total + top - all_reduce(sums) / vocab
    loss = (1.0 - label_smoothing) * nll + label_smoothing * uniform
    return xp.where(targets == ignore_index, 0.0, loss)


def vocab_parallel_cross_entropy_backward(
    dloss: Array,
    logits: Sequence[Array],
    targets: Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> list[Array]:
    """Gradient of each logit shard [..., V_r] for dloss [...]: dloss * (p - (1 - s) onehot - s / V), or 0."""
    xp = get_array_module(*logits)
    vocab = sum(x.shape[-1] for x in logits)
    probabilities, _, _ = _softmax(logits)
    scale = (as_f64(dloss) * (targets != ignore_index))[..., None]
    grads = []
    for p, (_, mine, local) in zip(probabilities, _shards(logits, -1, targets), strict=True):
        onehot = (xp.arange(p.shape[-1]) == local[..., None]) & mine[..., None]
        grads.append(scale * (p - (1.0 - label_smoothing) * onehot - label_smoothing / vocab))
    return grads


def embedding(ids: Array, weight: Array) -> Array:
    """Unsharded lookup: ids [...], weight [V, H] -> [..., H]."""
    return vocab_parallel_embedding(ids, [weight])


def embedding_backward(dy: Array, ids: Array, weight: Array) -> Array:
    """Gradient of the table [V, H]."""
    return vocab_parallel_embedding_backward(dy, ids, [weight])[0]


def cross_entropy(
    logits: Array, targets: Array, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Array:
    """Unsharded loss of each token: logits [..., V], targets [...] -> [...]."""
    return vocab_parallel_cross_entropy(
        [logits], targets, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def cross_entropy_backward(
    dloss: Array, logits: Array, targets: Array, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Array:
    """Gradient of the logits [..., V]."""
    return vocab_parallel_cross_entropy_backward(
        dloss, [logits], targets, ignore_index=ignore_index, label_smoothing=label_smoothing
    )[0]

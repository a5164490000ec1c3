"""Recomputation: the same numbers, and the bytes that a layer keeps for its backward pass beside the formulas of
Korthikanti et al. (arXiv 2205.05198), section 4 and 5, for a bfloat16 GPT block with dropout.

Counted: each storage once that autograd saves, not counting parameters and what is a constant of the call. Sizes
in bytes with sequence s, batch b, hidden h, a heads, t ranks:

    tensor and sequence parallel                s b h / t (34 + 5 a s / h)
    and the attention core recomputed           s b h / t 34
    and the whole block recomputed              s b h / t 2     (without sequence parallelism: s b h 2)
    tensor parallel                             s b h (10 + 24 / t + 5 a s / (h t))

Tolerance: the paper leaves out what a LayerNorm keeps beside its input, mean and deviation of every token (4 numbers
for two norms, of 2 or 4 bytes as the device has them), and under sequence parallelism our norms use a copy of weight
and bias, whose gradients are summed (4 h numbers). Nothing else may be there, and nothing may be missing.

The formulas hold for attention written out, as it is here with dropout: torch's fused attention keeps less, without
any recomputation.
"""

from __future__ import annotations

import pytest
import torch
from nn_dense import VOCAB
from nn_gpt import ParallelGPT

from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

S, B, H, A = 64, 2, 64, 4
MODES = ("none", "selective", "full")


def block_of(
    ctx: RankContext, recompute: str, sequence_parallel: bool, dropout: float
) -> tnn.ParallelTransformerBlock:
    return tnn.ParallelTransformerBlock(
        H,
        4 * H,
        A,
        group=ctx.group_name,
        norm="layer",
        activation="gelu",
        bias=True,
        rotary_base=None,
        dropout=dropout,
        attention_dropout=dropout,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        name="b",
        dtype=torch.bfloat16,
    )


def saved_bytes(block: torch.nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that a forward pass saves, parameters apart; the block's input is among them."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters and storage.nbytes() > 0:
            kept[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x, step=0)  # held, and with it all that was saved: an address is not used twice
        total = sum(storage.nbytes() for storage in kept.values())
    assert y.grad_fn is not None
    return total


def measure(ctx: RankContext) -> dict[str, float]:
    """Bytes in units of s b h, by recomputation and layout."""
    found = {}
    for sp in (True, False):
        x = torch.randn(S // ctx.world if sp else S, B, H, dtype=torch.bfloat16, requires_grad=True)
        for mode in MODES:
            block = block_of(ctx, mode, sp, 0.1)
            found[f"{mode} {'sp' if sp else 'tp'}"] = saved_bytes(block, x) / (S * B * H)
    x = torch.randn(S // ctx.world, B, H, dtype=torch.bfloat16, requires_grad=True)
    found["fused sp"] = saved_bytes(block_of(ctx, "none", True, 0.0), x) / (S * B * H)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_are_those_of_the_paper(ranks: RankPool, world: int) -> None:
    t, core = world, 5 * A * S / H
    formulas = {
        "none sp": (34 + core) / t,
        "selective sp": 34 / t,
        "full sp": 2 / t,
        "none tp": 10 + (24 + core) / t,
        "selective tp": 10 + 24 / t,
        "full tp": 2,
    }
    for found in ranks.run(measure, world=world):
        for case, formula in formulas.items():
            mode, layout = case.split()
            extra, sp = found[case] - formula, layout == "sp"
            norms = 0.0 if mode == "full" else 4 * 4 / H / (t if sp else 1) + 4 * 2 / (S * B) * sp
            assert 0 <= extra <= norms, f"{case} on {t} ranks: {found[case]} s b h against {formula}"
        assert found["fused sp"] < formulas["none sp"] - 0.9 * core / t


def same_numbers(ctx: RankContext, seed: int) -> None:
    results = []
    for sp, p in ((True, 0.2), (False, 0.2), (True, 0.0)):
        for mode in MODES:
            model = ParallelGPT(
                ctx.group_name, kv_heads=1, p=0.2, attention_p=p, sequence_parallel=sp, recompute=mode
            )
            tnn.init_weights_(model, seed=seed)
            ids = torch.arange(2 * 4 * ctx.world).remainder(VOCAB).view(2, -1)
            losses = [
                tnn.vocab_parallel_cross_entropy(model(ids, step=step), ids.t(), ctx.group_name, VOCAB)
                for step in (0, 1)
            ]
            for loss in losses:  # two micro-batches in flight, other random numbers in between
                torch.rand(1 + ctx.rank)
                loss.backward()
            results.append([*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())])
            if mode != "none":
                plain = results[-2 if mode == "selective" else -3]
                assert all(torch.equal(a, b) for a, b in zip(results[-1], plain, strict=True)), (sp, p, mode)
            with torch.no_grad():
                assert not model(ids, step=0).requires_grad


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_numbers_do_not_change(ranks: RankPool, world: int, seed: int) -> None:
    ranks.run(same_numbers, seed, world=world)


def llama_style(ctx: RankContext) -> None:
    """Rotary tables given from outside, uneven parts of the sequence, a residual in the product's epilogue."""
    sizes = [3, 0, 2, 1][: ctx.world]
    rotary = tnn.rotary_tables(sum(sizes), 4)
    draw = torch.Generator().manual_seed(ctx.rank)
    x = torch.randn(sizes[ctx.rank], 2, 48, dtype=torch.float64, generator=draw)
    results = []
    for mode in MODES:
        block = tnn.ParallelTransformerBlock(
            48, 37, 12, group=ctx.group_name, sequence_parallel=True, recompute=mode, dtype=x.dtype
        )
        xi = x.clone().requires_grad_()
        y = block(xi, sizes, rotary)
        y.square().sum().backward()
        results.append([y.detach(), xi.grad, *(p.grad for p in block.parameters())])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True)), mode


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_llama_style_block(ranks: RankPool, world: int) -> None:
    ranks.run(llama_style, world=world)

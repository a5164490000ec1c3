"""The unsharded language model in float32, trained for a few steps: what every variant is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dense import LanguageModel
from .reference import sampled
from .shapes import Size
from .weights import draw_, share

__all__ = ["Batch", "Twin", "batches", "optimizer", "train_twin"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Twin:
    """``losses`` of the steps, float64; first ``gradients``: name -> (rows of this rank's part, values).

    Rows are those of :func:`.reference.sampled`; see :func:`_sample` about embeddings.
    """

    losses: Tensor
    gradients: dict[str, tuple[Tensor, Tensor]]


def batches(size: Size, steps: int, seed: int, device: torch.device) -> list[Batch]:
    """Random tokens and targets [B, S], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.tokens.batch, size.tokens.seq + 1)
    texts = [torch.randint(size.vocab, shape, generator=generator) for _ in range(steps)]
    return [(t[:, :-1].contiguous().to(device), t[:, 1:].contiguous().to(device)) for t in texts]


def optimizer(module: nn.Module, size: Size) -> torch.optim.Optimizer:
    """AdamW, fused; a rate that suits the width and moves the loss within a few steps."""
    return torch.optim.AdamW(module.parameters(), lr=0.02 * size.model.hidden**-0.5, fused=True)


def train_twin(
    size: Size,
    data: Sequence[Batch],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world: int,
) -> Twin:
    """Trains on ``data`` from the weights of ``seed`` in ``dtype``; sequence by sequence, which saves memory.

    Keeps some rows of the first gradients of what rank ``rank`` holds. No communication.
    """
    with torch.device(device):
        model = LanguageModel(size)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(draw_(torch.empty_like(parameter, dtype=dtype), seed, name))
    adamw = optimizer(model, size)
    losses: list[float] = []
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    for tokens, targets in data:
        adamw.zero_grad()
        total = 0.0
        for i in range(len(tokens)):
            logits = model(tokens[i : i + 1])
            loss = F.cross_entropy(logits.flatten(0, 1), targets[i : i + 1].t().flatten(), reduction="sum")
            (loss / targets.numel()).backward()
            total += float(loss.detach())
        losses.append(total / targets.numel())
        if not gradients:
            gradients = {
                name: _sample(name, parameter, rank, world, seed)
                for name, parameter in model.named_parameters()
            }
        adamw.step()
    return Twin(torch.tensor(losses, dtype=torch.float64, device=device), gradients)


def _sample(name: str, parameter: nn.Parameter, rank: int, world: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sampled rows of a gradient; of an embedding also a row of every 64 of which one is in the batch."""
    assert parameter.grad is not None
    part = parameter.grad[share(name, parameter.shape, rank, world)]
    rows = sampled(name, part.shape[0], f"{seed} {rank}", part.device)
    if part.dim() == 2:
        used = part.any(dim=1).nonzero().flatten().cpu()
        if len(used) < part.shape[0]:
            used = used[torch.randperm(len(used), generator=torch.Generator().manual_seed(seed))]
            one_of_64 = {row // 64: row for row in used.tolist()}.values()
            rows = torch.cat(
                (rows, torch.tensor(list(one_of_64), dtype=rows.dtype, device=rows.device))
            ).unique()
    return rows, part[rows].clone()

"""Recomputation of activations (Korthikanti et al., "Reducing activation recomputation in large transformer models",
arXiv 2205.05198).

    "none"       everything that the backward pass needs is kept
    "selective"  the attention core (scores, softmax, their dropout, product with v) is computed again: it holds
                 most of the memory of long sequences, and little of the arithmetic
    "full"       a whole block is computed again, from its input; its collectives too

Bytes that a bfloat16 GPT block with dropout keeps for the backward pass, in units of s b h (sequence, batch, hidden),
with a heads on t ranks. Measured by tests/spawn/test_nn_recompute.py on the CPU, with s = h = 64, b = 2, a = 4, so that
5 a s / h = 20, beside the paper's formula; parameters are not counted. TP: tensor parallel, SP: sequence parallel too.

                    formula                        t = 1            t = 2            t = 4
    TP+SP none      (34 + 5 a s / h) / t           54.19 (54)       27.13 (27)       13.59 (13.5)
          selective 34 / t                         34.19 (34)       17.13 (17)        8.59 (8.5)
          full      2 / t                           2.00 (2)         1.00 (1)         0.50 (0.5)
    TP    none      10 + (24 + 5 a s / h) / t      54.13 (54)       32.13 (32)       21.13 (21)
          selective 10 + 24 / t                    34.13 (34)       22.13 (22)       16.13 (16)
          full      2                               2.00 (2)         2.00 (2)         2.00 (2)

The rest are the statistics of the norms, which the paper leaves out, and under sequence parallelism copies of their
parameters. Without dropout of the probabilities torch's fused attention serves, which keeps less than the formulas even
with "none".

Random masks are those of the first time: they depend on the step and the position alone (``tpkernels.nn.masks``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpkernels.errors import ArgumentError

__all__ = ["MODES", "check_recompute", "recomputed"]

MODES = ("none", "selective", "full")


def check_recompute(mode: str) -> None:
    """ArgumentError for an unknown mode."""
    if mode not in MODES:
        known = ", ".join(repr(m) for m in MODES)
        raise ArgumentError(f"recompute: it must be one of {known}, but it is {mode!r}.")


def recomputed(function: Callable[..., Tensor], *args: Any, keep_random_state: bool = True) -> Tensor:
    """``function(*args)``, of which the backward pass keeps only the tensors in ``args``.

    ``keep_random_state``: torch's generators are set back for the second time; False where nothing draws from them.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keep_random_state)
    return out

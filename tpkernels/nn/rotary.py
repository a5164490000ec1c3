"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864) in the half-split form.

The pair (i, i + head_dim / 2) is turned by position * base^(-2 i / head_dim). Angles are formed in float64,
since float32 positions beyond some ten thousand lose the fast frequencies, and stored in float32; the turn
itself is in float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary", "rotary_tables"]


def rotary_tables(
    length: int, head_dim: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions 0 .. length - 1, each [length, head_dim / 2] in float32."""
    half = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = torch.outer(positions, base ** (-2.0 * half / head_dim))
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., length, head_dim] turned by the tables; the shape and type of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

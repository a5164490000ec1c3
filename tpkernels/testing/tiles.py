"""Comparison by tiles: one wrong tile of a large matrix is lost in its norm, but not in that tile's largest error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

# Unit roundoff: the largest relative error of one rounding to nearest.
UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class _Pair:
    """actual and expected in float64 on actual's device, [M, N] (leading dims folded into M), and their tiling."""

    actual: torch.Tensor
    expected: torch.Tensor
    shape: tuple[int, ...]
    tile: tuple[int, int]

    def tile_max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest of non-negative values [M, N] in each tile: [tiles_m, tiles_n]."""
        (m, n), (tm, tn) = values.shape, self.tile
        padded = torch.nn.functional.pad(values, (0, -n % tn, 0, -m % tm))
        return padded.view(-(-m // tm), tm, -(-n // tn), tn).amax(dim=(1, 3))

    def tile_rms(self, values: torch.Tensor) -> torch.Tensor:
        """Root mean square of values [M, N] in each tile: [tiles_m, tiles_n]."""
        (m, n), (tm, tn) = values.shape, self.tile
        padded = torch.nn.functional.pad(values.square(), (0, -n % tn, 0, -m % tm))
        sums = padded.view(-(-m // tm), tm, -(-n // tn), tn).sum(dim=(1, 3))
        rows = (m - torch.arange(sums.shape[0], device=values.device) * tm).clamp(max=tm)
        cols = (n - torch.arange(sums.shape[1], device=values.device) * tn).clamp(max=tn)
        return (sums / (rows[:, None] * cols[None, :])).sqrt()

    def spread(self, per_tile: torch.Tensor) -> torch.Tensor:
        """A value for each tile, repeated for each element: [M, N]."""
        (m, n), (tm, tn) = self.actual.shape, self.tile
        return per_tile.repeat_interleave(tm, 0)[:m].repeat_interleave(tn, 1)[:, :n]

    def errors(self) -> torch.Tensor:
        """|actual - expected|, with inf wherever actual is NaN or infinite: [M, N]."""
        error = (self.actual - self.expected).abs()
        return torch.where(torch.isfinite(self.actual), error, torch.full_like(error, math.inf))


def _tensor(values: Any) -> torch.Tensor:
    """torch tensors as they are, NumPy and CuPy arrays without a copy where possible."""
    return values.detach() if isinstance(values, torch.Tensor) else torch.as_tensor(values)


def _fold(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def _pair(actual: Any, expected: Any, tile: tuple[int, int]) -> _Pair:
    a, e = _tensor(actual), _tensor(expected)
    if a.shape != e.shape:
        raise AssertionError(f"actual has shape {tuple(a.shape)}, expected has shape {tuple(e.shape)}")
    e = e.to(device=a.device, dtype=torch.float64)
    if e.numel() and not bool(torch.isfinite(e).all()):
        raise ValueError(
            "expected holds NaN or infinite values: the reference is wrong, or the inputs are too large"
        )
    shape = tuple(a.shape)
    if a.numel() == 0:
        return _Pair(a.new_zeros((0, 1), dtype=torch.float64), e.new_zeros((0, 1)), shape, tile)
    return _Pair(_fold(a.to(torch.float64)), _fold(e), shape, tile)


def tile_errors(actual: Any, expected: Any, tile: tuple[int, int] = (128, 128)) -> float:
    """Largest over tiles of (max |actual - expected| in the tile) / (max |expected| in the tile).

    Args:
        actual, expected: torch tensors or arrays of one shape [..., M, N]; computed on actual's device in float64.
        tile: rows and columns of a tile; leading dims are folded into the rows.

    Returns:
        0.0 for empty arrays; inf if actual holds a NaN or an infinity, or differs in a tile where expected is all zero.
    """
    pair = _pair(actual, expected, tile)
    if pair.actual.numel() == 0:
        return 0.0
    error, scale = pair.tile_max(pair.errors()), pair.tile_max(pair.expected.abs())
    return float(torch.where(error > 0, error / scale, torch.zeros_like(error)).max())


def assert_close_tiles(
    actual: Any,
    expected: Any,
    dtype: torch.dtype,
    *,
    k: int = 1,
    world: int = 1,
    magnitude: Any = None,
    roundings: float = 1.0,
    slack: float = 1.0,
    tile: tuple[int, int] = (128, 128),
    name: str = "actual",
) -> None:
    """Fail unless every element is within the rounding error that a sum of ``k`` products can have, and so is the norm.

    The bound of an element is, with u = unit roundoff, ``acc`` = float32 (float64 where dtype is) and y = expected,

        roundings * u(dtype) * |y|  +  4 * sqrt(k) * u(acc) * magnitude  +  8 * u(acc) * (|y| + rms)
        +  (world > 1) 4 * sqrt(world) * u(dtype) * rms             # partials rounded to dtype for the wire

    where rms is that of y in the element's tile (at least 1/20 of the matrix's). The error's norm must be within that
    of the bounds, times 0.75 where there are 1024 elements or more (rounding to nearest gives less than 0.6).

    Args:
        actual: torch tensor or array [..., M, N]. NaN and infinities never pass.
        expected: float64 reference of the same shape, finite. Moved to actual's device.
        dtype: the type to which the result was rounded (not always actual's: use that of the op's output).
        k: number of products summed in one element (K, or K times world where ranks are summed).
        world: number of partial sums that were rounded to ``dtype`` and added.
        magnitude: |a| @ |b| + |bias| ..., of expected's shape; None: sqrt(k) * rms, right for inputs of mean zero. Give
            it when inputs are not centred, when results cancel, or behind an activation that zeroes whole tiles.
        roundings: how many times a result was rounded to ``dtype`` (2: a rounded pre-activation was used again).
        slack: factor on the whole bound.
        tile: rows and columns of the tiles in which errors are reported.
        name: what to call actual in the message.

    Raises:
        AssertionError: says how many tiles are wrong, which are worst, and where in them.
        ValueError: expected is not finite, or dtype is none of float64, float32, float16, bfloat16.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype must be one of {', '.join(map(str, UNIT_ROUNDOFF))}, got {dtype}")
    pair = _pair(actual, expected, tile)
    if pair.actual.numel() == 0:
        return
    unit, unit_acc = (
        UNIT_ROUNDOFF[dtype],
        UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32],
    )
    y = pair.expected.abs()
    rms = pair.tile_rms(pair.expected)
    rms = pair.spread(rms.clamp(min=0.05 * float(pair.expected.square().mean().sqrt())))
    if magnitude is None:
        size = math.sqrt(k) * rms
    else:
        size = _fold(_tensor(magnitude).to(device=y.device, dtype=torch.float64).expand(pair.shape)).abs()
    bound = roundings * unit * y + 4 * math.sqrt(max(k, 1)) * unit_acc * size + 8 * unit_acc * (y + rms)
    if world > 1:
        bound = bound + 4 * math.sqrt(world) * unit * rms
    # Half of the smallest number that dtype can hold: below it even an exact result is lost.
    bound = slack * (bound + torch.finfo(dtype).smallest_normal * unit)
    error = pair.errors()
    ratio = torch.where(error > 0, error / bound, torch.zeros_like(error))
    share = 0.75 if error.numel() >= 1024 else 1.0
    # float() first: an infinite error gives an infinite norm, which must not compare as NaN.
    norm_error, norm_bound = float(error.norm()), share * float(bound.norm())
    if float(ratio.max()) <= 1.0 and norm_error <= norm_bound:
        return
    raise AssertionError(_report(pair, error, bound, ratio, norm_error, norm_bound, dtype, k, name))


def _report(
    pair: _Pair,
    error: torch.Tensor,
    bound: torch.Tensor,
    ratio: torch.Tensor,
    norm_error: float,
    norm_bound: float,
    dtype: torch.dtype,
    k: int,
    name: str,
) -> str:
    tiles = pair.tile_max(ratio)
    wrong = int((tiles > 1).sum())
    norm = float(pair.expected.norm())
    lines = [
        f"{name} of shape {pair.shape} is not close to expected ({dtype}, k={k}): {wrong} of {tiles.numel()} tiles of "
        f"{pair.tile[0]}x{pair.tile[1]} exceed their bound",
        f"  norm of the error {norm_error:.3e}, allowed {norm_bound:.3e}, norm of expected {norm:.3e}",
    ]
    nonfinite = int((~torch.isfinite(pair.actual)).sum())
    if nonfinite:
        lines.append(f"  {nonfinite} of {error.numel()} elements are NaN or infinite")
    (tm, tn), (m, n) = pair.tile, error.shape
    for flat in tiles.flatten().topk(min(max(wrong, 1), 5)).indices.tolist():
        i, j = divmod(flat, tiles.shape[1])
        rows, cols = slice(i * tm, min((i + 1) * tm, m)), slice(j * tn, min((j + 1) * tn, n))
        block = ratio[rows, cols]
        r, c = divmod(int(block.argmax()), block.shape[1])
        r, c = rows.start + r, cols.start + c
        lines.append(
            f"  tile ({i}, {j}), rows {rows.start}:{rows.stop}, cols {cols.start}:{cols.stop}: "
            f"{int((block > 1).sum())} of {block.numel()} elements exceed the bound; worst at ({r}, {c}): "
            f"got {float(pair.actual[r, c])!r}, expected {float(pair.expected[r, c])!r}, "
            f"error {float(error[r, c]):.3e} = {float(ratio[r, c]):.3g} x bound {float(bound[r, c]):.3e}"
        )
    if len(pair.shape) > 2:
        lines.append("  (leading dims are folded into the rows)")
    return "\n".join(lines)

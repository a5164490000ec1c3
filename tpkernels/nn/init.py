"""Parameter values that depend on the seed, the name and the global element index, and on nothing else.

Contract: ``normal_`` and ``uniform_`` fill a shard of a global tensor with bit for bit the values that the
dense tensor has there. The tensor-parallel size, uneven shards, the chunk size and the device change nothing,
so a model starts from the same weights on 1, 3 or 8 ranks, and a plain PyTorch model that calls the same
functions starts from them too.

Design
    Integer part: element i of the stream is the i-th output of SplitMix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), which allows random access: ``mix(key + (i + 1) * gamma)``.
    The key is a BLAKE2b hash of the seed and the name. int64 arithmetic wraps as uint64 does, and a logical
    right shift is an arithmetic one and a mask.

    Floating part: float64, and only +, -, *, / and moves of bits, one torch operation each, which IEEE 754
    rounds alike everywhere. Box-Muller needs log, sqrt and cos. They are short series and Heron's iteration
    here, because the library ones may differ by an ulp between CPU and GPU and even between the vector body
    and the scalar tail of one loop, which would make a value depend on where its shard begins. The result is
    rounded to float32, then to the parameter's type (float64 takes it as it is).

Tried and rejected
    - torch.sqrt: on the CPU, in float64, its last bit differs from NumPy's in one value of a hundred.
    - Philox4x32-10: some 100 torch operations an element against 10; weights do not need its 128 bits.
    - torch.Generator with an offset: its order of draws differs between CPU and CUDA.
    - The dense tensor on every rank, sliced: needs the memory that tensor parallelism saves.

Memory: a few chunks (32 Ki elements on the CPU, 4 Mi on an accelerator) in float64 and int64, whatever the
tensor's size. Speed: 20 million normal numbers a second on one CPU core. Limits: |value| <= 6.77 standard
deviations (32 bits feed the radius); 2**63 elements a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError

__all__ = ["normal_", "random_bits", "standard_normal", "standard_uniform", "stream_key", "uniform_"]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as ``value`` modulo 2**64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_LOW_32 = 0xFFFFFFFF
# Temporaries stay in a core's cache, and torch starts no threads for so few: on busy cores, 100 times faster.
_CHUNK_CPU = 1 << 15
_CHUNK_DEVICE = 1 << 22  # some 80 launches a chunk have to be worth while

# 1 / (2n + 1): atanh(f) = f (1 + f^2/3 + f^4/5 + ...), here |f| <= 0.1716, so the 12th term is below 2^-57.
_ATANH = tuple(1.0 / (2 * n + 1) for n in range(12))
# (-1)^n / (2n + 1)!: sin(w) = w (1 - w^2/6 + ...), here |w| <= pi/2, so the 13th term is below 2^-63.
_SIN = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(12))


def stream_key(seed: int, name: str) -> int:
    """The 64-bit key of parameter ``name`` under ``seed``; equal on every machine and in every process."""
    digest = hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 seen as uint64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_bits(index: Tensor, key: int) -> Tensor:
    """Outputs number ``index`` (int64, from 0) of SplitMix64 started at ``key``: the uint64 bits as int64."""
    z = index.mul(_GAMMA).add_(_signed(key + _GAMMA))
    z ^= _shift_right(z, 30)
    z *= _MIX_1
    z ^= _shift_right(z, 27)
    z *= _MIX_2
    z ^= _shift_right(z, 31)
    return z


def standard_uniform(bits: Tensor) -> Tensor:
    """float64 in [0, 1) from 64 random bits, a multiple of 2**-53."""
    return _shift_right(bits, 11).to(torch.float64).mul_(2.0**-53)


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result.mul_(x).add_(c)
    return result


def _sqrt(x: Tensor) -> Tensor:
    """Square root of positive float64, to about an ulp, the same bits on every device."""
    y = ((x.view(torch.int64) >> 1) + (1023 << 51)).view(torch.float64)  # halves the exponent: within 6.1 %
    for _ in range(4):  # Heron: 6e-2, 2e-3, 2e-6, 2e-12, 2e-24
        y = (x / y).add_(y).mul_(0.5)
    return y


def standard_normal(bits: Tensor) -> Tensor:
    """Standard normal float64 from 64 random bits: Box-Muller, radius from the upper 32, angle from the lower."""
    u = _shift_right(bits, 32).to(torch.float64).add_(0.5).mul_(2.0**-32)  # exact, in (0, 1)
    mantissa, exponent = torch.frexp(u)
    low = mantissa < math.sqrt(0.5)  # centre the mantissa on 1
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    e = exponent.to(torch.float64).sub_(low.to(torch.float64))
    f = (mantissa - 1.0).div_(mantissa + 1.0)
    log_u = _horner(f * f, _ATANH).mul_(f).mul_(2.0).add_(e.mul_(math.log(2.0)))
    # cos(2 pi t), t in [-1/2, 1/2), is sin(2 pi (1/4 - |t|)); the reduction is exact, for t is an integer times 2^-32.
    t = (bits & _LOW_32).sub_(1 << 31).abs_().to(torch.float64).mul_(-(2.0**-32)).add_(0.25)
    w = t.mul_(2.0 * math.pi)
    cosine = _horner(w * w, _SIN).mul_(w)
    return _sqrt(log_u.mul_(-2.0)).mul_(cosine)


def _pieces(rows: int, columns: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles (row, rows, column, columns) of at most ``chunk`` elements that cover the matrix."""
    wide = min(columns, chunk)
    high = max(1, chunk // max(1, wide))
    for r in range(0, rows, high):
        for c in range(0, columns, wide):
            yield r, min(high, rows - r), c, min(wide, columns - c)


def _global_index(
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
    piece: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:
    """Global linear index of every element of a piece of the [all other dims, last dim] matrix, int64."""
    r, high, c, wide = piece
    rows = torch.arange(r, r + high, dtype=torch.int64, device=device)
    base = torch.zeros_like(rows)
    stride = global_shape[-1]
    for size, total, start in zip(
        reversed(shape[:-1]), reversed(global_shape[:-1]), reversed(offset[:-1]), strict=True
    ):
        base += (rows % size + start) * stride
        rows = torch.div(rows, size, rounding_mode="floor")
        stride *= total
    first = c + offset[-1]
    columns = torch.arange(first, first + wide, dtype=torch.int64, device=device)
    return base[:, None] + columns[None, :]


def _check(
    tensor: Tensor, global_shape: Sequence[int] | None, offset: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    if not tensor.dtype.is_floating_point:
        raise DTypeError(f"tensor: it must have a floating-point type, but it has {tensor.dtype}.")
    shape = list(tensor.shape)
    whole = shape if global_shape is None else [int(n) for n in global_shape]
    start = [0] * len(shape) if offset is None else [int(n) for n in offset]
    if len(whole) != len(shape) or len(start) != len(shape):
        raise ArgumentError(
            f"global_shape, offset: they must have one entry for each of the {len(shape)} dimensions of tensor, "
            f"but they are {whole} and {start}."
        )
    for dim, (n, total, o) in enumerate(zip(shape, whole, start, strict=True)):
        if o < 0 or o + n > total:
            raise ArgumentError(
                f"offset: the shard must lie inside global_shape {whole}, but in dimension {dim} it covers "
                f"{o} to {o + n} of {total}."
            )
    return whole, start


@torch.no_grad()
def _fill(
    tensor: Tensor,
    draw: Callable[[Tensor], Tensor],
    seed: int,
    name: str,
    global_shape: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> Tensor:
    whole, start = _check(tensor, global_shape, offset)
    if tensor.is_meta or tensor.numel() == 0:
        return tensor
    if tensor.dim() == 0:
        _fill(tensor.view(1), draw, seed, name, None, None)
        return tensor
    target = (
        tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )
    matrix = target.view(-1, tensor.shape[-1])
    key = stream_key(seed, name)
    chunk = _CHUNK_CPU if tensor.device.type == "cpu" else _CHUNK_DEVICE
    for piece in _pieces(matrix.shape[0], matrix.shape[1], chunk):
        index = _global_index(tensor.shape, whole, start, piece, tensor.device)
        values = draw(random_bits(index, key))
        if tensor.dtype != torch.float64:
            values = values.to(
                torch.float32
            )  # explicitly: every device then rounds to bfloat16 by way of float32
        r, high, c, wide = piece
        matrix[r : r + high, c : c + wide].copy_(values)
    if target is not tensor:
        tensor.copy_(target)
    return tensor


def normal_(
    tensor: Tensor,
    *,
    seed: int,
    name: str,
    mean: float = 0.0,
    std: float = 1.0,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """Fills ``tensor`` with the shard at ``offset`` of the normal tensor that (seed, name) stand for; returns it.

    Args:
        tensor: floating point, any device and strides. A tensor on the meta device is left alone.
        seed: any integer.
        name: what this parameter is called in the whole model, e.g. ``"layers.0.mlp.up_proj.weight"``. Two
            parameters of one name and shape get the same values.
        mean, std: of the distribution. Derive a standard deviation from the global fan, never from the
            shard's.
        global_shape: shape of the dense tensor; None: ``tensor`` is the whole of it.
        offset: index of ``tensor``'s first element in the dense tensor; None: zeros.

    Raises:
        DTypeError: not floating point. ArgumentError: the shard does not lie inside ``global_shape``.
    """
    return _fill(
        tensor, lambda bits: standard_normal(bits).mul_(std).add_(mean), seed, name, global_shape, offset
    )


def uniform_(
    tensor: Tensor,
    *,
    seed: int,
    name: str,
    low: float = 0.0,
    high: float = 1.0,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """As ``normal_``, uniform on [low, high); the rounding to the type of ``tensor`` may give ``high`` itself."""
    return _fill(
        tensor,
        lambda bits: standard_uniform(bits).mul_(high - low).add_(low),
        seed,
        name,
        global_shape,
        offset,
    )

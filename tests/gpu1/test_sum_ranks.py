"""The kernel that sums what ranks sent: the bits of torch's formula, for any size, alignment and number of ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from collective_checks import bits, rank_ordered_sum
from gemm_checks import randn

from tpkernels import _extensions
from tpkernels.ops import _collectives
from tpkernels.testing import Canary, canary_view

Tensor = torch.Tensor
pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not _extensions.is_loaded("_C_sm80"), reason="_C_sm80 was not built or not loaded"),
]

OPS: Any = torch.ops.tpkernels
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16, F32, F64]


def embedded(shape: list[int], dtype: torch.dtype, offset: int, generator: torch.Generator | None) -> Canary:
    """A contiguous view that begins `offset` elements behind a multiple of 16 bytes, NaN without a generator."""
    canary = canary_view(shape, dtype, "cuda", pad=0, offset=offset)
    if generator is not None:
        canary.tensor.copy_(randn(*shape, dtype=dtype, generator=generator))
    return canary


def check(
    world: int,
    shape: list[int],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    with_residual: bool,
    offsets: tuple[int, int, int, int],
    first_column: int,
    own_rank: int | None,
    generator: torch.Generator,
) -> None:
    """shape: [rows, N], of which all but first_column elements at the beginning are one piece."""
    rows, n = shape
    count = rows * n - first_column
    pieces = embedded([world, count], dtype, offsets[0], generator).tensor
    bias = None if bias_dtype is None else embedded([n], bias_dtype, offsets[1], generator).tensor
    residual = embedded([count], dtype, offsets[2], generator).tensor if with_residual else None
    out = embedded([count], dtype, offsets[3], None)
    own = None
    if own_rank is not None:
        own = embedded([count], dtype, offsets[3], generator).tensor
        pieces[own_rank] = torch.nan
    OPS.sum_ranks(pieces, own, own_rank or 0, bias, residual, out.tensor, first_column)
    torch.cuda.synchronize()
    if own_rank is not None:
        pieces[own_rank] = own
    along = None if bias is None else bias.repeat(rows)[first_column:]
    wanted = rank_ordered_sum(list(pieces), [along, residual], dtype)
    assert torch.equal(bits(out.tensor), bits(wanted)), (out.tensor - wanted).abs().max()
    out.check("out")
    # Beside float64, so that the formula is not wrong in the same way.
    terms = [x.double() for x in (*pieces, along, residual) if x is not None]
    unit = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24, F64: 2.0**-53}[dtype]
    error = (out.tensor.double() - sum(terms)).abs()
    sums = len(terms) * (2.0**-53 if dtype == F64 else 2.0**-24) * sum(x.abs() for x in terms)
    # The result's rounding, that of the sums, and of what is too small for fp16 to be precise.
    assert bool((error <= unit * wanted.double().abs() + sums + 2.0**-24).all())


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_formula(dtype: torch.dtype, world: int, seed: int, generator: torch.Generator) -> None:
    draw = random.Random(seed)
    narrow = [BF16, F16, F32, None]
    for turn in range(24):
        n = draw.choice([1, 2, 3, 7, 8, 24, 64, 333, 1000, 4096])
        shape = [draw.choice([1, 2, 5, 31, 128]), n]
        bias_dtype = draw.choice([*narrow, F64] if dtype == F64 else narrow)
        offset = draw.choice([0, 0, 0, 1, 3, 8])
        offsets = [offset if draw.random() < 0.5 else 0 for _ in range(4)]
        first = draw.choice([0, draw.randrange(n), draw.randrange(n) // 8 * 8]) if bias_dtype else 0
        own = draw.choice([None, draw.randrange(world)])
        case = (world, shape, dtype, bias_dtype, draw.random() < 0.5, tuple(offsets), first, own)
        try:
            check(*case, generator)  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"turn {turn}: {case}: {error}") from error


@pytest.mark.parametrize("bias_dtype", [None, BF16, F32])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_more_than_the_grid(world: int, bias_dtype: torch.dtype | None, generator: torch.Generator) -> None:
    """Threads go on where the grid ends; rows of 5,000 and of 5,003 columns."""
    for n in (5000, 5003):
        check(world, [4096, n], BF16, bias_dtype, True, (0, 0, 0, 0), 0, world - 1, generator)


def test_signed_zeros_and_what_is_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([-0.0, -0.0, 0.0, inf, inf, nan, 1e38, 1e-40], device="cuda")
    second = torch.tensor([-0.0, 0.0, -0.0, inf, -inf, 1.0, 3e38, 1e-40], device="cuda")
    for dtype in DTYPES:
        pieces = torch.stack([first, second]).to(dtype)
        for some in (pieces, pieces[:1].contiguous()):
            out = torch.empty(8, dtype=dtype, device="cuda")
            OPS.sum_ranks(some, None, 0, None, None, out)
            wanted = rank_ordered_sum(list(some), [], dtype)
            finite = ~wanted.isnan()
            assert torch.equal(out.isnan(), ~finite), dtype
            assert torch.equal(bits(out)[finite], bits(wanted)[finite]), dtype


def test_nothing_to_sum() -> None:
    empty = torch.empty(3, 0, 8, dtype=BF16, device="cuda")
    OPS.sum_ranks(empty, None, 0, None, None, empty[0])
    OPS.sum_ranks(empty, empty[2], 2, torch.ones(8, device="cuda"), empty[0], empty[1])
    torch.cuda.synchronize()


def test_more_than_two_to_the_31_elements(generator: torch.Generator) -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    rows, n = 1 << 19, 4104
    pieces = torch.empty(2, rows, n, dtype=BF16, device="cuda")
    row = randn(2, n, dtype=BF16, generator=generator)
    pieces.copy_(row.unsqueeze(1))
    out = torch.empty(rows, n, dtype=BF16, device="cuda")
    bias = randn(n, dtype=BF16, generator=generator)
    OPS.sum_ranks(pieces, None, 0, bias, None, out)
    wanted = rank_ordered_sum([row[0], row[1]], [bias], BF16)
    assert all(bool((part == wanted).all()) for part in out.split(1 << 16))


def test_captured_and_on_a_side_stream(generator: torch.Generator) -> None:
    pieces, out = (
        randn(4, 64, 512, dtype=BF16, generator=generator),
        torch.empty(64, 512, dtype=BF16, device="cuda"),
    )
    bias, graph = randn(512, dtype=BF16, generator=generator), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS.sum_ranks(pieces, None, 0, bias, None, out)
    for _ in range(5):
        pieces.copy_(randn(*pieces.shape, dtype=BF16, generator=generator))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, rank_ordered_sum(list(pieces), [bias], BF16))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = pieces * 2
        OPS.sum_ranks(late, None, 0, None, None, out)
    side.synchronize()
    assert torch.equal(out, rank_ordered_sum(list(late), [], BF16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_take_it(
    dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as where the extension is missing, whole rows and parts of flattened ones."""
    pieces = randn(3, 6, 40, dtype=dtype, generator=generator)
    flat = pieces.view(3, -1)[:, 8:199].contiguous()
    bias, residual = (
        randn(40, dtype=F32, generator=generator),
        randn(40, 6, dtype=dtype, generator=generator).t(),
    )
    left_out, piece = pieces.clone(), pieces[1].clone()
    left_out[1] = torch.nan
    calls: list[tuple[Any, ...]] = [
        (_collectives._Pieces(pieces), bias, residual),
        (_collectives._Pieces(left_out, piece, 1), None, None),
        (_collectives._Pieces(flat), bias, None, 8 + 400),
    ]
    outs = [_collectives._sum_pieces(*call) for call in calls]
    monkeypatch.setattr(_collectives, "_finish", None)  # the kernel alone
    again = [_collectives._sum_pieces(*call) for call in calls]
    monkeypatch.undo()
    monkeypatch.setattr(_extensions, "is_loaded", lambda name: False)
    for call, out, other in zip(calls, outs, again, strict=True):
        wanted = _collectives._sum_pieces(*call)
        assert wanted.shape == out.shape and torch.equal(bits(out), bits(wanted))
        assert torch.equal(bits(other), bits(wanted))


def test_bad_calls_are_refused() -> None:
    x, out = torch.ones(2, 4, 8, dtype=BF16, device="cuda"), torch.ones(4, 8, dtype=BF16, device="cuda")
    bias = torch.ones(8, device="cuda")

    def call(
        pieces: Tensor = x,
        own: Tensor | None = None,
        rank: int = 0,
        bias: Tensor | None = bias,
        residual: Tensor | None = None,
        out: Tensor = out,
        first_column: int = 0,
    ) -> None:
        OPS.sum_ranks(pieces, own, rank, bias, residual, out, first_column)

    for options, said in [
        ({"pieces": x[:0]}, r"pieces must be a CUDA tensor \[ranks, ...\] of 1 rank or more"),
        ({"pieces": x.transpose(1, 2)}, "pieces must be contiguous"),
        ({"pieces": x.int(), "out": out.int()}, "pieces must be bfloat16, float16, float32 or float64"),
        ({"out": out.float()}, "out must have pieces' dtype, BFloat16, but it is Float"),
        ({"out": out[:3]}, r"out must have as many elements as a piece, 32, but it has shape \[3, 8\]"),
        ({"out": out.t()}, "out must be contiguous"),
        ({"out": x[0]}, "pieces must not share memory with out"),
        ({"own": out.float()}, "own must have pieces' dtype"),
        ({"own": out}, "own must not share memory with out"),
        ({"own": x[0], "rank": 2}, r"rank must lie in \[0, 2\), but it is 2"),
        ({"residual": out[:, :4]}, "residual must be contiguous"),
        ({"residual": out.cpu()}, "residual must be on the device of pieces"),
        ({"residual": out.half()}, "residual must have pieces' dtype"),
        ({"residual": out}, "residual must not share memory with out"),
        ({"bias": bias.double()}, "bias must be bfloat16, float16 or float32 where pieces are not float64"),
        ({"bias": out}, r"bias must have shape \[N\], but it has shape \[4, 8\]"),
        ({"first_column": 8}, "first_column must be one of the columns of bias, which has 8, but it is 8"),
        ({"first_column": -1}, "but it is -1"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            call(**options)  # type: ignore[arg-type]
    call()
    assert torch.equal(out, torch.full_like(out, 3.0))

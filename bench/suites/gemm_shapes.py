"""Shapes of the gemm suite: out [M, N] = a [M, K] @ b [K, N]. Pure; neither torch nor a GPU is needed.

Layouts say how the operands lie in memory; in brackets the name that BLAS has for it, in which matrices are stored by
columns and T is a transposed one:

``forward`` (TN)
    ``x @ w.t()``: K is contiguous in both.
``dgrad`` (TT)
    ``dy @ w``: K is contiguous in a, N in b.
``wgrad`` (NT)
    ``dy.t() @ x``: M is contiguous in a, N in b.
``columns`` (NN)
    both are stored by columns: M is contiguous in a, K in b.
``padded``
    as forward, but rows are K + 1 elements apart, so that most are not aligned.

The sets of :data:`BAR_SETS` are those that ``bench/bars.py`` sets bars for: they stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import BenchError, check_known
from ..models import MODELS

__all__ = [
    "BAR_SETS",
    "BLAS_LAYOUTS",
    "DEFAULT_SETS",
    "EPILOGUES",
    "LAYOUTS",
    "OPS",
    "SETS",
    "WAVE",
    "Shape",
    "select",
    "sweep",
]

# What a case computes. "layouts": one product whose operands lie in memory in four ways, one variant each, so that they
# are timed in turn; N of "swiglu", also in groups, is that of the output, the weight has 2 N columns.
LAYOUTS = "layouts"
EPILOGUES = ("bias_gelu", "bias_silu", "swiglu", "accumulate", "residual")
OPS = ("matmul", LAYOUTS, *EPILOGUES, "batched", "grouped", "grouped_swiglu")
BLAS_LAYOUTS = {"TN": "forward", "NN": "columns", "NT": "wgrad", "TT": "dgrad"}

WORLD = 8  # ranks that share a weight in the sets tp and decode
# Outputs of one wave in the set of that name: 132 multiprocessors (H100 SXM, H200), whatever card runs it, of 128 x 256
# outputs each. That is one 128 x 256 tile a multiprocessor, or two resident 128 x 128 tiles.
WAVE_TILE = (128, 256)
WAVE_MULTIPROCESSORS = 132
WAVE = WAVE_MULTIPROCESSORS * WAVE_TILE[0] * WAVE_TILE[1]
SWEEP_LOW, SWEEP_HIGH, SWEEP_STEP = 128, 8192, 8
_SMALL_MOST = 5  # shapes of a set when small: one of every operation of the epilogues


@dataclass(frozen=True)
class Shape:
    """One product, ``batch`` of them, or one whose M rows are in ``groups`` (see :func:`group_sizes`).

    ``waves``: its size in waves of :data:`WAVE` outputs, for the set of that name.
    """

    shape_set: str
    label: str
    m: int
    n: int
    k: int
    layout: str = "forward"
    waves: float | None = None
    op: str = "matmul"
    batch: int = 1
    groups: int = 0

    @property
    def name(self) -> str:
        """Unique within a selection, the same in every run."""
        size = f"{self.m}x{self.n}x{self.k}"
        return " ".join(part for part in (self.shape_set, self.label, size) if part)


@dataclass(frozen=True)
class Wanted:
    """Models and rows asked for; empty for the defaults of a set."""

    models: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()


def square(_: Wanted) -> list[Shape]:
    """M = N = K."""
    return [Shape("square", "", s, s, s) for s in (512, 1024, 2048, 4096, 8192, 16384)]


# Per-rank products of fused operations in a world of 8 and others of a published comparison, without its squares.
_PER_RANK = (
    (8192, 6144, 12288),
    (2048, 6144, 12288),
    (1024, 6144, 12288),
    (8192, 3584, 8192),
    (2048, 3584, 8192),
    (8192, 1792, 4096),
    (8192, 1280, 8192),
    (8192, 12288, 6144),
    (8192, 8192, 3584),
    (2048, 8192, 3584),
    (8192, 4096, 1792),
    (8192, 8192, 1280),
    (128, 7168, 2048),
    (256, 4096, 16384),
    (3000, 1536, 9000),
    (1024, 1024, 65536),
)


# All of the last table of shared/notes/measured.md: per-rank products, squares, and few tiles with long K.
_MEASURED = (
    *_PER_RANK[:12],
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    *_PER_RANK[12:],
)


def tensor_parallel(wanted: Wanted) -> list[Shape]:
    """What one of 8 ranks multiplies: the projections of models at M 4096, and fixed shapes unless models are named."""
    fixed = [] if wanted.models or wanted.rows else [Shape("tp", "", m, n, k) for m, n, k in _PER_RANK]
    models = wanted.models or ("llama8b", "llama70b", "llama405b")
    return fixed + [
        Shape("tp", f"{model} {projection}", m, n, k)
        for model in models
        for m in wanted.rows or (4096,)
        for projection, n, k in projections(model)
    ]


def projections(model: str) -> list[tuple[str, int, int]]:
    """(name, N, K) of the weights of one of 8 ranks: columns of qkv and up are split, rows of out and down."""
    sizes = MODELS[model]
    return [
        ("qkv", sizes.qkv // WORLD, sizes.hidden),
        ("out", sizes.hidden, sizes.heads * sizes.head_dim // WORLD),
        ("up", sizes.up // WORLD, sizes.hidden),
        ("down", sizes.hidden, sizes.ffn // WORLD),
    ]


# Tiles of 128 x 256 along M and N. Just past a full wave a data-parallel schedule leaves most multiprocessors idle.
_WAVE_GRIDS = (
    (3, 11),  # 0.25
    (6, 11),  # 0.5
    (7, 19),  # 1.01
    (5, 29),  # 1.1
    (11, 15),  # 1.25
    (11, 18),  # 1.5
    (11, 21),  # 1.75
    (14, 18),  # 1.91
    (12, 22),  # 2: full waves, nothing to gain
    (23, 23),  # 4.01
    (20, 27),  # 4.09
    (22, 27),  # 4.5
    (23, 46),  # 8.02
    (33, 34),  # 8.5
)


def wave_grid(_: Wanted) -> list[Shape]:
    """Few and many waves, the last one full to different degrees, K 4096."""
    return _by_waves(
        "wave-grid", [(rows * WAVE_TILE[0], columns * WAVE_TILE[1], 4096) for rows, columns in _WAVE_GRIDS]
    )


def waves(_: Wanted) -> list[Shape]:
    """Wave quantisation: Llama-3 qkv and down, DeepSeek-V3 kv and others, and per-rank products of 2048 rows."""
    sizes = [
        (2048, 5120, 8192),
        (4096, 2112, 7168),
        (3072, 3072, 8192),
        (4096, 4608, 4096),
        (512, 4096, 14336),
        *((m, n, k) for m, n, k in _MEASURED if m == 2048),
        (2048, 12288, 6144),
    ]
    return _by_waves("waves", sizes)


def _by_waves(shape_set: str, sizes: Sequence[tuple[int, int, int]]) -> list[Shape]:
    shapes = []
    for m, n, k in sizes:
        count = -(-m // WAVE_TILE[0]) * -(-n // WAVE_TILE[1]) / WAVE_MULTIPROCESSORS
        shapes.append(Shape(shape_set, f"{count:.2f}", m, n, k, waves=count))
    return shapes


def large(_: Wanted) -> list[Shape]:
    """Where cuBLAS is at its best: large squares, and per-rank products of 8192 rows."""
    sizes = [(8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 8192)]
    sizes += [(m, n, k) for m, n, k in _MEASURED if m == 8192 and (m, n, k) not in sizes]
    return [Shape("large", "", m, n, k) for m, n, k in sizes]


def measured(_: Wanted) -> list[Shape]:
    """The products that cuBLAS, CUTLASS, DeepGEMM and QuACK were compared with on our cards."""
    return [Shape("measured", "", m, n, k) for m, n, k in _MEASURED]


def transposes(_: Wanted) -> list[Shape]:
    """The same product in the four layouts of BLAS."""
    sizes = [(4096, 4096, 4096), (8192, 3584, 8192), (2048, 5120, 8192), (3072, 3072, 8192)]
    return [Shape("transposes", "", m, n, k, op=LAYOUTS) for m, n, k in sizes]


def epilogues(_: Wanted) -> list[Shape]:
    """What is done to a product before it is stored. The MLPs of Llama-3 on a rank (gate and up), and a square."""
    sizes = [(4096, 4096, 4096), (8192, 3584, 8192), (8192, 1792, 4096), (2048, 3584, 8192)]
    return [Shape("epilogues", op, m, n, k, op=op) for op in EPILOGUES for m, n, k in sizes]


def long_k(_: Wanted) -> list[Shape]:
    """Few tiles, long K: only cutting K fills the chip."""
    sizes = [
        (1024, 1024, 65536),
        (256, 4096, 16384),
        (3000, 1536, 9000),
        (128, 7168, 16384),
        (512, 512, 32768),
    ]
    return [Shape("long-k", "", m, n, k) for m, n, k in sizes]


def tall_skinny(_: Wanted) -> list[Shape]:
    """One dimension far from the others: few columns, few rows, long K, short K."""
    sizes = [
        (65536, 64, 1024),
        (65536, 128, 4096),
        (32768, 256, 512),
        (64, 65536, 1024),
        (128, 7168, 16384),
        (256, 16384, 4096),
        (256, 256, 16384),
        (128, 128, 65536),
        (1024, 1024, 65536),
        (8192, 8192, 128),
        (16384, 4096, 64),
    ]
    return [Shape("tall-skinny", "", m, n, k) for m, n, k in sizes]


def decode(wanted: Wanted) -> list[Shape]:
    """A few tokens by the weights of one of 8 ranks (Llama-3 70B by default): reading weights is what takes time."""
    return [
        Shape("decode", f"{model} {projection}", m, n, k)
        for model in wanted.models or ("llama70b",)
        for m in wanted.rows or (1, 8, 16, 32, 64, 128)
        for projection, n, k in projections(model)
    ]


def layouts(_: Wanted) -> list[Shape]:
    """Strides of forward, dgrad and wgrad, aligned and not."""
    rows = [
        ("square 1k", 1024, 1024, 1024, "forward"),
        ("square 2k", 2048, 2048, 2048, "forward"),
        ("square 4k", 4096, 4096, 4096, "forward"),
        ("square 8k", 8192, 8192, 8192, "forward"),
        ("llama qkv", 2048, 5120, 8192, "forward"),
        ("llama down", 4096, 4096, 14336, "forward"),
        ("dgrad", 4096, 4096, 4608, "dgrad"),
        ("wgrad", 4096, 4096, 8192, "wgrad"),
        ("few rows", 128, 7168, 16384, "forward"),
        ("long K", 256, 256, 16384, "forward"),
        ("ragged", 3000, 3000, 3000, "forward"),
        ("odd K", 2048, 2048, 2047, "forward"),
        ("odd rows apart", 2048, 2048, 2048, "padded"),
        ("dgrad odd N", 2048, 2047, 2048, "dgrad"),
        ("wgrad odd M", 2047, 2048, 2048, "wgrad"),
    ]
    return [Shape("layouts", label, m, n, k, layout) for label, m, n, k, layout in rows]


def batched(_: Wanted) -> list[Shape]:
    """Products of attention (64 heads of 128, 2048 and 8192 tokens), adapters, and many small ones."""
    sizes = [
        ("scores", 64, 2048, 2048, 128),
        ("values", 64, 2048, 128, 2048),
        ("scores", 8, 8192, 8192, 128),
        ("values", 8, 8192, 128, 8192),
        ("experts", 8, 1024, 4096, 4096),
        ("adapters", 16, 2048, 64, 4096),
        ("small", 64, 512, 512, 512),
        ("small", 256, 256, 256, 256),
        ("small", 1024, 128, 128, 128),
        ("small", 2048, 64, 64, 64),
    ]
    return [
        Shape("batched", f"{label} {batch} of", m, n, k, op="batched", batch=batch)
        for label, batch, m, n, k in sizes
    ]


def grouped(_: Wanted) -> list[Shape]:
    """Experts of a rank and the tokens they get: Mixtral 8x7B's 8, 16 and 64 of DeepSeek-V3's."""
    sizes = [
        ("mixtral up", 8, 1024, 14336, 4096),
        ("mixtral up", 8, 4096, 14336, 4096),
        ("mixtral up", 8, 16384, 14336, 4096),
        ("mixtral down", 8, 4096, 4096, 14336),
        ("deepseek up", 16, 4096, 4096, 7168),
        ("deepseek down", 16, 4096, 7168, 2048),
        ("deepseek up", 64, 1024, 4096, 7168),
        ("deepseek up", 64, 8192, 4096, 7168),
        ("deepseek down", 64, 8192, 7168, 2048),
        ("deepseek down", 64, 32768, 7168, 2048),
    ]
    return [
        Shape("grouped", f"{label} {groups} groups", m, n, k, op="grouped", groups=groups)
        for label, groups, m, n, k in sizes
    ]


def grouped_swiglu(_: Wanted) -> list[Shape]:
    """The first product of the same experts: gate and up in one."""
    sizes = [
        ("mixtral", 8, 1024, 14336, 4096),
        ("mixtral", 8, 4096, 14336, 4096),
        ("mixtral", 8, 16384, 14336, 4096),
        ("deepseek", 16, 4096, 2048, 7168),
        ("deepseek", 64, 1024, 2048, 7168),
        ("deepseek", 64, 8192, 2048, 7168),
    ]
    return [
        Shape("grouped-swiglu", f"{label} {groups} groups", m, n, k, op="grouped_swiglu", groups=groups)
        for label, groups, m, n, k in sizes
    ]


def group_sizes(groups: int, rows: int) -> list[int]:
    """Uneven, the same in every run: each row goes to a group with odds drawn from an exponential distribution."""
    rng = random.Random(f"{groups} groups of {rows} rows")
    odds = [rng.expovariate(1.0) for _ in range(groups)]
    picked = rng.choices(range(groups), odds, k=rows)
    return [picked.count(g) for g in range(groups)]


def sweep(count: int, seed: int, low: int = SWEEP_LOW, high: int = SWEEP_HIGH) -> list[Shape]:
    """``count`` shapes with log M, log N and log K uniform, as in the Stream-K paper (arXiv 2301.03598).

    Sizes are rounded to multiples of 8: other lengths of rows take other kernels everywhere; see the set ``layouts``.
    The same seed gives the same shapes, and more of them begin with the fewer.
    """
    rng = random.Random(seed)
    shapes = []
    for i in range(count):
        m, n, k = (round(low * (high / low) ** rng.random() / SWEEP_STEP) * SWEEP_STEP for _ in range(3))
        shapes.append(Shape("sweep", f"{i:05d}", m, n, k))
    return shapes


SETS: dict[str, Callable[[Wanted], list[Shape]]] = {
    "square": square,
    "tp": tensor_parallel,
    "large": large,
    "waves": waves,
    "wave-grid": wave_grid,
    "long-k": long_k,
    "measured": measured,
    "transposes": transposes,
    "epilogues": epilogues,
    "tall-skinny": tall_skinny,
    "decode": decode,
    "layouts": layouts,
    "batched": batched,
    "grouped": grouped,
    "grouped-swiglu": grouped_swiglu,
}
BAR_SETS = ("large", "waves", "long-k", "measured", "transposes", "epilogues")
DEFAULT_SETS = ("square", *BAR_SETS)


def select(
    sets: Sequence[str] = (),
    *,
    models: Sequence[str] = (),
    rows: Sequence[int] = (),
    count: int = 0,
    seed: int = 0,
    small: bool = False,
) -> list[Shape]:
    """The shapes asked for; the default sets if there is neither a set nor a sweep.

    Args:
        sets: names of :data:`SETS`.
        models, rows: of the sets tp and decode, which are the default ones if one is named.
        count, seed: of the sweep.
        small: a few shapes of each set, much smaller, for trying things.

    Raises:
        BenchError: an unknown set or model, rows below 1, or a sweep below 0.
    """
    for name in sets:
        check_known("--set", name, SETS, hint=" For random shapes use --sweep N.")
    for model in models:
        check_known("--model", model, MODELS)
    if any(m < 1 for m in rows):
        raise BenchError(f"--rows: expected M of at least 1, got {', '.join(map(str, rows))}.")
    if count < 0:
        raise BenchError(f"--sweep: expected a number of shapes of at least 0, got {count}.")
    wanted = Wanted(tuple(models), tuple(rows))
    if not sets and count == 0:
        sets = ("tp", "decode") if models or rows else DEFAULT_SETS
    shapes = []
    for name in dict.fromkeys(sets):
        of_set = SETS[name](wanted)
        shapes += [_shrink(s) for s in of_set[:: -(-len(of_set) // _SMALL_MOST)]] if small else of_set
    shapes += sweep(count, seed, 8, 256) if small else sweep(count, seed)
    return list({shape.name: shape for shape in shapes}.values())


def _shrink(shape: Shape) -> Shape:
    """M and N of about 1/32, K of 1/8 (a shorter one leaves schedules nothing to cut); odd stays odd."""

    def less(size: int, times: int, most: int) -> int:
        return min(most, max(1 if size < 8 else 16, -(-size // times))) // 2 * 2 + size % 2

    # Not the waves that the label names: those are of the full size.
    label = "" if shape.waves is not None else shape.label
    return replace(
        shape,
        label=label,
        m=less(shape.m, 32, 160),
        n=less(shape.n, 32, 160),
        k=less(shape.k, 8, 1024),
        waves=None,
        batch=min(shape.batch, 3),
    )

"""Suite ``gemm``: one product on one device. Our kernel by the planner's choice and by each schedule, beside cuBLAS.

Four kinds of cases: products (variants: see :mod:`.gemm_planner`), one product in the four layouts of BLAS, products
with an epilogue (:mod:`.gemm_epilogues`), batches and groups (:mod:`.gemm_stacked`). Left out of the schedules are
``own_first`` and ``every_shard``: without communication they are ``hybrid_first``. With ``--tiles`` there are
products only, by ``streamk`` and by every schedule on each of the tiles: times from which constants of the cost model
are fitted.

Every row of ours has ``extra["plan"]`` (as ``tpkernels.explain`` gives it, the tile's name, and the number of
multiprocessors) and ``extra["waves"]``: tiles over those that the device computes at once. With strides that TMA does
not take the portable kernel runs; where not even vectors can be loaded, fewer of its blocks may fit on a multiprocessor
than its plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BenchError, check_known
from ..records import Row
from ..suite import Case, Options, Suite, Variant, Workload
from . import gemm_epilogues as epilogues
from . import gemm_stacked as stacked
from .gemm_planner import SAME_TILE, TILES, tile_variants
from .gemm_products import COPIES, FP8, GemmWorkload, LayoutsWorkload
from .gemm_shapes import BLAS_LAYOUTS, EPILOGUES, LAYOUTS, OPS, Shape, select

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["DTYPES", "ITEM_BYTES", "SUITE", "GemmSuite", "wanted_tiles"]

DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32", "float64", "bfloat16")}
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_OURS = {
    "streamk": "ours, tile and schedule by the cost model",
    "streamk:data_parallel": "ours, whole tiles only, with the tile that the cost model thinks best for it",
    SAME_TILE: "ours, whole tiles only, with the tile of streamk",
    "streamk:stream_k": "ours, every tile streamed (textbook Stream-K), tile of streamk",
    "streamk:split_k": "ours, every tile cut into equal runs of K, tile of streamk",
    "streamk:hybrid_first": "ours, streamed remainder, then whole tiles (two-tile Stream-K), tile of streamk",
    "streamk:hybrid_last": "ours, whole tiles, then the streamed remainder, tile of streamk",
    "streamk:hybrid_aligned": "ours, whole tiles, then the remainder cut at few depths of K, tile of streamk",
}
_OTHER_LAYOUTS = [name for name in BLAS_LAYOUTS if name != "TN"]


class GemmSuite(Suite):
    """One product on one device."""

    name = "gemm"
    what = "one product on one device: ours by every schedule, layout and epilogue, cuBLAS, fp8"

    def baseline(self, options: Options) -> str:
        return "cublas" if options.device == "cuda" else "blas"

    def variants(self, options: Options) -> Sequence[Variant]:
        base = self.baseline(options)
        found = [Variant(base, "peer", "torch.mm; with an epilogue, torch's operations one after another")]
        tiles = wanted_tiles(options)
        if tiles:
            found.append(Variant("streamk", "ours", _OURS["streamk"]))
            return found + [Variant(name, "ours", "ours, forced") for name in tile_variants(tiles)]
        if options.device == "cuda":
            what = "torch._scaled_mm: float8_e4m3fn operands (another precision), scaled per tensor, fast accumulation"
            found.append(Variant(FP8, "peer", what))
        found += [Variant(name, "ours", what) for name, what in _OURS.items()]
        for layout in _OTHER_LAYOUTS:
            found.append(Variant(f"{base}:{layout}", "peer", f"torch.mm, operands stored {layout}, not TN"))
            found.append(Variant(f"streamk:{layout}", "ours", f"ours, operands stored {layout}, not TN"))
        if options.device == "cuda":
            found.append(Variant(f"{base}:fused", "peer", "one product of cuBLAS with an epilogue"))
            own = ((name, what, name.startswith("torch")) for name, what in stacked.VARIANTS.items())
            found += [Variant(name, "peer" if peer else "ours", what) for name, what, peer in own]
        found.append(Variant(f"{base}:plain", "part", "torch.mm without the epilogue"))
        found.append(Variant("streamk:plain", "part", "ours without the epilogue"))
        found.append(Variant("streamk:plain-fp32", "part", "ours without the epilogue, into fp32"))
        return found

    def cases(self, options: Options) -> Sequence[Case]:
        known = DTYPES[options.device]
        for dtype in options.dtypes:
            check_known("--dtype", dtype, known)
        for op in options.ops:
            check_known("--op", op, OPS)
        shapes = select(
            options.sets,
            models=options.models,
            rows=options.rows,
            count=options.sweep,
            seed=options.seed,
            small=options.small,
        )
        wanted = ("matmul",) if wanted_tiles(options) else options.ops or OPS
        shapes = [shape for shape in shapes if shape.op in wanted]
        return [_case(shape, dtype) for dtype in options.dtypes or known[:1] for shape in shapes]

    def applies(self, case: Case, variant: str, options: Options) -> bool:
        base = self.baseline(options)
        name, _, what = variant.partition(":")
        if variant in (base, "streamk"):
            return True
        if case.op in stacked.STACKED or variant in stacked.VARIANTS:
            also = variant in stacked.VARIANTS and case.op in (stacked.GROUPED, stacked.GATED)
            return also or (variant == "streamk:data_parallel" and case.op in stacked.STACKED)
        if case.op == LAYOUTS:
            return what in _OTHER_LAYOUTS
        if case.op in EPILOGUES:
            if what == "fused":
                return epilogues.fused_by_cublas(case.op)
            return what == "plain" or (what == "plain-fp32" and case.op == "accumulate")
        if variant != FP8:
            return name == "streamk" and what not in _OTHER_LAYOUTS and not what.startswith("plain")
        # torch._scaled_mm takes a row-major and a column-major matrix, with sizes in multiples of 16.
        fits = case.params["n"] % 16 == 0 and case.params["k"] % 16 == 0
        return (
            options.device == "cuda"
            and case.dtype == "bfloat16"
            and case.params["layout"] == "forward"
            and fits
        )

    def bytes_needed(self, case: Case, options: Options) -> int:
        m, n, k = (int(case.params[name]) for name in "mnk")
        item = ITEM_BYTES[case.dtype]
        if case.op in stacked.STACKED:
            a, b, out = stacked.elements(case.op, case.params)
            # Copies, one output more, fp32 partials, and a float64 weight of the reference.
            plain = 2 * out if case.op == stacked.GATED else 0
            weight = 8 * k * n * stacked.halves(case.op)
            return COPIES * (a + b + out + plain) * item + out * (item + 2 * 4) + 2 * plain * item + weight
        if case.op in EPILOGUES:
            _, columns, _ = epilogues.sizes(case.op, m, n, k)
            sets = COPIES * (
                (m * k + k * columns + m * columns) * item + m * n * (item + max(4, item)) + n * item
            )
        else:
            layouts = len(BLAS_LAYOUTS) if case.op == LAYOUTS else 1
            columns, sets = n, layouts * COPIES * (m * k + k * n + m * n) * item
        fp8 = COPIES * (m * k + k * n) if self.applies(case, FP8, options) else 0
        partials = 2 * 4 * m * columns  # fp32, two splits
        reference = 8 * (k * columns + m * (columns + k) // 64)  # float64, sampled rows
        return sets + fp8 + partials + reference

    def workload(self, case: Case, context: Context) -> Workload:
        if case.op in EPILOGUES:
            return epilogues.EpilogueWorkload(case, context)
        if case.op in stacked.STACKED:
            return stacked.StackedWorkload(case, context)
        return (LayoutsWorkload if case.op == LAYOUTS else GemmWorkload)(case, context)

    def conclude(self, rows: Sequence[Row]) -> str:
        from ..report.tables_bars import bars_text

        return bars_text(rows)


def wanted_tiles(options: Options) -> tuple[str, ...]:
    """The tiles that --tiles names: groups of :data:`TILES`, "all" for those of the device's best kernel, or tiles."""
    known = [tile for group in TILES.values() for tile in group]
    found: list[str] = []
    for name in options.tiles:
        if name == "all":
            name = "hopper" if options.device == "cuda" else "cpu"
        if name not in TILES and name not in known:
            raise BenchError(
                f"--tiles: expected {', '.join(TILES)}, or names of tiles such as {known[0]}, got {name!r}."
            )
        found += TILES.get(name, (name,))
    return tuple(dict.fromkeys(found))


def _case(shape: Shape, dtype: str) -> Case:
    m, n, k = shape.m, shape.n, shape.k
    params: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": shape.layout}
    if shape.waves is not None:
        params["waves"] = round(shape.waves, 4)
    item = ITEM_BYTES[dtype]
    if shape.op in stacked.STACKED:
        params |= {"groups": shape.groups} if shape.groups else {"batch": shape.batch}
        flops = 2.0 * shape.batch * m * n * k * stacked.halves(shape.op)
        moved = float(item * sum(stacked.elements(shape.op, params)))
        return Case(shape.name, shape.op, dtype, params, shape.shape_set, flops=flops, bytes=moved)
    _, columns, _ = epilogues.sizes(shape.op, m, n, k)
    moved = item * (m * k + k * columns + m * n)
    if shape.op == "accumulate":
        moved += m * n * (2 * max(4, item) - item)  # fp32 read and written
    if shape.op == "residual":
        moved += m * n * item
    return Case(
        shape.name, shape.op, dtype, params, shape.shape_set, flops=2.0 * m * columns * k, bytes=float(moved)
    )


SUITE = GemmSuite()

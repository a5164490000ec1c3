"""Suite ``sweep``: sampled shapes of the Stream-K paper's domain, a thousand in a few minutes.

The shapes are those of :func:`.gemm_shapes.sweep`: log M, log N and log K uniform in [128, 8192], multiples of 8, the
same for a seed. Variants: the baseline, our kernel forced (``streamk``), its data-parallel schedule with the same tile,
and ``auto``, what a user gets. With ``--tiles``: our kernel on each of the tiles, by the schedules that the cost model
chooses from, to see what its choice loses and to fit its constants.

A shape takes a tenth of a second instead of the engine's seconds; :mod:`.sweep_runner` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..bars import SWEEP_SHAPES
from ..errors import BenchError, check_known
from ..records import Row
from ..suite import Case, Options, Suite, Variant, Workload
from .gemm import ITEM_BYTES, wanted_tiles
from .gemm_planner import SAME_TILE, SCHEDULES
from .gemm_shapes import SWEEP_HIGH, SWEEP_LOW, Shape, sweep

if TYPE_CHECKING:
    from ..context import Context
    from ..lockstep import Report
    from ..nvml import Sampler
    from ..plan import Job
    from ..suite import Runner

__all__ = ["AUTO", "DTYPES", "SUITE", "SweepSuite"]

DTYPES = {
    "cuda": ("bfloat16", "float16", "float64", "float32"),
    "cpu": ("float32", "float64", "bfloat16"),
}
AUTO = "auto"
COPIES = 2  # buffer sets at least
_FEW_SHAPES = 8  # when small, without --shapes
_SMALL = (64, 256)  # sizes of small shapes
_HOPPER_SCHEDULES = (
    "data_parallel",
    "hybrid_aligned",
)  # what the cost model of the Hopper kernel chooses from


class SweepSuite(Suite):
    """Many products on one device."""

    name = "sweep"
    what = "sampled products on one device, quickly: ours, its data-parallel schedule, auto, cuBLAS"
    twice = False  # in some of the cases: sweep_runner.AGAIN_EVERY
    brief = True

    def baseline(self, options: Options) -> str:
        return "cublas" if options.device == "cuda" else "blas"

    def variants(self, options: Options) -> Sequence[Variant]:
        found = [
            Variant(self.baseline(options), "peer", "torch.mm"),
            Variant("streamk", "ours", "our kernel, tile and schedule by the cost model"),
        ]
        tiles = wanted_tiles(options)
        for tile in tiles:
            schedules = _HOPPER_SCHEDULES if "/" in tile else SCHEDULES
            found += [Variant(f"streamk:{name}@{tile}", "ours", "our kernel, forced") for name in schedules]
        if not tiles:
            found.append(Variant(SAME_TILE, "ours", "our kernel, whole tiles only, with the tile of streamk"))
            found.append(Variant(AUTO, "ours", "tpkernels.matmul: whatever path 'auto' takes"))
        return found

    def cases(self, options: Options) -> Sequence[Case]:
        known = DTYPES[options.device]
        for dtype in options.dtypes:
            check_known("--dtype", dtype, known)
        unused = {
            "--set": options.sets,
            "--model": options.models,
            "--rows": options.rows,
            "--op": options.ops,
        }
        for name, given in unused.items():
            if given:
                raise BenchError(
                    f"sweep: {name} does not choose among sampled shapes; use --shapes, --seed, --part."
                )
        count = options.sweep or (_FEW_SHAPES if options.small else SWEEP_SHAPES)
        low, high = _SMALL if options.small else (SWEEP_LOW, SWEEP_HIGH)
        i, n = options.part
        shapes = list(enumerate(sweep(count, options.seed, low, high)))[(i - 1) * count // n : i * count // n]
        return [
            _case(index, shape, dtype) for dtype in options.dtypes or known[:1] for index, shape in shapes
        ]

    def bytes_needed(self, case: Case, options: Options) -> int:
        m, n, k = (int(case.params[name]) for name in "mnk")
        sets = (
            (COPIES + 1) * (m * k + k * n + 2 * m * n) * ITEM_BYTES[case.dtype]
        )  # outputs of auto are its own
        return sets + 2 * 4 * m * n + 8 * max(m * k, k * n, m * n)  # partials, an operand in float64

    def workload(self, case: Case, context: Context) -> Workload:
        raise BenchError(
            "sweep: its shapes are not profiled; use bench gemm --sweep N --case NAME --profile ..."
        )

    def runner(self, context: Context, job: Job, report: Report, sampler: Sampler) -> Runner:
        from .sweep_runner import SweepRunner

        return SweepRunner(self, context, job, report, sampler)

    def conclude(self, rows: Sequence[Row]) -> str:
        from ..report.tables_sweep import sweep_text

        return sweep_text(rows)


def _case(index: int, shape: Shape, dtype: str) -> Case:
    m, n, k = shape.m, shape.n, shape.k
    moved = ITEM_BYTES[dtype] * (m * k + k * n + m * n)
    params = {"index": index, "m": m, "n": n, "k": k, "layout": shape.layout}
    return Case(shape.name, "matmul", dtype, params, "sweep", flops=2.0 * m * n * k, bytes=float(moved))


SUITE = SweepSuite()

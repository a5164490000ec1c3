"""Suite ``gemm``: one product on one device. Our kernel by the planner's choice and by each schedule, beside cuBLAS.

``streamk`` is what users get: the cost model chooses tile and schedule. ``streamk:<schedule>`` forces a schedule with
the tile of that choice, so that all are compared at the same tile; ``streamk:dp-same-tile`` is data-parallel with that
tile too, the comparison of the Stream-K paper, and ``streamk:data_parallel`` is data-parallel with the tile that the
cost model thinks best for it. Left out are ``own_first`` and ``every_shard``: without communication they are
``hybrid_first``.

Every row of ours has ``extra["plan"]`` (as ``tpkernels.explain`` gives it, and the number of multiprocessors) and
``extra["waves"]``: tiles over those that the device computes at once. Plans are those of aligned operands; with odd
strides other kernels run, of which fewer may fit on a multiprocessor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import check_known
from ..suite import Case, Check, Options, Runnable, Skip, Suite, Variant, Workload
from .gemm_shapes import Shape, select

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..context import Context

__all__ = ["SUITE", "GemmSuite", "GemmWorkload", "Planner"]

FP8 = "cublaslt-fp8"
SAME_TILE = "streamk:dp-same-tile"
STREAMED = ("stream_k", "split_k", "hybrid_first", "hybrid_last")
DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32", "float64", "bfloat16")}
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_COPIES = 2  # at least
_CHECKED = 6  # of the buffer sets, each time
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 32)

_OURS = {
    "streamk": "ours, tile and schedule by the cost model",
    "streamk:data_parallel": "ours, whole tiles only, with the tile that the cost model thinks best for it",
    "streamk:dp-same-tile": "ours, whole tiles only, with the tile of streamk",
    "streamk:stream_k": "ours, every tile streamed (textbook Stream-K), tile of streamk",
    "streamk:split_k": "ours, every tile cut into equal runs of K, tile of streamk",
    "streamk:hybrid_first": "ours, streamed remainder, then whole tiles (two-tile Stream-K), tile of streamk",
    "streamk:hybrid_last": "ours, whole tiles, then the streamed remainder, tile of streamk",
}


class GemmSuite(Suite):
    """One product on one device."""

    name = "gemm"
    what = "one product on one device: ours by every schedule, cuBLAS, fp8"

    def baseline(self, options: Options) -> str:
        return "cublas" if options.device == "cuda" else "blas"

    def variants(self, options: Options) -> Sequence[Variant]:
        peers = [Variant(self.baseline(options), "peer", "torch.mm")]
        if options.device == "cuda":
            what = "torch._scaled_mm: float8_e4m3fn operands (another precision), scaled per tensor, fast accumulation"
            peers.append(Variant(FP8, "peer", what))
        return peers + [Variant(name, "ours", what) for name, what in _OURS.items()]

    def cases(self, options: Options) -> Sequence[Case]:
        known = DTYPES[options.device]
        for dtype in options.dtypes:
            check_known("--dtype", dtype, known)
        for op in options.ops:
            check_known("--op", op, ["matmul"])
        shapes = select(
            options.sets,
            models=options.models,
            rows=options.rows,
            count=options.sweep,
            seed=options.seed,
            small=options.small,
        )
        return [_case(shape, dtype) for dtype in options.dtypes or known[:1] for shape in shapes]

    def applies(self, case: Case, variant: str, options: Options) -> bool:
        if variant != FP8:
            return True
        # torch._scaled_mm takes a row-major and a column-major matrix, with sizes in multiples of 16.
        aligned = case.params["n"] % 16 == 0 and case.params["k"] % 16 == 0
        return (
            options.device == "cuda"
            and case.dtype == "bfloat16"
            and case.params["layout"] == "forward"
            and aligned
        )

    def bytes_needed(self, case: Case, options: Options) -> int:
        m, n, k = (int(case.params[name]) for name in "mnk")
        operands = (m * k + k * n) * ITEM_BYTES[case.dtype]
        sets = _COPIES * (operands + m * n * ITEM_BYTES[case.dtype])
        fp8 = _COPIES * (m * k + k * n) if self.applies(case, FP8, options) else 0
        partials = 2 * 4 * m * n  # fp32, two splits
        reference = 8 * (k * n + m * (n + k) // 64)  # float64, sampled rows
        return sets + fp8 + partials + reference

    def workload(self, case: Case, context: Context) -> GemmWorkload:
        return GemmWorkload(case, context)


def _case(shape: Shape, dtype: str) -> Case:
    m, n, k = shape.m, shape.n, shape.k
    params: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": shape.layout}
    if shape.waves is not None:
        params["waves"] = round(shape.waves, 4)
    moved = ITEM_BYTES[dtype] * (m * k + k * n + m * n)
    return Case(
        shape.name, "matmul", dtype, params, shape.shape_set, flops=2.0 * m * n * k, bytes=float(moved)
    )


@dataclass(frozen=True)
class Request:
    """What streamk_gemm is told: schedule, splits of every tile, tile ("" for any)."""

    schedule: str = "auto"
    splits: int = 1
    tile: str = ""


class Planner:
    """Plans of one product on one device, and what to ask of the kernel for each variant.

    Args:
        m, n, k: of the product.
        device: "cpu", "sm80" or "sm90", as torch.ops.tpkernels.streamk_plan takes it.
        multiprocessors: of the GPU; 0 on the CPU, where a plan has a worker for each thread.
    """

    def __init__(self, m: int, n: int, k: int, device: str, multiprocessors: int = 0) -> None:
        self.size, self.device, self.multiprocessors = (m, n, k), device, multiprocessors

    @classmethod
    def of(cls, m: int, n: int, k: int, device: torch.device) -> Planner:
        """For a device that is here."""
        import torch

        if device.type != "cuda":
            return cls(m, n, k, "cpu")
        properties = torch.cuda.get_device_properties(device)
        architecture = "sm80" if properties.major == 8 else "sm90"
        return cls(m, n, k, architecture, properties.multi_processor_count)

    def plan(self, request: Request, size: tuple[int, int, int] | None = None) -> dict[str, Any]:
        """What the kernel makes of a request; ``size`` in place of the product's."""
        import torch

        import tpkernels  # noqa: F401  (loads the ops)

        kind, numbers, predicted_us = torch.ops.tpkernels.streamk_plan(
            1,
            *(size or self.size),
            self.device,
            request.schedule,
            0,
            request.splits,
            self.multiprocessors,
            request.tile,
        )
        bm, bn, bk, tiles, k_iters, workers, splits, partial_tiles = numbers
        return {
            "schedule": kind,
            "tile": [bm, bn, bk],
            "tiles": tiles,
            "k_iters": k_iters,
            "workers": workers,
            "splits": splits,
            "partial_tiles": partial_tiles,
            "predicted_us": predicted_us,
            "multiprocessors": self.multiprocessors,
        }

    def request(self, variant: str) -> Request:
        """What a variant of ours asks for.

        Raises:
            Skip: the planner makes a streamed schedule data-parallel: there is nothing to stream, or K is too short.
        """
        if variant == "streamk":
            return Request()
        schedule = variant.removeprefix("streamk:")
        if schedule == "data_parallel":
            return Request(schedule, 1, _tile_name(self.plan(Request(schedule))))
        tile = _tile_name(self.plan(Request()))
        if variant == SAME_TILE:
            return Request("data_parallel", 1, tile)
        requests = [
            Request(schedule, splits, tile) for splits in (_SPLITS if schedule == "split_k" else (1,))
        ]
        plans = {request: self.plan(request) for request in requests}
        streamed = [request for request in requests if plans[request]["partial_tiles"] > 0]
        if not streamed:
            plan = plans[requests[0]]
            why = f"{plan['tiles']} tiles of {plan['k_iters']} iterations of K"
            raise Skip(f"{schedule} is data-parallel here: nothing to stream among {why}")
        return min(streamed, key=lambda request: float(plans[request]["predicted_us"]))

    def waves(self, plan: dict[str, Any]) -> float:
        """Tiles of a plan over those that the device computes at once; the fraction is how full the last wave is."""
        bm, bn, bk = plan["tile"]
        # Other plans may have fewer workers than run at once, or more; a data-parallel one of very many tiles has not.
        large = self.plan(Request("data_parallel", 1, _tile_name(plan)), (bm << 10, bn << 10, bk))
        return float(plan["tiles"]) / float(large["workers"])


def _tile_name(plan: dict[str, Any]) -> str:
    return "x".join(map(str, plan["tile"]))


@dataclass
class Product:
    """One buffer set: out [M, N] = a [M, K] @ b [K, N]."""

    a: Tensor
    b: Tensor
    out: Tensor


class GemmWorkload(Workload):
    """Operands and outputs of one case. The variants share the outputs: each is poisoned, run and checked by itself."""

    def __init__(self, case: Case, context: Context) -> None:
        import torch

        self.context = context
        self.m, self.n, self.k = (int(case.params[name]) for name in "mnk")
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.layout = str(case.params["layout"])
        self.planner = Planner.of(self.m, self.n, self.k, context.device)
        self.copies = context.copies(int(case.bytes), at_least=_COPIES)
        self.products = [self._product() for _ in range(self.copies)]

    def prepare(self, variant: str) -> Runnable:
        import torch

        if variant in ("cublas", "blas"):
            return self._runnable(lambda p: torch.mm(p.a, p.b, out=p.out))
        return self._fp8() if variant == FP8 else self._streamk(variant)

    def close(self) -> None:
        self.products.clear()

    def _product(self) -> Product:
        import torch

        uniform, pad = self.context.uniform, int(self.layout == "padded")
        m, n, k = self.m, self.n, self.k
        a = (
            uniform(k, m, dtype=self.dtype).t()
            if self.layout == "wgrad"
            else uniform(m, k + pad, dtype=self.dtype)
        )
        if self.layout in ("forward", "padded"):
            b = uniform(n, k + pad, dtype=self.dtype)[:, :k].t()
        else:
            b = uniform(k, n, dtype=self.dtype)
        return Product(a[:, :k], b, torch.empty(m, n, dtype=self.dtype, device=self.context.device))

    def _runnable(
        self,
        run: Callable[[Product], object],
        *,
        products: Sequence[Product] | None = None,
        tolerance: float = 0.0,
        extra: dict[str, Any] | None = None,
    ) -> Runnable:
        """``run`` on every buffer set (``products``: with other operands). ``tolerance``: beside the output dtype's."""
        from .. import checks

        sets = self.products if products is None else products
        copies = len(sets)

        def launch(i: int) -> None:
            run(sets[i % copies])

        def poison() -> None:
            for p in sets:
                p.out.fill_(float("nan"))

        def check() -> Check:
            worst = 0.0
            for p in random.sample(sets, min(_CHECKED, copies)):  # others each time
                # fp8 converts exactly, but cannot be indexed.
                a, b = (x.to(self.dtype) for x in (p.a, p.b))
                worst = max(worst, checks.product_error(p.out, a, b, generator=self.context.generator))
            return Check(worst, checks.tolerance(self.dtype) + tolerance)

        return Runnable(launch, copies, check, poison, extra=extra or {})

    def _streamk(self, variant: str) -> Runnable:
        import torch

        request = self.planner.request(variant)
        plan = self.planner.plan(request)
        gemm = torch.ops.tpkernels.streamk_gemm

        def run(p: Product) -> None:
            a, b, out = p.a[None], p.b[None], p.out[None]
            gemm(a, b, None, out, None, "none", False, request.schedule, 0, request.splits, request.tile)

        return self._runnable(run, extra={"plan": plan, "waves": self.planner.waves(plan)})

    def _fp8(self) -> Runnable:
        import torch

        capability = torch.cuda.get_device_capability(self.context.device)
        if capability < (8, 9):
            raise Skip(
                f"fp8 needs compute capability 8.9 or newer, this device has {capability[0]}.{capability[1]}"
            )
        fp8 = torch.float8_e4m3fn
        products = [Product(p.a.to(fp8), p.b.to(fp8), p.out) for p in self.products]
        one = torch.ones((), device=self.context.device)

        def run(p: Product) -> None:
            torch._scaled_mm(
                p.a, p.b, scale_a=one, scale_b=one, out_dtype=self.dtype, use_fast_accum=True, out=p.out
            )

        # Fast accumulation keeps about 13 bits of the sum after each 32 products.
        return self._runnable(run, products=products, tolerance=self.k / 32 * 2.0**-13)


SUITE = GemmSuite()

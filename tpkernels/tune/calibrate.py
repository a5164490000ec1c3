"""The constants of the cost model, fitted to times of this machine.

A set of products is timed by several plans each, so that the constants of every tile have rows that tell them. What is
fitted is kept in the tuning cache and used with TPK_AUTOTUNE, if it predicts products that the fit has not seen better
than what is used now.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tpkernels import _extensions
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops import _gemm, _plans
from tpkernels.ops._paths import Choice, PlanArguments
from tpkernels.tune import candidates, case, constants, fitting, local, timer
from tpkernels.tune.fitting import Cost, Sample, Score

# M, N and K: large and small, few rows, little K, waves that are nearly full and nearly empty.
SHAPES = {
    "sm90": (
        (4096, 4096, 4096), (8192, 8192, 2048), (2048, 5120, 8192), (8192, 1280, 8192), (512, 4096, 14336),
        (3072, 3072, 8192), (1024, 1024, 16384), (8192, 3584, 8192), (1024, 8192, 3584), (4096, 1024, 512),
        (2048, 2048, 2048), (1536, 1536, 1536), (640, 6144, 4096), (8192, 8192, 512), (768, 768, 6144),
        (256, 3584, 8192), (128, 8192, 8192), (64, 8192, 8192), (300, 500, 7000), (16, 28672, 8192),
    ),
    "cpu": (
        (256, 256, 256), (512, 512, 512), (1024, 512, 512), (64, 1024, 1024), (16, 2048, 1024), (128, 128, 4096),
        (700, 300, 900), (768, 768, 256), (32, 4096, 512), (384, 1536, 640), (96, 96, 96), (8, 512, 4096),
        (1000, 1000, 64), (200, 200, 2000),
    ),
    "portable": (
        (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (512, 512, 512), (256, 256, 256),
        (2048, 5120, 2048), (512, 4096, 4096), (256, 256, 8192), (1024, 8192, 512), (640, 1536, 3072),
        (3072, 768, 1536), (128, 4096, 4096), (16, 8192, 4096), (300, 500, 3000), (4096, 4096, 256),
    ),
}  # fmt: skip
# Of operands, as _plans.Product names them: each has tiles of its own.
DTYPES = {"sm90": ("bfloat16",), "cpu": ("float32",), "portable": ("bfloat16", "tf32", "float32", "float64")}
_FAR = 2.5  # times the cheapest prediction: plans slower than that tell of nothing that is ever chosen
FITS = 1 + fitting.FOLDS  # to all that was timed, and to three quarters of the products each
_STAY = 0.02  # constants of another machine may be far away
_ROUNDS = 5
_LOOKED_AT, _MORE_WHOLE = 200, 16  # whole tiles beside the cheapest: of so many so many are timed
_WHOLE = "whole"  # begins the names of their constants


class Calibration(NamedTuple):
    """What came of it. ``before``: with the constants in use; ``left_out``: of products that the fit had not seen."""

    kind: str
    samples: int
    before: Score
    after: Score
    left_out: Score
    constants: Cost
    was: Cost

    @property
    def is_better(self) -> bool:
        return self.left_out.median < self.before.median


def calibrate(
    device: torch.device,
    *,
    portable: bool = False,
    shapes: tuple[tuple[int, int, int], ...] | None = None,
    done: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Times products on a device and fits the constants of its kernel's cost model. Changes nothing.

    ``portable``: of the portable CUDA kernel, also on Hopper. ``done`` is told of every product that was timed, then of
    ``FITS`` fits.

    Raises:
        ArgumentError: ``portable`` where there is no such kernel.
        BackendError: ``_host`` is not there.
    """
    kind = kind_of(device, portable=portable)
    local.store_of(device)  # what was calibrated before is what is in use
    samples: list[Sample] = []
    for size, dtype in products(kind, shapes):
        samples += sample(size, kind, device, dtype)
        done("x".join(map(str, size)) + (f" {dtype}" if kind in constants.PORTABLE else ""))
    was = constants.read(kind)
    start = _shipped(kind)
    fitted = fitting.fit(samples, start, stay=_STAY)
    done(f"fitted to {len(samples)} plans")
    left_out = fitting.cross_validate(
        samples,
        start,
        stay=_STAY,
        fitted=lambda fold: done(f"fitted to three quarters of the products, {fold + 1} of {fitting.FOLDS}"),
    )
    return Calibration(
        kind, len(samples), fitting.score(samples, was), fitting.score(samples, fitted), left_out, fitted, was
    )


def keep(found: Calibration, device: torch.device) -> None:
    """Use these constants from now on, and leave them in the cache for other processes."""
    constants.use(found.kind, found.constants)
    local.store_of(device).put_constants(
        found.kind,
        {
            "text": "".join(f"{name} {value!r}\n" for name, value in found.constants.items()),
            "median_error": found.left_out.median,
            "p90_error": found.left_out.p90,
            "samples": found.samples,
            "when": time.time(),
        },
    )


def products(
    kind: str, shapes: tuple[tuple[int, int, int], ...] | None = None
) -> list[tuple[tuple[int, int, int], str]]:
    """What is timed: sizes and dtypes."""
    of = "portable" if kind in constants.PORTABLE else kind
    return [(size, dtype) for dtype in DTYPES[of] for size in shapes or SHAPES[of]]


def kind_of(device: torch.device, *, portable: bool = False) -> str:
    """Of the kernel that half precision gets on a device, or of the portable CUDA kernel there.

    Raises:
        ArgumentError: ``portable`` where there is no such kernel.
        BackendError: ``_host`` is not there.
    """
    kind = constants.kinds_of(device)[-1 if portable else 0]
    if portable and kind not in constants.PORTABLE:
        raise ArgumentError(f"--kernel: the portable kernel is for CUDA devices, got {device.type}.")
    if not _extensions.is_loaded("_host"):
        raise BackendError(f"calibrate: it needs the _host module, but {_extensions.why_not('_host')}.")
    return kind


def sample(size: tuple[int, int, int], kind: str, device: torch.device, dtype: str) -> Iterator[Sample]:
    """One product by several plans, timed beside each other."""
    m, n, k = size
    machine = _plans.machine_of(device.type, device)._replace(architecture=kind)
    product = _plans.Product(1, m, n, k, dtype=dtype)
    asked = plans(product, machine)
    of = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    a = torch.randn(m, k, device=device).to(of)
    b = torch.randn(n, k, device=device).to(of).t()
    sets = timer.copies_of([a, b], device)

    def runner(plan: PlanArguments) -> Callable[[int], object]:
        choice = Choice("streamk", "", plan=plan)

        def run(i: int) -> object:
            left, right = sets[i]
            assert left is not None and right is not None
            return _gemm.run(choice, left, right, out_dtype=left.dtype)

        return run

    with _precision(dtype):
        measures = [timer.measure(runner(plan), len(sets), device) for plan in asked]
        times = timer.race(measures, keep=range(len(measures)), rounds=_ROUNDS)
    for plan, us in zip(asked, times, strict=True):
        predict = predictor(kind, size, plan, machine, dtype)
        # The dtype in front: cross-validation leaves out every fourth case in order, never all of a dtype.
        yield Sample(f"{dtype} {size}", us, predict, _matters(kind, plan.tile, dtype))


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """torch's switch for TF32 as the dtype wants it; others leave it alone."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if dtype in ("tf32", "float32"):
        settings.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        if dtype in ("tf32", "float32"):
            settings.fp32_precision = before


def plans(product: _plans.Product, machine: _plans.Machine) -> list[PlanArguments]:
    """Whole tiles, and the best that is cut, on every tile that may ever be chosen. Pure.

    Of those that the Hopper kernel for short products takes whole, of which there are over a thousand, the cheapest
    and some others.
    """
    found: list[tuple[float, PlanArguments]] = []
    tiles = _plans.tiles_of(product, machine)
    for tile in [*tiles, *_more_whole(product, machine, tiles)]:
        whole = _plans.plan(product, machine, "data_parallel", tile)
        found.append((float(whole["predicted_us"]), PlanArguments("data_parallel", 1, tile)))
        if _plans.is_whole(tile):
            continue
        cut = [
            (float(plan["predicted_us"]), PlanArguments(kind, n, tile))
            for kind, splits in candidates.schedules_of(machine)
            for n in splits
            if kind != "data_parallel"
            and (plan := _plans.plan(product, machine, kind, tile, n))["partial_tiles"]
        ]
        if cut:
            found.append(min(cut, key=lambda one: one[0]))
    most = _FAR * min(us for us, _ in found)
    return [plan for us, plan in found if us <= most]


def _more_whole(product: _plans.Product, machine: _plans.Machine, tiles: list[str]) -> list[str]:
    """Others than the cheapest whole tiles, so that the fit is told of clusters and sizes that it does not take now."""
    if not any(_plans.is_whole(tile) for tile in tiles):
        return []
    host: Any = _extensions.host()
    others = [name for name in host.HOPPER_TILES if _plans.is_whole(name) and name not in tiles]
    seen = random.Random(f"{product.m} {product.n} {product.k}").sample(others, _LOOKED_AT)
    plans = ((float(_plans.plan(product, machine, tile=name)["predicted_us"]), name) for name in seen)
    return [name for _, name in sorted(plans)[:_MORE_WHOLE]]


def predictor(
    kind: str, size: tuple[int, int, int], plan: PlanArguments, machine: _plans.Machine, dtype: str = ""
) -> Callable[[Cost], float]:
    """Predicted microseconds of a plan as a function of the constants."""
    host: Any = _extensions.host()
    if kind == "sm90":
        sms = machine.multiprocessors or 132
        (made,) = host.hopper_plans(
            *size, schedule=plan.schedule, splits=plan.splits, tile=plan.tile, multiprocessors=sms
        )
        return lambda cost: float(
            host.hopper_predict_us(
                *size, plan=made, multiprocessors=sms, cost=_converted(host.HopperCost, cost)
            )
        )
    if kind in constants.PORTABLE:
        portable = host.portable_plan(
            *size, device=kind, dtype=dtype, schedule=plan.schedule, splits=plan.splits, tile=plan.tile,
            multiprocessors=machine.multiprocessors or (108 if kind == "sm80" else 132),
        )  # fmt: skip
        return lambda cost: float(host.portable_predict_us(portable, _converted(host.PortableCost, cost)))
    told = _plans.plan(_plans.Product(1, *size), machine, plan.schedule, plan.tile, plan.splits)
    threads = case.threads()
    tile = host.TileShape(*told["tile"])
    cpu = host.make_plan(
        *size, 1, tile=tile, kind=plan.schedule, cost=host.CostConstants(), workers=threads, min_iters=2,
        splits=plan.splits,
    )  # fmt: skip
    assert (cpu.schedule.workers, cpu.schedule.num_slots) == (told["workers"], told["partial_tiles"])

    def convert(cost: Cost) -> Any:
        values = host.CostConstants()
        for name, value in cost.items():
            setattr(values, name, value)
        return values

    return lambda cost: float(host.predict_us(cpu.schedule, tile, _converted(convert, cost), threads))


_last: tuple[Cost, Any] | None = None


def _converted(convert: Callable[[Cost], Any], cost: Cost) -> Any:
    """Constants as ``_host`` takes them; a fit asks for the same ones sample after sample."""
    global _last
    if _last is None or _last[0] is not cost:
        _last = cost, convert(cost)
    return _last[1]


def _matters(kind: str, tile: str, dtype: str = "") -> frozenset[str]:
    """Constants that a plain product on this tile may depend on."""
    names = [name.partition(" ") for name in constants.read(kind)]
    if kind in constants.PORTABLE:
        of = f"{tile} {'half' if dtype in ('bfloat16', 'float16') else dtype}"
        return frozenset("".join(name) for name in names if name[2] in ("", of))
    if _plans.is_whole(tile):
        return frozenset("".join(name) for name in names if name[0] == _WHOLE)
    unused = {"finish_us", "outer_us", "owner_us", "addend_us", "departing_split_us"}
    mine = {"", tile, tile.partition("/")[0]}
    return frozenset("".join(name) for name in names if name[2] in mine and name[0] not in unused)


def _shipped(kind: str) -> Cost:
    """Constants that the package came with: a fit starts there, so that it does not depend on earlier ones."""
    host: Any = _extensions.host()
    if kind == "sm90":
        return dict(host.hopper_cost())
    if kind in constants.PORTABLE:
        return dict(host.portable_cost(kind))
    cost = host.cost_constants(kind)
    return {name: float(getattr(cost, name)) for name in constants.read(kind)}

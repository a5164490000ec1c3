"""The constants of the cost model, fitted to times of this machine.

A set of products is timed by several plans each, so that the constants of every tile have rows that tell them. What is
fitted is kept in the tuning cache and used with TPK_AUTOTUNE, if it predicts products that the fit has not seen better
than what is used now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tpkernels import _extensions
from tpkernels.errors import BackendError
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
}  # fmt: skip
_DTYPES = {"sm90": torch.bfloat16, "cpu": torch.float32}
_FAR = 2.5  # times the cheapest prediction: plans slower than that tell of nothing that is ever chosen
_STAY = 0.02  # constants of another machine may be far away
_ROUNDS = 5


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
    shapes: tuple[tuple[int, int, int], ...] | None = None,
    measured: Callable[[str], None] = lambda shape: None,
) -> Calibration:
    """Times products on a device and fits the constants of its kernel's cost model. Changes nothing.

    ``measured`` is told of every shape when it is done.

    Raises:
        BackendError: the constants of this device's kernel are fixed, or ``_host`` is not there.
    """
    kind = kind_of(device)
    local.store_of(device)  # what was calibrated before is what is in use
    samples: list[Sample] = []
    for size in shapes or SHAPES[kind]:
        samples += sample(size, kind, device)
        measured("x".join(map(str, size)))
    was = constants.read(kind)
    start = _shipped(kind)
    fitted = fitting.fit(samples, start, stay=_STAY)
    left_out = fitting.cross_validate(samples, start, stay=_STAY)
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


def kind_of(device: torch.device) -> str:
    """Of the kernel that a device gets.

    Raises:
        BackendError: its constants are fixed, or ``_host`` is not there.
    """
    kind = constants.kind_of(device)
    if kind is None:
        name = _plans.machine_of(device.type, device).architecture
        raise BackendError(
            f"calibrate: the constants of the portable CUDA kernel ({name}) are fixed; those of the Hopper kernel and "
            "of the CPU (--device cpu) can be fitted."
        )
    if not _extensions.is_loaded("_host"):
        raise BackendError(f"calibrate: it needs the _host module, but {_extensions.why_not('_host')}.")
    return kind


def sample(size: tuple[int, int, int], kind: str, device: torch.device) -> Iterator[Sample]:
    """One product by several plans, timed beside each other."""
    m, n, k = size
    machine = _plans.machine_of(device.type, device)
    product = _plans.Product(1, m, n, k)
    asked = plans(product, machine)
    a = torch.randn(m, k, device=device).to(_DTYPES[kind])
    b = torch.randn(n, k, device=device).to(_DTYPES[kind]).t()
    sets = timer.copies_of([a, b], device)

    def runner(plan: PlanArguments) -> Callable[[int], object]:
        choice = Choice("streamk", "", plan=plan)

        def run(i: int) -> object:
            left, right = sets[i]
            assert left is not None and right is not None
            return _gemm.run(choice, left, right, out_dtype=left.dtype)

        return run

    measures = [timer.measure(runner(plan), len(sets), device) for plan in asked]
    times = timer.race(measures, keep=range(len(measures)), rounds=_ROUNDS)
    for plan, us in zip(asked, times, strict=True):
        yield Sample(f"{size}", us, predictor(kind, size, plan, machine), _matters(kind, plan.tile))


def plans(product: _plans.Product, machine: _plans.Machine) -> list[PlanArguments]:
    """Whole tiles, and the best that is cut, on every tile that may ever be chosen. Pure."""
    found: list[tuple[float, PlanArguments]] = []
    for tile in _plans.tiles_of(product, machine):
        whole = _plans.plan(product, machine, "data_parallel", tile)
        found.append((float(whole["predicted_us"]), PlanArguments("data_parallel", 1, tile)))
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


def predictor(
    kind: str, size: tuple[int, int, int], plan: PlanArguments, machine: _plans.Machine
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


def _matters(kind: str, tile: str) -> frozenset[str]:
    """Constants that a plain product on this tile may depend on."""
    names = [name.partition(" ") for name in constants.read(kind)]
    unused = {"finish_us", "outer_us", "owner_us", "addend_us", "departing_split_us"}
    if "s/" in tile:  # whose model has constants of its own, which are not fitted
        return frozenset()
    mine = {"", tile, tile.partition("/")[0]}
    return frozenset("".join(name) for name in names if name[2] in mine and name[0] not in unused)


def _shipped(kind: str) -> Cost:
    """Constants that the package came with: a fit starts there, so that it does not depend on earlier ones."""
    host: Any = _extensions.host()
    if kind == "sm90":
        return dict(host.hopper_cost())
    cost = host.cost_constants(kind)
    return {name: float(getattr(cost, name)) for name in constants.read(kind)}

"""Constants of a machine from measured times. Pure: ``tpk.calibrate`` and ``python -m bench fit-paths`` use it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tpkernels.comm import choice
from tpkernels.comm.choice import Call, Machine, Overlap, Points, Quick

_LEAST = 1e-3  # constants stay above it, so that steps are factors
_LEAST_US = 10.0  # to enter, leave and join two streams, whatever a few large shapes would have
_ALIKE = 0.02  # a choice that costs less than this part is not wrong


class Sample(NamedTuple):
    """One call, measured: its product alone, path "nccl+cublas", and path "fused"; None where it was not."""

    call: Call
    product_us: float
    apart_us: float | None
    fused_us: float | None


def fit(samples: Sequence[Sample], start: Machine) -> Machine:
    """The machine that tells the samples best. What no sample tells stays as in ``start``. Deterministic."""
    if not samples:
        return start
    machine = _fit_product(samples, start)
    apart, fused = dict(machine.apart), dict(machine.fused)
    for op in choice.OPS:
        of_op = [s for s in samples if s.call.op == op]
        apart[op] = _points(of_op) or apart[op]
        slow = [s for s in of_op if s.fused_us is not None and not choice.is_quick(s.call, machine)]
        if slow:
            fused[op] = _fit_overlap(slow, replace(machine, apart=apart))
    machine = replace(machine, apart=apart, fused=fused)
    small = [s for s in samples if s.fused_us is not None and choice.is_quick(s.call, machine)]
    quick = dict(machine.quick)
    for op in choice.OPS:
        if of_op := [s for s in small if s.call.op == op]:
            quick[op] = _fit_quick(of_op, machine)
    return replace(machine, quick=quick)


def _fit_product(samples: Sequence[Sample], start: Machine) -> Machine:
    def machine(values: Sequence[float]) -> Machine:
        tflops, memory_gbps, launch_us = values
        return replace(start, tflops=tflops, memory_gbps=memory_gbps, launch_us=launch_us)

    def loss(values: Sequence[float]) -> float:
        one = machine(values)
        return sum(_error(choice.product_us(s.call, one), s.product_us) for s in samples)

    return machine(_descend(loss, [start.tflops, start.memory_gbps, start.launch_us]))


def _points(samples: Sequence[Sample]) -> Points:
    """What a call takes beside its product; of calls that carry as much, the median."""
    by_size = defaultdict(list)
    for s in samples:
        if s.apart_us is not None:
            by_size[choice.travelling(s.call)].append(max(1.0, s.apart_us - s.product_us))
    return tuple((float(size), round(statistics.median(us), 2)) for size, us in sorted(by_size.items()))


def _fit_overlap(samples: Sequence[Sample], start: Machine) -> Overlap:
    op = samples[0].call.op

    def loss(values: Sequence[float]) -> float:
        one = replace(start, fused={op: Overlap(*values)})
        return sum(_fused_error(s, one) for s in samples)

    gbps, exposed, us, us_per_k = _descend(loss, start.fused[op], (_LEAST, _LEAST, _LEAST_US, _LEAST))
    return Overlap(gbps, exposed, us, us_per_k)


def _fit_quick(samples: Sequence[Sample], start: Machine) -> Quick:
    op = samples[0].call.op
    before = start.quick[op]
    most = before.most_bytes

    def loss(values: Sequence[float]) -> float:
        one = replace(start, quick={op: Quick(values[0], values[1], most)})
        return sum(_fused_error(s, one) for s in samples)

    us, gbps = _descend(loss, before[:2] if before.us > 0 else (10.0, 100.0))
    return Quick(us, gbps, most)


def _fused_error(sample: Sample, machine: Machine) -> float:
    """Of the time, and of what the choice costs: a model may be wrong about times and still choose right."""
    call, fused, apart = sample.call, sample.fused_us or 0.0, sample.apart_us
    error = _error(choice.fused_us(call, machine, sample.product_us), fused)
    if apart is not None:
        loses = fused / apart if choice.choose(call, machine).fused else apart / fused
        error += max(0.0, math.log(loses) - _ALIKE)
    return error


def _error(predicted: float, us: float) -> float:
    return math.log(predicted / us) ** 2


def _descend(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], lowest: Sequence[float] = ()
) -> list[float]:
    """Coordinate descent by factors; from a few starts, as losses with a maximum in them have several valleys."""
    lowest = lowest or [_LEAST] * len(start)
    found = []
    for factor in (1.0, 0.4, 2.5):
        best = [max(low, value) for low, value in zip(lowest, [start[0] * factor, *start[1:]], strict=True)]
        least, step = loss(best), 0.7
        while step > 0.004:
            improved = False
            for i, low in enumerate(lowest):
                for change in (math.exp(step), math.exp(-step)):
                    trial = [*best[:i], max(low, best[i] * change), *best[i + 1 :]]
                    if (now := loss(trial)) < least * (1 - 1e-6):
                        best, least, improved = trial, now, True
                        break
            step = step if improved else step / 2
        found.append((least, best))
    return [float(f"{value:.4g}") for value in min(found)[1]]

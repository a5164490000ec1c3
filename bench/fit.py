"""Constants of the Hopper cost model from measured rows: ``python -m bench fit RESULT.jsonl``.

Rows of suite ``gemm`` count that are right, plain products and of the Hopper kernel; ``--tiles`` measures them on every
tile. The model is the library's own (csrc/kernels/sm90a/cost.hpp), so what is fitted is what plans with. How it is
fitted: :mod:`tpkernels.tune.fitting`; by how many rows each constant is fitted is told.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tpkernels.tune.fitting import FOLDS, Cost, Sample, Score, cross_validate, fit, score

from .errors import BenchError
from .records import Row, load

__all__ = ["Sample", "Score", "cross_validate", "fit", "run", "samples_of", "score"]


def samples_of(rows: Sequence[Row]) -> tuple[list[Sample], int]:
    """Samples, and how many rows of the kernel had another plan than the planner makes now: they tell nothing."""
    from tpkernels import _host
    from tpkernels.ops import _plans

    now = _host.hopper_cost()
    samples: list[Sample] = []
    changed = 0
    for row in rows:
        made = row.extra.get("plan") or {}
        tile, sms = made.get("tile_name"), made.get("multiprocessors", 0)
        plain = (row.op, row.status, row.role) == ("matmul", "ok", "ours") and row.suite in ("gemm", "sweep")
        if not plain or row.us is None or tile not in _host.HOPPER_TILES or sms < 1:
            continue
        size = (int(row.params["m"]), int(row.params["n"]), int(row.params["k"]))
        ask = dict(schedule=made["schedule"], splits=made["splits"], tile=tile, multiprocessors=sms)
        (plan,) = _host.hopper_plans(*size, **ask)
        s = plan.plan.schedule
        same = (s.workers, s.num_slots) == (made["workers"], made["partial_tiles"])
        changed += not same

        def predict(cost: Cost, size: Any = size, plan: Any = plan, sms: int = sms) -> float:
            return float(_host.hopper_predict_us(*size, plan=plan, multiprocessors=sms, cost=cost))

        if same:
            names = frozenset(n for n in now if n.startswith("whole ") == _plans.is_whole(tile))
            samples.append(Sample(f"{size} {row.dtype}", row.us.p50, predict, names))
    return samples, changed


def run(files: Sequence[Path], *, folds: bool = True, stdout: TextIO = sys.stdout) -> int:
    """Prints scores of the present constants and of fitted ones, and the latter beside the former."""
    from tpkernels import _host

    samples, changed = samples_of([row for file in files for row in load(file).rows])
    if len({s.case for s in samples}) < FOLDS:
        raise BenchError(
            f"fit: expected right rows of the Hopper kernel from at least {FOLDS} shapes of suite gemm, got "
            f"{len(samples)} rows ({changed} more have another plan now); measure some: python -m bench gemm --tiles"
        )
    now = _host.hopper_cost()
    fitted = fit(samples, now)
    lines = [f"{len(samples)} rows; {changed} left out, which would be planned otherwise now"]
    lines += [f"present:    {score(samples, now)}\nfitted:     {score(samples, fitted)}"]
    lines += [f"left out:   {cross_validate(samples, now)}"] if folds else []
    for name in sorted(now):
        rows = sum(s.predict(now | {name: now[name] * 1.5}) != s.predict(now) for s in samples)
        lines.append(f"  {name:28} {now[name]:12.6g} -> {fitted[name]:12.6g}  by {rows} rows")
    print("\n".join(lines), file=stdout)
    return 0

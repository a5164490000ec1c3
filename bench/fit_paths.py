"""Constants of path choice from measured rows: ``python -m bench fit-paths RESULT.jsonl ... --write``.

Rows of suite ``overlap``, of every card and number of ranks in the files: variants ``gemm``, ``ours:fused`` and
``ours:nccl+cublas`` (or ``ours`` where it took that), which is what ``auto`` runs where it does not fuse; where a case
has no such row, ``nccl+cublas``, which is faster for sums. The model is the library's own (tpkernels/comm/choice.py).
``--write`` puts what is fitted into its table, tpkernels/comm/machines.py; machines that no row is of stay there as
they are. Where nothing fused was measured, those constants are taken from the machine in the files whose number of
ranks is nearest.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .errors import BenchError
from .records import Results, card, load

__all__ = ["Machines", "measured", "run", "table", "written"]

APART = ("ours:nccl+cublas", "nccl+cublas")  # the first of these that a case has
FUSED = "ours:fused"
_BEGIN = "# fmt: off\n"


class Machines(NamedTuple):
    """Samples by (card, world), with the names of their cases."""

    samples: dict[tuple[str, int], list[Any]]
    cases: dict[tuple[str, int], list[str]]


def measured(results: Results) -> Machines:
    """Samples of the cases whose product was measured, and one of the two paths at least. The last run counts."""
    from tpkernels.comm.fitting import Sample

    cards = {header.run: card(header.env) for header in results.headers}
    cases: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    calls = {}
    for row in results.latest():
        if (row.suite, row.status, row.dtype) != ("overlap", "ok", "bfloat16") or row.us is None:
            continue
        key = (cards.get(row.run, ""), row.world, row.case)
        calls[key] = call_of(row.op, row.params, row.world)
        if row.variant == FUSED and _outdated(calls[key], row.extra.get("path")):
            continue
        cases[key][row.variant] = row.us.p50
        if row.variant == "ours" and row.extra.get("path") == "nccl+cublas":  # what auto took
            cases[key].setdefault(APART[0], row.us.p50)
    found = Machines(defaultdict(list), defaultdict(list))
    for key, times in cases.items():
        apart = next((times[name] for name in APART if name in times), None)
        if "gemm" in times and (apart is not None or FUSED in times):
            found.samples[key[:2]].append(Sample(calls[key], times["gemm"], apart, times.get(FUSED)))
            found.cases[key[:2]].append(key[2])
    return found


def _outdated(call: Any, path: object) -> bool:
    """Whether path "fused" overlapped where it has a kernel of low latency now."""
    from tpkernels.comm import choice, small

    few = small.way_of(call.op, call.rows, choice.row_bytes(call)) is not None
    return few and path == "fused+streamk"


def call_of(op: str, params: Mapping[str, Any], world: int) -> Any:
    """A case as path choice sees it."""
    from tpkernels import shard_sizes
    from tpkernels.comm.choice import Call

    m, n, k = (int(params[name]) for name in ("m", "n", "k"))
    return Call(op, tuple(shard_sizes(m, world)), n, k)


def run(
    files: Sequence[Path], *, quick: int | None = None, write: bool = False, stdout: TextIO = sys.stdout
) -> int:
    """Prints what each case takes, what is predicted, and what the choice costs beside the better path.

    ``quick``: bytes up to which path "fused" had the kernel of low latency; None as in the table.
    """
    from tpkernels.comm import fitting, machines

    found = measured(load(*files))
    if not found.samples:
        raise BenchError(
            "fit-paths: expected rows of suite overlap in bfloat16 with variants gemm, ours:fused and "
            "ours:nccl+cublas, got none; measure some: python -m bench overlap"
        )
    made = {(machine.card, machine.world): machine for machine in machines.MACHINES}
    fused = [key for key, samples in found.samples.items() if any(s.fused_us is not None for s in samples)]
    for name, world in sorted(found.samples, key=lambda key: (key not in fused, key)):
        samples = found.samples[name, world]
        start = made.get((name, world)) or machines.find(name, world) or machines.MACHINES[0]
        if (name, world) not in fused and fused:  # its fused operations: as on what is most like it
            like = made[min(fused, key=lambda key: (abs(key[1] - world), key))]
            start = replace(start, fused=like.fused, quick=like.quick)
        if quick is not None:
            few = {op: one._replace(most_bytes=quick) for op, one in start.quick.items()}
            start = replace(start, quick=few)
        machine = fitting.fit(samples, replace(start, card=name, world=world))
        made[name, world] = machine
        print("\n".join(table(machine, samples, found.cases[name, world])), file=stdout)
    if write:
        path = Path(str(machines.__file__))
        head = path.read_text().partition(_BEGIN)[0]
        path.write_text(head + _BEGIN + written([made[key] for key in sorted(made)]))
        print(f"wrote {path}", file=stdout)
    else:
        print(written([made[key] for key in sorted(made)]), file=stdout)
    return 0


def table(machine: Any, samples: Sequence[Any], cases: Sequence[str]) -> list[str]:
    """Lines that show how well a machine tells samples, and what it takes."""
    from tpkernels.comm.choice import choose

    lines = [f"{machine.card}, {machine.world} ranks: times in us, measured (predicted)"]
    lines += [f"  {'case':24} {'apart':>15} {'fused':>15}  auto takes"]
    errors = []
    for name, s in zip(cases, samples, strict=True):
        told = choose(s.call, machine)
        pairs = ((s.apart_us, told.apart_us), (s.fused_us, told.fused_us))
        shown = [f"{us or math.nan:7.0f} ({guess:5.0f})" for us, guess in pairs]
        taken, other = (s.fused_us, s.apart_us) if told.fused else (s.apart_us, s.fused_us)
        verdict = ""
        if taken is not None and other is not None:
            errors += [abs(math.log(guess / us)) for us, guess in pairs if us is not None]
            verdict = f", {taken / other:.2f}x the other" + (" !" if taken > 1.03 * other else "")
        lines.append(
            f"  {name:24} {shown[0]:>15} {shown[1]:>15}  {'fused' if told.fused else 'apart'}{verdict}"
        )
    if errors:
        lines.append(f"  mean error of predictions {sum(errors) / len(errors):.1%}")
    return lines


def written(machines: Sequence[Any]) -> str:
    """The table of tpkernels/comm/machines.py."""
    lines = ["MACHINES = ("]
    for m in machines:
        lines += [
            "    Machine(",
            f'        "{m.card}", {m.world}, tflops={m.tflops}, memory_gbps={m.memory_gbps}, launch_us={m.launch_us},',
            "        apart={",
        ]
        for op, points in m.apart.items():
            lines.append(f'            "{op}": (')
            for i in range(0, len(points), 5):
                told = ", ".join(f"({size:.0f}, {us:.6g})" for size, us in points[i : i + 5])
                lines.append(f"                {told},")
            lines.append("            ),")
        lines += ["        },", "        fused={"]
        for op, overlap in m.fused.items():
            lines.append(f'            "{op}": Overlap({", ".join(f"{x:.6g}" for x in overlap)}),')
        lines += ["        },", "        quick={"]
        for op, (us, gbps, most) in m.quick.items():
            lines.append(f'            "{op}": Quick({us:.6g}, {gbps:.6g}, {most}),')
        lines += ["        },", "    ),"]
    return "\n".join([*lines, ")", ""])

"""What a method costs, for its page in docs/grids/: formulas beside what is counted, and the other methods beside
it; run make_grids.py. A formula that does not give what is counted ends the script."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

from grid_costs import WORLDS, Row, mlp, predicted_ms, products_ms, rows, ways
from grid_counts import BUFFERS, EXAMPLES, FORMULAS, TOKENS, counted, letters, peaks, value

from tpkernels.grids import at_rest, summa


def received_table(name: str) -> str:
    """What a rank receives in each pass: formula, bytes, messages."""
    method, sizes = EXAMPLES[name].make(), EXAMPLES[name].sizes
    numbers, found = letters(method, sizes), counted(method, sizes)
    if set(found) != set(FORMULAS[name]):
        raise SystemExit(f"{name}: {set(found) ^ set(FORMULAS[name])} is moved, or has a formula, alone")
    lines = ["| pass | what | elements | GB | messages |", "|" + " --- |" * 5]
    for (kind, what), text in FORMULAS[name].items():
        elements, messages = found[kind, what]
        if value(text, numbers) != elements:
            raise SystemExit(f"{name}, {kind.value}, {what}: {text} is not {elements}")
        lines.append(f"| {kind.value} | {what} | {text} | {_gb(elements):.3f} | {_short(messages)} |")
    total = sum(_gb(elements) for elements, _ in found.values())
    all_messages = sum(number for _, number in found.values())
    lines.append(f"| **all** | | | **{total:.3f}** | **{_short(all_messages)}** |")
    return "\n".join(lines)


def _gb(elements: Fraction) -> float:
    return float(elements) * 2 / 1e9  # bf16


def _short(number: Fraction) -> str:
    return f"{float(number):.4g}"


def memory_table(name: str) -> str:
    """What a rank holds of the example: at rest, and in buffers."""
    method, sizes = EXAMPLES[name].make(), EXAMPLES[name].sizes
    numbers = letters(method, sizes)
    lines = ["| | blocks | million elements |", "|" + " --- |" * 3]
    for operand, dimensions in zip("XWY", ("mk", "kn", "mn"), strict=True):
        share = Fraction(numbers[operand.lower()], sizes.of(operand)[0] * sizes.of(operand)[1])
        text = f"{operand.lower()} = {dimensions}/{share.denominator}"
        lines.append(f"| {operand} at rest | {text} | {_millions(numbers[operand.lower()])} |")
    there, back = peaks(method, sizes)
    forth, several = BUFFERS[name]
    if value(forth, numbers) != there or max(value(text, numbers) for text in several) != back:
        raise SystemExit(f"{name}: buffers are {there} and {back}, and not {forth} and {several}")
    lines.append(f"| buffers, forward | {forth} | {_millions(there)} |")
    largest = " or ".join(several)
    lines.append(
        f"| buffers, backward | {largest}{', the largest' * (len(several) > 1)} | {_millions(back)} |"
    )
    return "\n".join(lines)


def _millions(elements: int | Fraction) -> str:
    return f"{float(elements) / 1e6:,.0f}"


def beside(name: str) -> str:
    """All methods on the example's ranks: an MLP, forward and backward."""
    example = EXAMPLES[name]
    world = example.make().grid.world
    lines = [
        "| method | GB received | messages | weights | inputs kept | buffers, forward | buffers, backward |",
        "|" + " --- |" * 7,
    ]
    for row in rows(world):
        totals: dict[str, Fraction] = defaultdict(Fraction)
        most = [0, 0]
        for method, sizes in mlp(row, TOKENS):
            for elements, messages in counted(method, sizes).values():
                totals["elements"] += elements
                totals["messages"] += messages
            at = at_rest(method, sizes, 0)
            totals["weights"] += at["W"]
            totals["inputs"] += at["X"]
            most = [max(pair) for pair in zip(most, peaks(method, sizes), strict=True)]
        cells = [
            row.name,
            f"{_gb(totals['elements']):.2f}",
            _short(totals["messages"]),
            *(_millions(n) for n in (totals["weights"], totals["inputs"], *most)),
        ]
        if row.name == example.name:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


KINDS = ("1-D", "1-D, fused", "2-D", "2.5-D", "3-D", "spatial-temporal")


def predicted(kind: str) -> str:
    """Milliseconds of one MLP, predicted, where the method has so many ranks; ``kind``: one of ``KINDS``."""
    order = [kind, *(other for other in KINDS if other != kind)]
    heads = ["ranks", "tokens", *(f"**{h}**" if h == kind else h for h in order), "*products alone*"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for world in WORLDS:
        by_kind: dict[str, list[tuple[Row, bool]]] = defaultdict(list)
        for name, row, fused in ways(world):
            by_kind[_kind(name)].append((row, fused))
        if kind not in by_kind:
            continue
        for tokens in (2048, TOKENS, 131072):
            cells = []
            for other in order:
                ms = [predicted_ms(row, tokens, fused) for row, fused in by_kind[other]]
                cells.append(f"{min(ms):.1f}" if ms else "")
            cells.append(f"{products_ms(world, tokens):.1f}")
            lines.append(f"| {world} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def orders() -> str:
    """2.5-D, predicted, as the ranks of a group are counted, and in the order of a plain mesh."""
    heads = ["ranks", "grid", "tokens", "depths outermost", "depth fastest"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for world in WORLDS:
        for row in rows(world):
            if _kind(row.name) != "2.5-D" or row.layers[0].grid.shape[0] == 1:
                continue
            grid = row.layers[0].grid
            mesh = summa(replace(grid, digits=()))
            for tokens in (2048, TOKENS, 131072):
                ms = [predicted_ms(r, tokens, False) for r in (row, Row("mesh", (mesh, mesh)))]
                lines.append(f"| {world} | {grid} | {tokens:,} | {ms[0]:.1f} | {ms[1]:.1f} |")
    return "\n".join(lines)


def _kind(name: str) -> str:
    return name.replace(", sequence parallel", "").partition(", depth")[0]

"""A plan as a picture: time and memory by layer, what each consists of. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpkernels.errors import ArgumentError, BackendError
from tpkernels.planner.plan import Line, Plan

__all__ = ["draw"]

# Colours that are told apart by colour-blind eyes, too.
_TIMES = (
    ("products, reads and writes", "#009e73"),
    ("messages that do not hide", "#e69f00"),
    ("sums over copies", "#cc79a7"),
    ("between operators", "#d55e00"),
)
_BYTES = (("parameters, gradients, optimizer", "#0072b2"), ("kept for backward", "#56b4e9"))


def draw(plan: Plan, path: str | Path) -> None:
    """Writes the picture; see ``Plan.picture``."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BackendError(
            "picture: it needs matplotlib, which is not installed; pip install matplotlib, or leave it out."
        ) from None
    bars = _bars(plan)
    names = ["embedding", *map(str, range(plan.model.layers)), "head"]
    figure = Figure(figsize=(max(6.0, 0.16 * len(bars) + 3), 6.0), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    times, memory = figure.subplots(2, 1, sharex=True)
    for axes, parts, of, unit in (
        (times, _TIMES, [_times(lines) for lines in bars], "ms, forward and backward"),
        (memory, _BYTES, [_gigabytes(lines) for lines in bars], "GB a rank"),
    ):
        bottom = [0.0] * len(bars)
        for number, (label, colour) in enumerate(parts):
            heights = [values[number] for values in of]
            axes.bar(range(len(bars)), heights, bottom=bottom, color=colour, label=label, width=0.8)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set_ylabel(unit)
        axes.legend(fontsize="small", frameon=False, loc="upper center", ncols=2)
        axes.set_ylim(0, 1.3 * max(bottom))
        axes.spines[["top", "right"]].set_visible(False)
    shown = [*range(0, len(names) - 1, max(1, len(names) // 20)), len(names) - 1]
    memory.set_xticks(shown, [names[k] for k in shown], rotation=90 if len(names) > 12 else 0)
    memory.set_xlabel("layer")
    figure.suptitle(
        f"{plan.model.name} on {plan.world} ranks of {plan.topology.name}: {plan.us / 1e3:.1f} ms, "
        f"{plan.peak_bytes / 1e9:.1f} GB a rank (predicted)",
        fontsize="medium",
    )
    try:
        svg = Path(path).suffix == ".svg"  # the same bytes for the same plan
        with rc_context({"svg.hashsalt": "tpkernels", "svg.fonttype": "none"}):
            canvas.figure.savefig(path, metadata={"Date": None} if svg else None)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"picture: cannot write {str(path)!r}: {error}.") from None


def _bars(plan: Plan) -> list[Sequence[Line]]:
    layers = [plan.lines[plan.layer(k)] for k in range(plan.model.layers)]
    return [plan.lines[:1], *layers, plan.lines[-1:]]


def _times(lines: Sequence[Line]) -> tuple[float, ...]:
    products = sum(line.cost.products_us for line in lines)
    copies = sum(line.cost.copies_us for line in lines)
    rest = sum(line.cost.us for line in lines) - products - copies
    return products / 1e3, rest / 1e3, copies / 1e3, sum(line.moved_us for line in lines) / 1e3


def _gigabytes(lines: Sequence[Line]) -> tuple[float, ...]:
    rest = sum(line.cost.parameter_bytes for line in lines)
    return rest / 1e9, sum(line.cost.kept_bytes for line in lines) / 1e9

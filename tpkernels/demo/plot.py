"""The loss plot: both curves above, their difference on a log axis below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_losses"]

_TP, _DENSE, _DIFF, _LIMIT, _TEXT = "#0b6e99", "#f28e2b", "#59595c", "#c0392b", "#333333"


def draw_losses(
    path: Path,
    *,
    title: str,
    losses: Sequence[float],
    dense_losses: Sequence[float] | None,
    heldout: float | None,
    limit: float,
    note: str = "",
) -> None:
    """Writes a PNG to ``path``.

    Losses are nats per byte, one per step; ``limit`` is the tolerance of their difference.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "axes.labelcolor": _TEXT,
        "text.color": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.8,
    }
    steps = list(range(1, len(losses) + 1))
    with plt.rc_context(style):
        rows = 2 if dense_losses is not None else 1
        ratios = [2.4, 1.0][:rows]
        figure, grid = plt.subplots(
            rows, 1, figsize=(8, 6 if rows == 2 else 4.4), sharex=True, squeeze=False, height_ratios=ratios
        )
        axes: list[Axes] = [row[0] for row in grid]
        top = axes[0]
        if dense_losses is not None:
            top.plot(
                steps, dense_losses, color=_DENSE, linewidth=4.5, alpha=0.55, label="unsharded, plain PyTorch"
            )
        top.plot(steps, losses, color=_TP, linewidth=1.4, label="tensor parallel")
        if heldout is not None:
            top.axhline(
                heldout, color=_TP, linewidth=1, linestyle=(0, (4, 3)), label=f"held-out text: {heldout:.3f}"
            )
        top.set_ylabel("loss (nats per byte)")
        top.set_xlim(1, max(2, len(losses)))
        top.legend(frameon=False, loc="upper right")
        top.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22 if note else 8)
        if note:
            top.text(0, 1.03, note, transform=top.transAxes, fontsize=9, color="#666666")
        if dense_losses is not None:
            _draw_difference(axes[1], steps, losses, dense_losses, limit)
        axes[-1].set_xlabel("step")
        figure.align_ylabels(axes)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_difference(
    axes: object, steps: list[int], tp: Sequence[float], dense: Sequence[float], limit: float
) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    differences = [abs(a - b) for a, b in zip(tp, dense, strict=True)]
    # A log axis has no zero: exact agreement is drawn at a floor below everything else and said in the label.
    floor = min([d for d in differences if d > 0] or [limit * 1e-6]) / 2
    zeros = sum(d == 0 for d in differences)
    label = f"difference of the two losses; exactly equal in {zeros} of {len(steps)} steps"
    axes.plot(steps, [max(d, floor) for d in differences], ".", markersize=3.5, color=_DIFF)
    axes.set_title(label, loc="left", fontsize=9, color="#666666")
    axes.axhline(limit, color=_LIMIT, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"tolerance {limit:g}", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", ha="right", va="top", fontsize=8.5, color=_LIMIT,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, max([limit, *differences]) * 4)
    axes.set_ylabel("|difference|")

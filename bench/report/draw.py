"""Drawing with matplotlib to SVG that takes its colours from the page, so that one picture serves light and dark.

Every colour of the page's palette has a stand-in here, a hexadecimal colour that nothing else uses; in the finished SVG
it is replaced by ``var(--name)``. Text stays text, in the page's font.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BenchError

__all__ = [
    "COLORS",
    "HALF",
    "WIDTH",
    "Picture",
    "color_of",
    "figure",
    "legend",
    "legend_lines",
    "painted",
    "ratio_axis",
    "require_matplotlib",
    "tidy",
]

# Units of the SVG, which are pixels where the page has its full width; matplotlib counts 72 to the inch.
WIDTH = 1080.0
HALF = 524.0
_UNITS = 72.0
_EDGE = 6.0  # between a legend and the border

_NAMES = (
    *("ink", "muted", "faint", "line", "grid", "panel", "noise"),
    *("ours", "ours2", "ours3", "ours4", "baseline", "peer1", "peer2", "peer3", "peer4"),
    *("gemm", "comm", "copy", "other"),
)
COLORS: dict[str, str] = {name: f"#fe{i:02x}{0xA0 + i:02x}" for i, name in enumerate(_NAMES, 1)}
_PEERS = {
    "symm_mem": "peer1",
    "cublasmp": "peer2",
    "symm_mem:two_shot": "peer3",
    "torch-tp": "peer1",
    "torch-tp-async": "peer2",
    "torch-tp-compiled": "peer3",
    "nccl+cublas-async": "peer4",
    "gloo+blas-async": "peer4",
}


def require_matplotlib() -> None:
    """BenchError with the command that installs it where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError(
            'the HTML report draws with matplotlib, which is not installed: pip install "tpkernels[bench]" (Markdown '
            "tables need nothing: leave out --out)."
        ) from None


def color_of(variant: str, ours: Sequence[str], baseline: str, others: Sequence[str] = ()) -> str:
    """A variant's colour: shades of one accent for ours, grey for the baseline, for a peer the same in every plot."""
    if variant in ours:
        index = ours.index(variant)
        return COLORS["ours" if index == 0 else f"ours{min(index + 1, 4)}"]
    if variant == baseline:
        return COLORS["baseline"]
    if variant in _PEERS:
        return COLORS[_PEERS[variant]]
    unknown = [v for v in others if v not in _PEERS and v not in ours and v != baseline]
    return COLORS[f"peer{4 - unknown.index(variant) % 4}" if variant in unknown else "peer4"]


@dataclass
class Picture:
    """A figure in the making. ``label`` is read out in place of the picture; ``tips`` are tooltips by SVG id."""

    figure: Any
    label: str
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Give an artist a tooltip."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text

    def svg(self, prefix: str) -> str:
        """The finished SVG element; ``prefix`` makes its ids unique in the page."""
        import matplotlib.pyplot as plt

        buffer = io.StringIO()
        with _style():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(self.figure)
        return _for_page(buffer.getvalue(), prefix, self.label, self.tips)

    def png(self, path: Path, background: str) -> None:
        """Write a PNG for a document; to be drawn and written inside :func:`painted`."""
        import matplotlib.pyplot as plt

        with _style():
            self.figure.savefig(
                path, format="png", dpi=2 * _UNITS, facecolor=background, metadata={"Software": None}
            )
        plt.close(self.figure)


@contextmanager
def painted(palette: Mapping[str, str]) -> Iterator[None]:
    """Real colours in place of the stand-ins, for pictures that are no part of a page."""
    stand_ins = dict(COLORS)
    COLORS.update({name: palette[name] for name in stand_ins})
    try:
        yield
    finally:
        COLORS.update(stand_ins)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    c = COLORS
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "tpkernels",
            "text.parse_math": False,
            "font.size": 12,
            "text.color": c["ink"],
            "axes.edgecolor": c["line"],
            "axes.facecolor": "none",
            "axes.labelcolor": c["muted"],
            "axes.labelsize": 12,
            "axes.titlesize": 13,
            "axes.titlelocation": "left",
            "axes.titlecolor": c["ink"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": c["grid"],
            "grid.linewidth": 1,
            "xtick.color": c["line"],
            "ytick.color": c["line"],
            "xtick.labelcolor": c["muted"],
            "ytick.labelcolor": c["muted"],
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "legend.frameon": False,
            "lines.solid_capstyle": "round",
            "figure.facecolor": "none",
        }
    ):
        yield


@contextmanager
def figure(
    label: str,
    height: float,
    *,
    width: float = WIDTH,
    rows: int = 1,
    columns: int = 1,
    margins: tuple[float, float, float, float] = (190, 20, 40, 46),
    **options: Any,
) -> Iterator[tuple[Picture, Any]]:
    """A new figure in the page's style: (picture, 2-D array of axes).

    Args:
        label: what the picture shows, for those who do not see it.
        height, width: in units of the SVG.
        rows, columns: of axes.
        margins: left, right, top, bottom, in units.
        options: for ``plt.subplots``; ``wspace`` and ``hspace`` go to the grid.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("svg", force=False)
    import matplotlib.pyplot as plt

    left, right, top, bottom = margins
    grid: dict[str, Any] = {
        "left": left / width,
        "right": 1 - right / width,
        "top": 1 - top / height,
        "bottom": bottom / height,
    }
    for name in ("wspace", "hspace", "width_ratios", "height_ratios"):
        if name in options:
            grid[name] = options.pop(name)
    with _style():
        fig, axes = plt.subplots(
            rows,
            columns,
            squeeze=False,
            figsize=(width / _UNITS, height / _UNITS),
            gridspec_kw=grid,
            **options,
        )
        yield Picture(fig, label), axes


def tidy(axis: Any, *, grid: str = "x") -> None:
    """Grid lines in one direction only (or "both"), and no line along the other axis."""
    if grid != "both":
        axis.grid(visible=False, axis="y" if grid == "x" else "x", which="both")
    if grid == "x":
        axis.spines["left"].set_visible(False)


def ratio_axis(
    axis: Any, low: float, high: float, *, which: str = "x", noise: float = 0.0, most: int = 8
) -> None:
    """A logarithmic axis of speed-ups with at most ``most`` ticks (0.8×), a line at 1 and the noise band around it."""
    low, high = min(low, 0.95) / 1.06, max(high, 1.05) * 1.12
    ticks = _ratio_ticks(low, high, most)
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}lim")(low, high)
    side = getattr(axis, f"{which}axis")
    side.set_ticks(ticks, labels=[f"{t:.3g}×" for t in ticks])
    side.set_ticks([], minor=True)
    line, span = (axis.axvline, axis.axvspan) if which == "x" else (axis.axhline, axis.axhspan)
    if noise > 0:
        span(1 / (1 + noise), 1 + noise, color=COLORS["noise"], lw=0, zorder=0)
    line(1, color=COLORS["muted"], lw=1.2, zorder=1)


def _ratio_ticks(low: float, high: float, most: int) -> list[float]:
    """1, and outward from it round numbers that are far enough apart for their labels."""
    gap = (high / low) ** (1 / most)
    up = [*(1 + i / 10 for i in range(1, 10)), 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100]
    down = [*(1 - i / 10 for i in range(1, 10)), 0.07, 0.05, 0.03, 0.02, 0.01]
    ticks = [1.0]
    for t in up:
        if t <= high and t >= ticks[-1] * gap:
            ticks.append(t)
    ticks.reverse()
    for t in down:
        if t >= low and t <= ticks[-1] / gap:
            ticks.append(t)
    return sorted(ticks)


def legend_lines(entries: Sequence[tuple[str, str, str]], width: float = WIDTH) -> int:
    """How many lines a legend takes in a picture of this width."""
    return math.ceil(_legend_width(entries) / (width - 2 * _EDGE))


def _legend_width(entries: Sequence[tuple[str, str, str]]) -> float:
    return sum(
        36 + 6.9 * len(text) for text, _, _ in entries
    )  # text is measured by the browser; this is close


def legend(axis: Any, entries: Sequence[tuple[str, str, str]], *, x: float = 0.0, y: float = 1.0) -> None:
    """A legend above an axis: (text, colour, kind), kind one of "bar", "line", "dashed", "dot", "tick".

    It moves to the left, then takes more lines, where it would not fit. ``x``, ``y``: lower left, in parts of the axis.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def handle(color: str, kind: str) -> Any:
        if kind == "bar":
            return Patch(facecolor=color, edgecolor="none")
        if kind in ("line", "dashed"):
            return Line2D([], [], color=color, lw=2, ls="--" if kind == "dashed" else "-")
        marker = {"dot": "o", "tick": "|"}[kind]
        return Line2D(
            [],
            [],
            color=color,
            ls="none",
            marker=marker,
            ms=9 if kind == "tick" else 6,
            mew=2 if kind == "tick" else 0,
        )

    width = float(axis.figure.get_size_inches()[0]) * _UNITS
    place = axis.get_position()
    lines = legend_lines(entries, width)
    needed = min(_legend_width(entries), width - 2 * _EDGE)
    left = width * (place.x0 + x * place.width)
    left = max(_EDGE, min(left, width - _EDGE - needed))
    axis.legend(
        [handle(color, kind) for _, color, kind in entries],
        [text for text, _, _ in entries],
        loc="lower left",
        bbox_to_anchor=((left / width - place.x0) / place.width, y),
        ncols=max(1, math.ceil(len(entries) / max(1, lines))),
        borderaxespad=0.3,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.5,
        labelcolor=COLORS["muted"],
        fontsize=12,
    )


def _for_page(svg: str, prefix: str, label: str, tips: Mapping[str, str]) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"\s*font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"font: ([^;\"']*?px) [^;\"]*", r"font: \1 var(--font)", svg)  # how older matplotlib says it
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    head = f'<svg {view[0]} role="img" aria-label="{html.escape(label, quote=True)}">'
    svg = head + svg[svg.index(">") + 1 :]
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    for name, text in tips.items():
        opening = f'<g id="{prefix}-{name}">'
        svg = svg.replace(opening, f"{opening}<title>{html.escape(text)}</title>", 1)
    for name, stand_in in COLORS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)

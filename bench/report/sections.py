"""What the page shows of each suite: pictures with a line on how to read them, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..links import links_of
from ..records import Results, Row
from . import charts_gemm, charts_link, charts_model, charts_overlap, charts_sweep
from .analysis import group_cases, noise_floor
from .draw import Picture
from .provenance import provenance
from .table import Table
from .tables import suite_tables, suites_of
from .tables_gemm import describe_noise, is_product, split
from .tables_overlap import OP_TITLES, ranks

__all__ = ["Part", "Pictures", "Section", "Shown", "sections"]


@dataclass
class Shown:
    """A picture of the page. ``half``: two fit beside each other."""

    svg: str
    title: str
    caption: str = ""
    half: bool = False


@dataclass
class Part:
    """Pictures under one heading; ``note`` is the noise floor."""

    title: str
    shown: list[Shown] = field(default_factory=list)
    note: str = ""


@dataclass
class Section:
    """One suite."""

    id: str
    title: str
    intro: str
    origin: str
    parts: list[Part] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


_TITLES = {
    "link": (
        "Link",
        "What the machine can do: the ceilings of everything below, and the constants of the models.",
    ),
    "gemm": (
        "GEMM",
        "Our products beside the vendor's, in turns in one run. A speed-up is its time over ours; grey is noise.",
    ),
    "sweep": (
        "Sweep",
        "Shapes sampled log-uniformly from the domain of the Stream-K paper, our kernel forced. Each dot is a shape.",
    ),
    "quantize": (
        "Quantisation",
        "FP8 data and scales of a matrix, of its transposed, or of both, beside a copy of as many bytes.",
    ),
    "overlap": (
        "Overlap",
        "A product and the collective beside it. A speed-up is the time of the two one after the other over that of "
        "the fused operation; what is not hidden behind the product is exposed communication.",
    ),
    "layer": ("Layers", "Forward and backward of parallel layers, and the memory that they take."),
    "train": ("Training", "A whole training step of the demo model."),
}


class Pictures:
    """Turns pictures into SVG with ids that are unique in the page."""

    def __init__(self) -> None:
        self.count = 0

    def shown(
        self, picture: Picture | None, title: str, caption: str = "", *, half: bool = False
    ) -> list[Shown]:
        """Nothing if there is no picture."""
        if picture is None:
            return []
        self.count += 1
        return [Shown(picture.svg(f"f{self.count}"), title, caption, half)]


def sections(results: Results, prefix: str = "", pictures: Pictures | None = None) -> list[Section]:
    """Sections of the suites that have rows. Results of one card; ``prefix`` makes ids unique between cards."""
    drawn = pictures or Pictures()
    rows = results.latest()
    found = []
    for suite in suites_of(rows):
        title, intro = _TITLES[suite]
        used = {row.run for row in rows if row.suite == suite}
        origin = provenance([h for h in results.headers if h.run in used])
        parts = [part for part in _PARTS[suite](rows, drawn) if part.shown]
        tables = suite_tables(rows, suite, links_of(results))
        found.append(Section(f"{prefix}{suite}", title, intro, origin, parts, tables))
    return found


def _link(rows: Sequence[Row], drawn: Pictures) -> list[Part]:
    parts = []
    for groups in reversed(list(split(group_cases(rows, "link"), lambda g: g.world).values())):
        own = [row for g in groups for row in g.rows.values() if row.role != "noise"]
        part = Part(ranks(groups[0].world))
        part.shown += drawn.shown(
            charts_link.bandwidth_curves(own),
            "Transports",
            "All ranks at once. Solid: copies by so many SMs; the copy engine takes none.",
        )
        part.shown += drawn.shown(
            charts_link.beside_bars(own),
            "A GEMM beside each transport",
            "No dependency between the two: what carrying data costs the product.",
        )
        parts.append(part)
    return parts


def _gemm(rows: Sequence[Row], drawn: Pictures) -> list[Part]:
    parts = []
    for dtype, of_dtype in split(group_cases(rows, "gemm"), lambda g: g.dtype).items():
        noise = noise_floor(of_dtype)
        groups = [group for group in of_dtype if is_product(group)]
        if not groups:
            continue
        part = Part(dtype, note=describe_noise(noise))
        sets = charts_gemm.sets_of(groups)
        limits = charts_gemm.bar_limits([g for of_set in sets.values() for g in of_set])
        baseline = groups[0].baseline_name or "the baseline"
        for name, of_set in sets.items():
            picture = charts_gemm.speedup_bars(of_set, noise, name, limits)
            part.shown += drawn.shown(picture, f"Against {baseline}: {name}", half=True)
        part.shown += drawn.shown(
            charts_gemm.roofline(groups, rows),
            "Roofline",
            "Rate against arithmetic intensity, under what memory and matrix units reach.",
            half=True,
        )
        swept = [g for g in groups if g.first.shape_set == "sweep"]
        if swept:
            part.shown += drawn.shown(
                charts_gemm.sweep_scatter(swept, noise),
                f"Sweep: {len(swept)} log-sampled shapes against {baseline}",
                "Each dot is a shape. Right: how the speed-ups are distributed.",
            )
        part.shown += drawn.shown(
            charts_gemm.stream_k_waves(groups, noise),
            "Stream-K against data-parallel with the same tile",
            "Where the last wave of tiles is nearly empty, dealing out iterations in place of tiles pays most.",
        )
        parts.append(part)
    return parts


def _sweep(rows: Sequence[Row], drawn: Pictures) -> list[Part]:
    parts = []
    for dtype, groups in split(group_cases(rows, "sweep"), lambda g: g.dtype).items():
        noise = noise_floor(groups)
        part = Part(dtype, note=describe_noise(noise))
        part.shown += drawn.shown(
            charts_sweep.speedups(groups, noise),
            "Speed-up",
            "Dashed: where the paper calls products compute-bound. Grey: noise.",
        )
        part.shown += drawn.shown(
            charts_sweep.utilisation(groups, rows), "Utilisation", "Part of what the matrix units reach."
        )
        part.shown += drawn.shown(charts_sweep.waves_scatter(groups, noise), "By waves of tiles")
        part.shown += drawn.shown(
            charts_sweep.model_scatter(groups), "The cost model", "What it said of the plans that ran."
        )
        parts.append(part)
    return parts


def _overlap(rows: Sequence[Row], drawn: Pictures) -> list[Part]:
    parts = []
    machines = split(group_cases(rows, "overlap"), lambda g: (-g.world, g.dtype))
    for groups in sorted(machines.values(), key=lambda part: -part[0].world):
        noise = noise_floor(groups)
        part = Part(f"{ranks(groups[0].world)}, {groups[0].dtype}", note=describe_noise(noise))
        for op, of_op in split(groups, lambda g: g.first.op).items():
            title = OP_TITLES.get(op, op)
            part.shown += drawn.shown(
                charts_overlap.speedup_by_rows(of_op, noise),
                f"{title}: speed-up against M",
                f"Against {groups[0].baseline_name}; M counts the rows of all ranks.",
            )
            few = charts_overlap.representative(of_op)
            of_all = (
                "" if len(few) == len(of_op) else f" {len(few)} of {len(of_op)} shapes; the table has all."
            )
            part.shown += drawn.shown(
                charts_overlap.anatomy(few, noise),
                f"{title}: where the time goes",
                f"Left: speed-up. Right: parts of the time of {groups[0].baseline_name}.{of_all}",
            )
        parts.append(part)
    return parts


def _models(
    suite: str, chart: Callable[..., Picture | None], title: str, caption: str
) -> Callable[..., list[Part]]:
    def make(rows: Sequence[Row], drawn: Pictures) -> list[Part]:
        parts = []
        for groups in split(group_cases(rows, suite), lambda g: (g.world, g.dtype)).values():
            noise = noise_floor(groups)
            part = Part(f"{ranks(groups[0].world)}, {groups[0].dtype}", note=describe_noise(noise))
            part.shown += drawn.shown(chart(groups, noise), title, caption.format(groups[0].baseline_name))
            parts.append(part)
        return parts

    return make


_PARTS: dict[str, Callable[[Sequence[Row], Pictures], list[Part]]] = {
    "link": _link,
    "gemm": _gemm,
    "sweep": _sweep,
    "quantize": lambda rows, drawn: [],
    "overlap": _overlap,
    "layer": _models(
        "layer",
        charts_model.layer_bars,
        "Time and memory",
        "Forward and backward, in parts of the time of {}.",
    ),
    "train": _models("train", charts_model.train_bars, "Tokens a second", "In parts of what {} reaches."),
}

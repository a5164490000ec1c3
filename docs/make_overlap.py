"""Draws docs/overlap.md: how path "fused" works. Needs matplotlib and a built tpkernels.

PYTHONPATH=. python docs/make_overlap.py     writes the pictures, their captions and the tables of the page

Orders of tiles and of sends are those of ``_host``, offsets of words those of csrc/host/protocol.hpp, sizes those of
tpkernels.comm.workspace. The timelines are a model: what waits for what is the code's, how long things take is made up.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpkernels import _extensions
from tpkernels.comm import workspace

_host = _extensions.host()
FOLDER = Path(__file__).resolve().parent
PICTURES = FOLDER / "overlap"
PAGE = FOLDER / "overlap.md"
SOURCES = FOLDER.parent / "csrc"
THEMES = ("light", "dark")

SHARDS = (300, 420, 180, 380)  # rows of each rank; no multiples of the tile
WORLD = len(SHARDS)
TILE_ROWS = 128


# ---- Words.


class Word(NamedTuple):
    """Words of a page. ``many``: how many there are in a row, as protocol.hpp names it."""

    constant: str
    name: str
    many: str
    writer: str
    when: str
    order: str
    reader: str


WORDS = (
    Word("kArrived", "arrived(i)", "kMaxChunks",
         "a copy stream of the sender, from its GPU, or its product, where that stores rows; own: my enter kernel",
         "behind the rows of chunk i (gather); behind chunk c of my rows, from rank s, where I have P chunks and "
         "i = s * P + c (scatter)",
         "a copy of 4 bytes, of the sender's epoch, after the copy of the rows on the same stream; a product: as "
         "`counter`, then `st.release.sys`; own chunks: a plain store, stream order",
         "`ld.acquire.sys`: the product's loading thread"),
    Word("kEntered", "entered(p)", "kMaxRanks", "the enter kernel of rank p, from its GPU",
         "rank p has come to this call", "`st.release.sys`", "`ld.acquire.sys`: thread p of my enter kernel"),
    Word("kEpoch", "epoch()", "1", "my enter kernel", "when all peers have come to this call", "`st.release.sys`",
         "what comes behind on my streams: the product, the copies of the flag, collect"),
    Word("kTicket", "ticket()", "1", "my product, a thread of each cluster; my enter kernel: 0",
         "a cluster takes its next work (scatters in turns whose tiles are not split)", "`atom.relaxed.gpu`",
         "the same threads"),
    Word("kBells", "bell(c)", "kMaxChunks", "1: my product, 0: my copy stream",
         "1: all rows of chunk c are in the send buffer; 0: taken", "`st.release.sys`; `cuStreamWriteValue32`",
         "`cuStreamWaitValue32` (== 1) on my copy stream"),
    Word("kCounters", "counter(c)", "kMaxChunks", "my product, a thread of each CTA",
         "how much of the rows of chunk c is stored; who completes it sets 0 and rings the bell, or, where the product "
         "stores rows in peers' memory, writes `arrived` and `sums` there",
         "`__threadfence_system`, then `atom.acq_rel.gpu`; the 0 is a plain store", "the same threads"),
    Word("kSums", "sums(c)", "kMaxChunks", "a copy stream of the owner, from its GPU, or its product",
         "behind the sums of chunk c (all-reduce)", "as `arrived`",
         "`ld.acquire.sys`: a thread of each CTA of the collect kernel"),
)  # fmt: skip


def constants(file: str = "host/protocol.hpp") -> dict[str, int]:
    """Every ``constexpr`` number of a header."""
    text = (SOURCES / file).read_text()
    found = re.findall(r"constexpr (?:int|size_t|int64_t) (k\w+) = ([^;]+);", text)
    plain = {name: re.sub(r"int64_t\{(\d+)\}", r"\1", value) for name, value in found}
    return {
        name: int(eval(value, {}, {})) for name, value in plain.items() if re.fullmatch(r"[\d\s<]+", value)
    }


def span(word: Word) -> tuple[int, int]:
    """First and last of these words."""
    c = constants()
    count = int(word.many) if word.many.isdigit() else c[word.many]
    return c[word.constant], c[word.constant] + count - 1


def words_text() -> str:
    lines = [
        "| words | name | written by | when | order of memory | read by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for word in WORDS:
        first, last = span(word)
        place = str(first) if first == last else f"{first} to {last}"
        lines.append(
            f"| {place} | `{word.name}` | {word.writer} | {word.when} | {word.order} | {word.reader} |"
        )
    return "\n".join(lines)


# ---- Sizes.


def sizes_text() -> str:
    """Memory of a rank, of one call of 8 ranks."""
    m, k, n = 8192, 8192, 8192
    even, uneven = [m // 8] * 8, [m // 8 * 2] + [m // 8 * 6 // 7] * 6 + [m - m // 8 * 2 - m // 8 * 6 // 7 * 6]
    rows = [
        ("gather", f"[M, K], K = {k}, 2 bytes", workspace.gather_bytes(m, k, 2)),
        ("scatter", f"8 slots of {m // 8} rows, N = {n}, 2 bytes", workspace.scatter_bytes(even, n, 2)),
        ("scatter", f"the same, one shard of {uneven[0]} rows", workspace.scatter_bytes(uneven, n, 2)),
        ("sum", f"8 slots of {m // 8} rows and the sums [M, N], 2 bytes", workspace.sum_bytes(even, n, 2)),
    ]
    lines = ["| workspace | buffer | needed, MiB | allocated, MiB |", "| --- | --- | --: | --: |"]
    for kind, what, size in rows:
        needed, allocated = ((x - workspace.PAGE_BYTES) / 2**20 for x in (size, workspace.grown(size)))
        lines.append(f"| `{kind}` | {what} | {needed:.0f} | {allocated + workspace.PAGE_BYTES / 2**20:.0f} |")
    return "\n".join(lines)


def chunks_text() -> str:
    c, pushes = constants(), constants("host/pushes.hpp")
    return (
        f"A shard travels in chunks, numbered shard after shard: multiples of {pushes['kChunkRows']} rows (but the "
        f"last of a shard), of at least {pushes['kLeastChunkBytes'] >> 20} MiB unless the\nwhole shard is less, at "
        f"most {c['kMaxChunks']} of all ranks together; a group has at most {c['kMaxRanks']} ranks. What departs: at "
        f"most {pushes['kMost']} of a rank, of at least {pushes['kLeastDepartingBytes'] >> 20} MiB."
    )


# ---- Orders.


class TileRow(NamedTuple):
    """A row of tiles. ``place``: in the order of the rank, 0 first. ``waits``: ranks whose rows are in it."""

    begin: int
    end: int
    place: int
    shards: tuple[int, ...]


def begins() -> list[int]:
    return [sum(SHARDS[:r]) for r in range(WORLD + 1)]


def owner(row: int) -> int:
    return max(r for r in range(WORLD) if begins()[r] <= row)


def gather_rows(rank: int) -> list[TileRow]:
    """Rows of tiles of a gather, in the order in which the rank takes them."""
    tile = _host.TileShape(TILE_ROWS, 128, 64)
    order, _ = _host.make_arrival_order(list(SHARDS), rank, 128, 1, tile)
    found = []
    for place in range(len(order)):
        m = order.at(place)[1]
        shards = _host.shards_of_tile_row(list(SHARDS), m, TILE_ROWS)
        found.append(
            TileRow(m * TILE_ROWS, min((m + 1) * TILE_ROWS, sum(SHARDS)), place, tuple(range(*shards)))
        )
    return found


def scatter_rows(rank: int) -> list[TileRow]:
    """Of a scatter: rows of tiles begin anew with every rank (csrc/kernels/sm90a/placement.hpp)."""
    tiles = [-(-rows // TILE_ROWS) for rows in SHARDS]
    order, _ = _host.make_departure_order(
        [n * TILE_ROWS for n in tiles], rank, 128, 1, _host.TileShape(TILE_ROWS, 128, 64)
    )
    found = []
    for place in range(len(order)):
        m = order.at(place)[1]
        r = max(r for r in range(WORLD) if sum(tiles[:r]) <= m)
        begin = begins()[r] + (m - sum(tiles[:r])) * TILE_ROWS
        found.append(TileRow(begin, min(begin + TILE_ROWS, begins()[r + 1]), place, (r,)))
    return found


def gather_receivers(rank: int) -> list[int]:
    """Whom a rank sends its shard to, in order: the one that reads it first is first."""
    peers = [p for p in range(WORLD) if p != rank]
    return sorted(peers, key=lambda p: _host.arrival_class(rank, p, WORLD))


def scatter_receivers(rank: int) -> list[int]:
    """Whom a rank sends partial rows to, in the order in which it computes them."""
    peers = [p for p in range(WORLD) if p != rank]
    return sorted(peers, key=lambda p: _host.departure_class(p, rank, WORLD))


# ---- Timelines.

ENTER, OWN_COPY, PUSH, PRODUCT, SUM = 0.5, 0.5, 2.0, 3.0, 0.7
CALLED = (0.9, 0.3, 3.4, 0.6)  # when each rank comes to the call, with all before it done
LANES = ("main", "copy 0", "copy 1")


@dataclass(frozen=True)
class Step:
    """What a rank does on one of its streams. ``of``: the rank whose rows it is about, -1 for none."""

    rank: int
    lane: str  # of LANES
    what: str  # "enter", "wait", "own", "product", "sum", "bell" or "push"
    begin: float
    end: float
    of: int = -1
    to: int = -1


def entered() -> float:
    """When all ranks have told each other that they are here."""
    return max(CALLED) + ENTER


def enter_steps(rank: int) -> list[Step]:
    told = CALLED[rank] + ENTER
    return [Step(rank, "main", "enter", CALLED[rank], told), Step(rank, "main", "wait", told, entered())]


def push_lane(nth: int) -> str:
    """A scatter's pushes take the two copy streams in turn."""
    return LANES[1 + (nth + 1) % 2]


def gather_timeline() -> list[Step]:
    """One call of all ranks: a product of a shard begins when the shard is there."""
    steps = [step for rank in range(WORLD) for step in enter_steps(rank)]
    arrived = {}
    for rank in range(WORLD):
        now = entered()
        for peer in gather_receivers(rank):
            steps.append(Step(rank, LANES[1], "push", now, now + PUSH, rank, peer))
            arrived[peer, rank] = now = now + PUSH
    for rank in range(WORLD):
        now = entered() + OWN_COPY
        steps.append(Step(rank, "main", "own", entered(), now, rank, rank))
        for shard in sorted(range(WORLD), key=lambda s: _host.arrival_class(s, rank, WORLD)):
            begin = max(now, arrived.get((rank, shard), 0.0))
            steps.append(Step(rank, "main", "wait", now, begin, shard))
            steps.append(Step(rank, "main", "product", begin, begin + PRODUCT, shard))
            now = begin + PRODUCT
    return [step for step in steps if step.end > step.begin]


def scatter_timeline() -> list[Step]:
    """One call of all ranks: a push begins when its bell rings, a sum when everything is there."""
    steps = [step for rank in range(WORLD) for step in enter_steps(rank)]
    arrived: dict[int, list[float]] = {rank: [] for rank in range(WORLD)}
    computed = {}
    for rank in range(WORLD):
        now = link = entered()
        free = dict.fromkeys(LANES[1:], now)
        for nth, shard in enumerate(
            sorted(range(WORLD), key=lambda s: _host.departure_class(s, rank, WORLD))
        ):
            steps.append(Step(rank, "main", "product", now, now + PRODUCT, shard))
            now += PRODUCT
            if shard != rank:
                lane, begin = push_lane(nth), max(link, now)
                steps.append(Step(rank, lane, "bell", free[lane], begin, shard))
                steps.append(Step(rank, lane, "push", begin, begin + PUSH, shard, shard))
                free[lane] = link = begin + PUSH
                arrived[shard].append(link)
        computed[rank] = now
    for rank in range(WORLD):
        there = max(computed[rank], *arrived[rank])
        steps.append(Step(rank, "main", "wait", computed[rank], there, rank))
        steps.append(Step(rank, "main", "sum", there, there + SUM, rank))
    return [step for step in steps if step.end > step.begin]


# ---- Waits.

# What has to be done before what, of a rank and of any peer ("peer ..."). n: this call. "here": enter has told it.
WAITS = {
    "gather": (
        ("join n - 1", "here n"), ("here n", "all here n"), ("peer here n", "all here n"), ("all here n", "pushes n"),
        ("all here n", "product n"), ("peer pushes n", "product n"), ("pushes n", "join n"), ("product n", "join n"),
    ),
    "scatter": (
        ("join n - 1", "here n"), ("here n", "all here n"), ("peer here n", "all here n"),
        ("all here n", "others' tiles n"), ("others' tiles n", "pushes n"), ("others' tiles n", "own tiles n"),
        ("peer pushes n", "own tiles n"), ("pushes n", "join n"), ("own tiles n", "join n"),
    ),
}  # fmt: skip


# ---- The page.


def captions() -> dict[str, str]:
    """Picture -> caption."""
    straddlers = [row for row in gather_rows(0) if len(row.shards) > 1]
    listed = ", ".join(str(row.begin // TILE_ROWS) for row in sorted(straddlers))
    tiles = len(gather_rows(0)), len(scatter_rows(0))
    model = "Widths are made up, order and waits are the code's."
    shown = " + ".join(str(rows) for rows in SHARDS)
    return {
        "page": "A rank's allocation: a page of 32-bit words, then the buffer. Colours: who writes.",
        "gather": (
            "A gather of 4 ranks; rank 2 is late. Three streams a rank: the caller's, and two of copies. Colour: "
            f"whose shard. Arrows: what rank 0 waits for. {model}"
        ),
        "scatter": (
            "A reduce-scatter of 4 ranks; rank 2 is late. Colour: who owns the rows. Arrows: what rank 0 adds. "
            + model
        ),
        "gather_order": (
            f"Gather: {shown} rows, tiles of {TILE_ROWS} rows, hence {tiles[0]} rows of tiles. Number: in which order "
            f"each rank takes them. Two colours: a tile waits for both shards (rows of tiles {listed})."
        ),
        "scatter_order": (
            f"Scatter: the same rows. Rows of tiles begin anew with every rank, hence {tiles[1]} of them, and no tile "
            "has rows of two ranks. Number: in which order each rank computes them."
        ),
        "waits": "Who waits for whom, of a rank and a peer. All arrows go forward.",
    }


def shown(name: str) -> Any:
    """What a picture is made of."""
    if name == "page":
        return [(word, span(word)) for word in WORDS], constants()
    if name in ("gather", "scatter"):
        return gather_timeline() if name == "gather" else scatter_timeline()
    if name == "waits":
        return WAITS
    return [(gather_rows if name == "gather_order" else scatter_rows)(rank) for rank in range(WORLD)]


def digest(name: str) -> str:
    """Changes when what a picture shows does: written into its description, so that a test sees an old picture."""
    return hashlib.sha256(repr((shown(name), captions()[name])).encode()).hexdigest()[:16]


def picture_file(name: str, theme: str) -> Path:
    return PICTURES / (f"{name}.svg" if theme == "light" else f"{name}-dark.svg")


def figure_text(name: str) -> str:
    text = captions()[name]
    light, dark = (picture_file(name, theme).relative_to(FOLDER) for theme in THEMES)
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img src="{light}" alt="{text}">\n</picture>\n\n*{text}*'
    )


def page_text(old: str) -> str:
    """The page with every generated part written anew."""
    parts = {"words": words_text, "sizes": sizes_text, "chunks": chunks_text}

    def part(match: re.Match[str]) -> str:
        name = match[1]
        text = figure_text(name.removeprefix("figure ")) if name.startswith("figure ") else parts[name]()
        return f"<!-- made: {name} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- made: ([^>]*?) -->\n.*?<!-- end -->", part, old, flags=re.S)


def main() -> None:
    """Writes the pictures and the generated parts of the page."""
    import draw_overlap  # beside this file: matplotlib only for who draws

    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        for name in captions():
            draw_overlap.draw(name, theme, picture_file(name, theme))
    PAGE.write_text(page_text(PAGE.read_text()))


if __name__ == "__main__":
    main()

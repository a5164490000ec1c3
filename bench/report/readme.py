"""Tables inside README.md, between markers, made from result files.

    <!-- bench: gemm square bfloat16 from bench/results/FILE.jsonl variants=cublas,streamk -->
    ...
    <!-- bench: end -->

Between the words ``bench:`` and ``from`` stands a name as :func:`.tables.select` takes it, then a file relative to the
README (several with commas), then options of ``select``. ``python -m bench report --readme README.md`` fills them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import BenchError
from ..links import links_of
from ..records import Results, load
from .analysis import by_card
from .provenance import provenance
from .tables import select, suite_of

__all__ = ["Block", "check_readme", "find_blocks", "render_readme"]

_MARKER = re.compile(r"<!--\s*bench:\s*(?P<text>.*?)\s*-->", re.S)


@dataclass(frozen=True)
class Block:
    """A block of a README: what its marker asks for, and where its body is."""

    name: str
    files: tuple[str, ...]
    options: tuple[str, ...]
    line: int
    start: int  # of the body, behind the line end of the marker
    end: int  # of the body, before the end marker


def find_blocks(text: str, where: str = "README") -> list[Block]:
    """All blocks; BenchError for a marker without its other half, or one that is not understood."""
    blocks = []
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        is_end = marker["text"] == "end"
        if is_end == (opened is None):
            what = "an end without a beginning" if is_end else "a block inside another; its end is missing"
            raise BenchError(f"{where}:{line}: {what} (<!-- bench: {marker['text']} -->).")
        if not is_end:
            opened = marker
            continue
        assert opened is not None
        blocks.append(_block(opened, marker, text, where))
        opened = None
    if opened is not None:
        line = text.count("\n", 0, opened.start()) + 1
        raise BenchError(f"{where}:{line}: the block has no end; expected <!-- bench: end --> below it.")
    return blocks


def _block(opened: re.Match[str], closed: re.Match[str], text: str, where: str) -> Block:
    line = text.count("\n", 0, opened.start()) + 1
    words = re.fullmatch(r"(?P<name>.+?)\s+from\s+(?P<file>\S+)(?P<options>(\s+\S+=\S+)*)", opened["text"])
    if words is None:
        raise BenchError(
            f"{where}:{line}: expected <!-- bench: NAME from FILE [variants=A,B] [cases=PATTERN] -->, "
            f"got <!-- bench: {opened['text']} -->."
        )
    if text[opened.end() : opened.end() + 1] != "\n":
        raise BenchError(f"{where}:{line}: the marker must end its line.")
    options = tuple(words["options"].split())
    return Block(
        words["name"], tuple(words["file"].split(",")), options, line, opened.end() + 1, closed.start()
    )


def render_readme(path: Path) -> tuple[str, list[Block]]:
    """The text of a README with all its blocks filled, and the blocks that differ from what is in the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror}).") from None
    parts, changed, position = [], [], 0
    for block in find_blocks(text, str(path)):
        body = _body(block, path)
        if body != text[block.start : block.end]:
            changed.append(block)
        parts += [text[position : block.start], body]
        position = block.end
    return "".join([*parts, text[position:]]), changed


def check_readme(path: Path) -> list[str]:
    """A sentence for each block that is not what its file gives; for a test."""
    _, changed = render_readme(path)
    return [
        f"{path}:{b.line}: the table {b.name!r} is not what {', '.join(b.files)} gives; "
        f"run: python -m bench report --readme {path.name}"
        for b in changed
    ]


def _body(block: Block, path: Path) -> str:
    results = load(*(path.parent / name for name in block.files))
    if len(by_card(results)) > 1:
        raise BenchError(
            f"{path}:{block.line}: {', '.join(block.files)} hold results of several cards; name one card's."
        )
    try:
        tables = select(results.latest(), block.name, block.options, links_of(results))
    except BenchError as error:
        raise BenchError(f"{path}:{block.line}: {error}") from None
    parts = []
    for table in tables:
        title = f"**{table.title}**\n\n" if len(tables) > 1 else ""
        caption = f"{table.caption}\n\n" if table.caption else ""
        parts.append(title + caption + table.markdown(heading=""))
    return "\n\n".join([*parts, _origin(results, block)]) + "\n"


def _origin(results: Results, block: Block) -> str:
    suite = suite_of(block.name)
    used = {row.run for row in results.latest() if row.suite == suite}
    return f"{provenance([h for h in results.headers if h.run in used])}."

"""Shapes of ``tpk tune``: from words, files and models. Pure, apart from reading a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpkernels.errors import ArgumentError
from tpkernels.tune import models

MOST = 10_000  # shapes of one run
_MOST_EXTENT = 1 << 30
ROWS = "1,16,64,128,2048,8192"  # of a model's products, unless they are given
GRAMMAR = (
    "MxNxK such as 4096x4096x4096, or M=..,N=..,K=..; each of the three a number, a..b (doubled from a on, and b), or "
    "a..b:step"
)


class Shape(NamedTuple):
    m: int
    n: int
    k: int
    name: str = ""

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        return f"{self.name} {size}" if self.name else size


def of(words: Sequence[str], model: str | None, tp: int, rows: str | None) -> list[Shape]:
    """Every shape once, in order. A word is a shape, or a file with a shape on each line (# begins a comment).

    Raises:
        ArgumentError: a word that is neither; nothing, or too much, to tune.
    """
    found: list[Shape] = []
    for word in words:
        found += _of_word(word)
    if model is not None:
        each = [m for part in (rows or ROWS).split(",") for m in _extents(part.strip(), "--rows")]
        found += [Shape(m, n, k, what) for what, n, k in models.weights(model, tp) for m in each]
    elif rows is not None:
        raise ArgumentError(
            "--rows: it goes with --model; write rows of other shapes as M, such as 1..128x8192x8192."
        )
    unique = list({shape[:3]: shape for shape in reversed(found)}.values())[::-1]
    if not unique:
        raise ArgumentError(f"SHAPES: expected at least one, or --model; a shape is {GRAMMAR}.")
    if len(unique) > MOST:
        raise ArgumentError(f"SHAPES: expected at most {MOST} shapes, got {len(unique)}; give ranges a step.")
    return unique


def _of_word(word: str) -> list[Shape]:
    if re.fullmatch(r"[0-9.:]+([xX][0-9.:]+){2}", word):
        return _crossed(re.split("[xX]", word), word)
    named = dict(part.partition("=")[::2] for part in re.split(r"[,\s]+", word.strip()))
    if {name.upper() for name in named} == {"M", "N", "K"} and len(named) == 3:
        upper = {name.upper(): text for name, text in named.items()}
        return _crossed([upper[name] for name in "MNK"], word)
    path = Path(word.removeprefix("@"))
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError, ValueError):
        raise ArgumentError(
            f"SHAPES: expected a shape or a file of shapes, got {word!r}; a shape is {GRAMMAR}."
        ) from None
    shapes: list[Shape] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            if Path(text).exists():
                raise ArgumentError(f"{text!r} is a file")
            shapes += _of_word(text)
        except ArgumentError:
            raise ArgumentError(
                f"SHAPES: line {number} of {path}: expected a shape, got {text!r}; a shape is {GRAMMAR}."
            ) from None
    return shapes


def _crossed(texts: Sequence[str], word: str) -> list[Shape]:
    ranges = [_extents(text, f"SHAPES: {word!r}") for text in texts]
    if len(ranges[0]) * len(ranges[1]) * len(ranges[2]) > MOST:
        raise ArgumentError(
            f"SHAPES: expected at most {MOST} shapes, got more from {word!r}; give ranges a step."
        )
    return [Shape(m, n, k) for m, n, k in itertools.product(*ranges)]


def _extents(text: str, where: str) -> list[int]:
    """``7``; ``1..128``: 1, 2, 4 .. 128; ``64..256:64``: 64, 128, 192, 256."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?", text)
    low, high, step = (int(group) if group else None for group in match.groups()) if match else (None,) * 3
    high = low if high is None else high
    if low is None or high is None or not 1 <= low <= high < _MOST_EXTENT or step == 0:
        raise ArgumentError(
            f"{where}: expected a number from 1 to {_MOST_EXTENT - 1}, a..b or a..b:step with a <= b, got {text!r}."
        )
    if step is not None:
        if (high - low) // step >= MOST:
            raise ArgumentError(
                f"{where}: expected at most {MOST} numbers, got more from {text!r}; raise the step."
            )
        return list(range(low, high + 1, step))
    doubled = [low]
    while doubled[-1] * 2 < high:
        doubled.append(doubled[-1] * 2)
    return doubled if doubled[-1] == high else [*doubled, high]

"""docs/grids/*.md: snippets run on ranks as they stand, and print and raise what the pages say."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, NamedTuple

import pytest
from pages import snippets

from tpkernels.testing import RankContext, RankPool


class Error(NamedTuple):
    """A call that raises, on so many ranks."""

    code: str
    world: int
    text: str


def errors_of(page: str) -> list[Error]:
    found = re.findall(r"^>>> (.*?)  # on (\d+) ranks\n(.*)$", "".join(snippets(page, "")), re.M)
    assert found, f"docs/{page} shows no error"
    return [Error(code, int(world), text) for code, world, text in found]


def run_page(ctx: RankContext, code: list[str], errors: list[Error]) -> str:
    """What the snippets print; ``errors`` are raised with what they have left."""
    names: dict[str, Any] = {"group": ctx.group}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for part in code:
            exec(compile(part, "page", "exec"), names)
    for error in errors:
        with pytest.raises(Exception) as caught:
            eval(error.code, names)
        assert f"{type(caught.value).__name__}: {caught.value}" == error.text
    if "down" in names and "layer" in names:  # 3-D: y = x + down(act(up(x)))
        assert names["up"].output_layout == names["down"].input_layout != names["up"].input_layout
    return out.getvalue()


@pytest.mark.parametrize(
    "page, world, count",
    [("1d", 4, 1), ("2d", 4, 1), ("2p5d", 8, 1), ("3d", 8, 2), ("spatial_temporal", 4, 1)],
)
def test_snippets(many_ranks: RankPool, page: str, world: int, count: int) -> None:
    name = f"grids/{page}.md"
    code, errors = snippets(name), errors_of(name)
    assert len(code) == count
    shown = [block for block in snippets(name, "") if not block.startswith(">>>")]
    here = [error for error in errors if error.world == world]
    printed = many_ranks.run(run_page, code, here, world=world)
    assert [printed[1]] == shown, "what rank 1 prints"
    elsewhere = [error for error in errors if error not in here]
    for other in {error.world for error in elsewhere}:
        imports = ["import torch\nfrom tpkernels.nn import grids"]
        many_ranks.run(run_page, imports, [e for e in elsewhere if e.world == other], world=other)

"""What the snippets of docs/grids/ print, and the errors of sizes that do not fit; run make_grids.py.

``tests/spawn/test_grid_pages.py`` runs them on ranks and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from grid_costs import programs

from tpkernels.errors import TpkError
from tpkernels.grids import (
    Grid,
    Method,
    Sizes,
    at_rest,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    peak,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.nn.grids import Traffic, take_block
from tpkernels.nn.grids.linear import _check_features

ROWS, IN, OUT = 32, 64, 256


class Calls(NamedTuple):
    """A page's layer, the ranks of its snippet, a number of ranks that is no such grid, and rows that do not fit."""

    layer: str
    options: str
    world: int
    method: Method
    make: Callable[[int], Grid]
    other: int
    rows: int = ROWS + 1


CALLS = {
    "2d": Calls("Linear2D", "", 4, summa(grid_2d(4)), grid_2d, 8),
    "2p5d": Calls("Linear2p5D", "depth=2, ", 8, summa(grid_2p5d(8, 2)), lambda n: grid_2p5d(n, 2), 4, 30),
    "3d": Calls("Linear3D", "", 8, three_d(grid_3d(8)), grid_3d, 4, 30),
    "spatial_temporal": Calls(
        "LinearSpatialTemporal",
        "",
        4,
        spatial_temporal(grid_spatial_temporal(4)),
        grid_spatial_temporal,
        8,
    ),
}


def printed(name: str, position: int = 1) -> str:
    """What the snippet prints on a rank: counted, not run."""
    method, sizes = CALLS[name].method, Sizes(ROWS, IN, OUT)
    there = at_rest(method, sizes, position)
    shapes = [list(method.home(o).block(position).shape(*sizes.of(o))) for o in "XWY"]
    assert [a * b for a, b in shapes] == [there[o] for o in "XWY"]
    traffic = Traffic()
    for program in programs(method):
        for exchange in program.exchanges:
            for m in exchange.messages:
                if m.source != m.target:
                    elements = m.elements(*sizes.of(exchange.operand))
                    if m.source == position:
                        traffic.sent_messages += 1
                        traffic.sent_bytes += 4 * elements
                    elif m.target == position:
                        traffic.received_bytes += 4 * elements
        traffic.peak_elements = max(traffic.peak_elements, peak(program, sizes, position).elements)
    return f"rank {position} x {shapes[0]} weight {shapes[1]} y {shapes[2]}\n{traffic}"


def errors(name: str) -> str:
    """Calls that do not fit, and what they raise."""
    calls = CALLS[name]
    method, world = calls.method, calls.world

    def linear(features: int) -> str:
        return f"grids.{calls.layer}({IN}, {features}, {calls.options}group=group)"

    tries: list[tuple[str, int, Callable[[], object]]] = [
        (linear(OUT), calls.other, lambda: calls.make(calls.other)),
        (linear(OUT - 1), world, lambda: _check_features(calls.layer, method, IN, OUT - 1)),
        (
            f"layer.local_input(torch.ones({calls.rows}, {IN}))",
            world,
            lambda: take_block(torch.ones(calls.rows, IN), method.home("X"), 1),
        ),
    ]
    return "\n".join(f">>> {code}  # on {ranks} ranks\n{_raised(call)}" for code, ranks, call in tries)


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except TpkError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was wrong")

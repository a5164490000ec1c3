"""Writes what docs/planner.md prints, and its picture. Needs a built tpkernels, and matplotlib for the picture.

PYTHONPATH=. python docs/make_planner.py

It is what ``tpk plan`` prints, and predictions beside committed results of ``bench layer``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tpkernels as tpk
from tpkernels.planner import MODELS, TOPOLOGIES
from tpkernels.planner.costs import Costs
from tpkernels.planner.model import LAYER
from tpkernels.planner.strategies import strategies
from tpkernels.tune import cli

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "planner.md"
PICTURE = FOLDER / "planner.svg"

# By the name behind ``<!-- made:``.
COMMANDS = {
    "host": "tpk plan llama8b --world 8 --topology h200x8",
    "hosts": "tpk plan gpt3 --world 64 --batch 32",
    "strong": "tpk plan llama70b --sweep strong --worlds 16..512 --batch 64 --share-optimizer",
    "weak": "tpk plan gpt3 --sweep weak --worlds 8..8192 --share-optimizer",
}

# Of layers on two GPUs.
RESULTS = [
    FOLDER.parent / "bench" / "results" / f"2026-11-29_h200x2_{name}.jsonl"
    for name in ("layer", "layer_large")
]
PARTS = {"mlp": ("up", "activation", "down"), "attention": ("qkv", "core", "out"), "block": LAYER}
FUSED = {"ours": True, "nccl+cublas": False}


def measured() -> Iterator[tuple[str, str, dict[str, Any], float]]:
    """Part, variant, sizes and microseconds of every layer that was measured."""
    for path in RESULTS:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["kind"] == "row" and row["status"] == "ok" and row["variant"] in FUSED:
                yield row["op"], row["variant"], row["params"], row["us"]["p50"]


def predicted_us(part: str, variant: str, sizes: dict[str, Any]) -> float:
    """Of a part of one layer on two GPUs of a host, without the ways between operators: there are none."""
    model = replace(MODELS[sizes["model"]], layers=1, sequence=sizes["seq"], batch=sizes["batch"])
    costs = Costs(model, replace(TOPOLOGIES["h200x8"], fused=FUSED[variant]), 2)
    (strategy,) = (s for s in strategies(2, ["1d-sp"]) if s.ranks == 2)
    return sum(costs.operator(name, strategy).us for name in PARTS[part])


def measured_table() -> str:
    """Measured and predicted, by layer."""
    found: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {}
    for part, variant, sizes, us in measured():
        ways = found.setdefault((sizes["model"], part, sizes["m"]), {})
        ways[variant] = us, predicted_us(part, variant, sizes)
    lines = [
        "| layer | tokens | ours | predicted | | by hand | predicted | |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for (model, part, tokens), ways in found.items():
        cells = [f"{us / 1e3:.2f} | {told / 1e3:.2f} | {told / us:.2f}x" for us, told in map(ways.get, FUSED)]
        lines.append(f"| {part} {model} | {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def printed(command: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(shlex.split(command)[1:])
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def page_text(text: str) -> str:
    """The page with all that is made in its place."""
    contents = {name: f"```\n$ {command}\n{printed(command)}\n```" for name, command in COMMANDS.items()}
    for name, content in {**contents, "measured": measured_table()}.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{PAGE.name}: expected one place for {name!r}, found {count}")
    return text


def main() -> None:
    """Writes everything."""
    PAGE.write_text(page_text(PAGE.read_text()))
    tpk.plan(MODELS["gpt3"].with_batch(32), 64, "h200").picture(PICTURE)


if __name__ == "__main__":
    main()

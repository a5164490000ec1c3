"""Writes what docs/planner.md prints, and its picture. Needs a built tpkernels, and matplotlib for the picture.

PYTHONPATH=. python docs/make_planner.py

All of it is what ``tpk plan`` prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import tpkernels as tpk
from tpkernels.planner import MODELS
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
    for name, command in COMMANDS.items():
        content = f"```\n$ {command}\n{printed(command)}\n```"
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

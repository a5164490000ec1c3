"""Finding and running Nsight's command-line tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import BenchError

__all__ = ["find", "newest", "output_of"]


def find(tool: str, variable: str, folders: Iterable[str], *, package: str) -> str:
    """Path of ``tool``: what the environment variable says, else on PATH, else the newest in the usual folders.

    Args:
        tool: "nsys" or "ncu".
        variable: name of the environment variable.
        folders: patterns (as of glob, absolute) of folders where it is installed.
        package: what to install, for the error.

    Raises:
        BenchError: it is nowhere, or the variable does not name a program.
    """
    said = os.environ.get(variable, "")
    if said:
        if os.path.isfile(said) and os.access(said, os.X_OK):
            return said
        raise BenchError(
            f"{variable}: expected the path of the program {tool}, got {said!r}, which is not a program."
        )
    on_path = shutil.which(tool)
    if on_path:
        return on_path
    found = newest(p / tool for pattern in folders for p in Path("/").glob(pattern.lstrip("/")))
    if found:
        return found
    raise BenchError(
        f"{tool}: not found on PATH, nor in {', '.join(folders)}; install {package}, or set {variable} to "
        "the program."
    )


def newest(candidates: Iterable[Path]) -> str:
    """Of the paths that are programs, that with the highest version number in it ("": there is none)."""
    programs = [p for p in candidates if p.is_file() and os.access(p, os.X_OK)]
    return str(max(programs, key=_version)) if programs else ""


def _version(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", str(path.parent))], str(path)


def output_of(command: Sequence[str], *, timeout: float = 300) -> str:
    """Standard output of a command; BenchError with its last lines if it fails or takes too long (seconds)."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]}: did not end within {timeout:.0f} s: {' '.join(command)}") from None
    except OSError as error:
        raise BenchError(f"{command[0]}: cannot be run ({error.strerror}).") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        raise BenchError(f"{command[0]}: exit code {done.returncode} from {' '.join(command)}: {said}")
    return done.stdout

"""Builds the extensions in place: short lines of progress here, every command in build/build.log.

    python .ci/build.py

The same as `python setup.py build_ext --inplace`, whose compiler lines are pages long.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"^\[(\d+/\d+)\] .*? -c (?:-c )?(\S+)")
EXTENSION = re.compile(r"building '(?:\w+\.)*(\w+)' extension")
# Left to the log: commands, distutils' chatter, the report of ptxas, torch's remark that there is no GPU.
QUIET = re.compile(
    r"(\S*/)?(g\+\+|c\+\+|gcc|clang|nvcc) |copying |running |building |creating |warning: |ptxas info |"
    r"\s+\d+ bytes stack frame|ninja: no work|.*No CUDA runtime is found"
)


def shorten(line: str) -> str | None:
    """The line to show for a line of the build's output, or None to leave it to the log."""
    match = COMMAND.match(line)
    if match:
        source = match[2]
        return f"  [{match[1]}] {source.removeprefix(str(ROOT) + '/')}"
    return None if QUIET.match(line) else line.rstrip("\n")


def shares(began: list[tuple[str, float]], end: float) -> str:
    """What each extension took, from when each began, in seconds: "_C 60 s, _C_sm80 90 s"."""
    ends = [start for _, start in began[1:]] + [end]
    return ", ".join(f"{name} {stop - start:.0f} s" for (name, start), stop in zip(began, ends, strict=True))


def main() -> int:
    """Runs the build and returns its exit status."""
    start = time.time()
    began: list[tuple[str, float]] = []
    log = ROOT / "build" / "build.log"
    log.parent.mkdir(exist_ok=True)
    print(f"building the extensions (log: {log.relative_to(ROOT)})", flush=True)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if match := EXTENSION.match(line):
                began.append((match[1], time.time()))
            shown = shorten(line)
            if shown is not None:  # a command is shown when it has ended
                print(
                    shown,
                    f" ({time.time() - start:.0f} s)" if COMMAND.match(line) else "",
                    sep="",
                    flush=True,
                )
    status = process.wait()
    end = time.time()
    took = f": {shares(began, end)}" if began else ""
    print(f"build {'done' if status == 0 else 'FAILED'} in {end - start:.0f} s{took}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())

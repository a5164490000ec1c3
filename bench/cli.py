"""The command line. Parsing imports no torch."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import BenchError, Terminated, check_known

__all__ = ["main"]

_INTERRUPTED = 130
_DESCRIPTION = """\
Measures tpkernels and every other implementation side by side.

  link      what the machine can do: copies, pushes, pulls, flags, matrix peak
  gemm      the matrix product on one GPU
  sweep     1,000 shapes of it, quickly: the domain of the Stream-K paper
  overlap   all-gather + product, product + reduce-scatter, product + all-reduce
  layer     MLP, attention and whole transformer blocks, forward and backward
  train     tokens a second of the demo's model
  report    tables and an HTML page from result files      (report --help)
  compare   two result files, case by case                 (compare --help)
  fit       constants of the Hopper cost model from rows   (fit --help)
  fit-paths constants of path choice from rows             (fit-paths --help)
  fit-auto  what auto wins by choosing between cuBLAS and our kernel   (fit-auto --help)
  host      what a call costs the host, beside plain torch (host --help)
  list      the suites, or the cases and variants of one: list gemm
"""
_EXAMPLES = """\
examples:
  python -m bench gemm                              one GPU
  python -m bench overlap --gpus 4 --model llama70b --rows 2048,8192
  python -m bench all --out results.jsonl           everything, on all GPUs; again with --resume after an interruption
  python -m bench gemm --device cpu                 try it without a GPU
  torchrun --nproc-per-node 8 -m bench overlap      ranks started by torchrun
  python -m bench report results.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m bench`` and ``tpk-bench``; returns the exit code.

    0: measured; 1: some variant of ours failed, or ``compare`` found a slow-down; 2: bad input, in a sentence;
    130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Ends the ranks and completes the file, as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, lambda *_: _raise_terminated())
    try:
        return _dispatch(arguments)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `bench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_terminated() -> None:
    raise Terminated


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "report":
        from . import report

        given = _report_parser().parse_args(arguments[1:])
        return report.run(
            given.files,
            out=given.out,
            markdown=given.markdown,
            readme=given.readme,
            figures=given.figures,
            stdout=sys.stdout,
        )
    if command == "compare":
        from . import compare

        given = _compare_parser().parse_args(arguments[1:])
        return compare.run(
            given.before,
            given.after,
            threshold=given.threshold,
            relative_to=given.relative_to,
            stdout=sys.stdout,
        )
    if command == "fit":
        from . import fit

        given = _fit_parser().parse_args(arguments[1:])
        return fit.run(given.files, folds=not given.no_folds, stdout=sys.stdout)
    if command == "fit-paths":
        from . import fit_paths

        given = _fit_paths_parser().parse_args(arguments[1:])
        return fit_paths.run(given.files, quick=given.quick, write=given.write, stdout=sys.stdout)
    if command == "fit-auto":
        from . import fit_auto

        return fit_auto.run(_fit_auto_parser().parse_args(arguments[1:]).files, stdout=sys.stdout)
    if command == "host":
        from . import host_time

        given = _host_parser().parse_args(arguments[1:])
        return host_time.run(
            given.ranks,
            given.ops,
            given.backend,
            path=given.path,
            seconds=given.seconds,
            profile=given.profile,
            stdout=sys.stdout,
        )
    from . import start

    if command == "list":
        arguments = [*(arguments[1:] or ["all"]), "--list"]
    given = measure_parser().parse_args(arguments)
    return start.run(given, arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in _names(text))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"expected a part of several such as 3/10, got {text}")
    return part


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
    return value


def _suites(text: str) -> tuple[str, ...]:
    from . import suites

    names = tuple(suites.SUITES) if text == "all" else _names(text)
    for name in names or ("",):
        check_known(
            "suite",
            name,
            [*suites.names(), "all", "report", "compare", "fit", "fit-paths", "fit-auto", "host", "list"],
        )
    return names


def measure_parser() -> argparse.ArgumentParser:
    """Options of the suites."""
    parser = argparse.ArgumentParser(
        prog="bench",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("suites", metavar="SUITE", type=_suites, help="a suite, several with commas, or all")

    what = parser.add_argument_group("what to measure")
    add = what.add_argument
    add("--set", dest="sets", metavar="NAME[,NAME]", type=_names, default=(), help="sets of shapes")
    add(
        "--model",
        dest="models",
        metavar="NAME[,NAME]",
        type=_names,
        default=(),
        help="models whose shapes count",
    )
    add("--rows", metavar="M[,M]", type=_numbers, default=(), help="values of M")
    add("--op", dest="ops", metavar="NAME[,NAME]", type=_names, default=(), help="operations")
    add(
        "--dtype",
        dest="dtypes",
        metavar="NAME[,NAME]",
        type=_names,
        default=(),
        help="bfloat16, float16, ...",
    )
    add(
        "--case",
        dest="cases",
        metavar="PATTERN",
        action="append",
        default=[],
        help="cases whose name holds this, or matches it with * and ?; may be repeated",
    )
    add(
        "--variant",
        "--variants",
        "--peer",
        dest="variants",
        metavar="NAME[,NAME]",
        type=_names,
        default=(),
        help="implementations, beside the baseline",
    )
    add("--skip-peer", dest="skip", metavar="NAME[,NAME]", type=_names, default=(), help="leave these out")
    add(
        "--tiles",
        metavar="NAME[,NAME]",
        type=_names,
        nargs="?",
        const=("all",),
        default=(),
        help="gemm, sweep: every schedule (sweep: the best of each) on each of these tiles: hopper, portable, cpu, or\n"
        "names (default: the device's); few rounds, unless --rounds is given",
    )
    add(
        "--sweep",
        "--shapes",
        dest="sweep",
        metavar="N",
        type=_positive,
        default=0,
        help="gemm, sweep: N shapes sampled from [128, 8192]^3 (default of sweep: 1000)",
    )
    add("--part", metavar="I/N", type=_part, default=(1, 1), help="sweep: the I-th of N parts of the shapes")
    add("--seed", metavar="S", type=int, default=0, help="of the sweep, the data and the order")
    add("--small", action="store_true", help="tiny shapes (always on CPU)")
    add("--list", action="store_true", help="show cases and variants and measure nothing")

    where = parser.add_argument_group("where")
    add = where.add_argument
    add(
        "--gpus",
        metavar="N[,N]",
        type=_numbers,
        default=(),
        help="ranks of the suites that communicate, one run each (default: all GPUs)",
    )
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU")

    how = parser.add_argument_group("how")
    add = how.add_argument
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="result file (default: bench-results/DATE_GPUxN.jsonl); appended to",
    )
    add("--resume", action="store_true", help="leave out what FILE has already")
    add(
        "--retry",
        action="store_true",
        help="with --resume: measure again what was wrong, timed out, crashed or raised",
    )
    add("--quick", action="store_true", help="half the time, wider error bars")
    add("--rounds", metavar="N", type=_positive, default=0, help="exactly N timed rounds")
    add(
        "--time-limit",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="a rank without a sign of life for so long is ended (default: %(default)s)",
    )
    add("--budget", metavar="SECONDS", type=_seconds, default=0.0, help="begin no case after this time")
    add("--commit", metavar="TEXT", default="", help="recorded where git is absent")
    add("--no-live", action="store_true", help="plain lines in place of the live table")

    profile = parser.add_argument_group("profile one case and variant in place of measuring")
    add = profile.add_argument
    add("--profile", choices=["kineto", "nsys", "ncu"])
    add("--steps", metavar="N", type=_positive, default=5, help="calls to record (default: %(default)s)")
    add(
        "--kernel", metavar="REGEX", default="", help="ncu: the kernels to look at (default: matrix products)"
    )
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench report",
        description="Tables, and a page with plots, of result files and trace summaries.",
        epilog="With none of the four options the tables are printed and the page is written beside the first file.",
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the HTML page there")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the tables there")
    parser.add_argument("--readme", metavar="FILE", type=Path, help="fill the tables between markers in FILE")
    parser.add_argument(
        "--figures", metavar="DIR", type=Path, help="write the sweep's pictures there, PNG, light and dark"
    )
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench compare",
        description="Ratio of B to A for each case; exit code 1 if B is slower past the threshold.",
    )
    parser.add_argument("before", metavar="A", type=Path)
    parser.add_argument("after", metavar="B", type=Path)
    parser.add_argument(
        "--threshold",
        metavar="FRACTION",
        type=float,
        default=0.05,
        help="slow-down that counts, if it is past the noise too (default: %(default)s)",
    )
    parser.add_argument(
        "--relative-to",
        metavar="VARIANT",
        help="compare speeds relative to this variant of the same file: for files of different machines",
    )
    return parser


def _fit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench fit",
        description="Constants of the Hopper cost model from rows of suite gemm (best with --tiles).",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument(
        "--no-folds", action="store_true", help="no cross-validation, which takes four more fits"
    )
    return parser


def _fit_paths_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench fit-paths",
        description="Constants by which path 'auto' chooses, from rows of suite overlap.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument(
        "--quick",
        metavar="BYTES",
        type=int,
        help="calls of up to so many bytes were made by the kernel of low latency (default: as in the table)",
    )
    parser.add_argument("--write", action="store_true", help="into tpkernels/comm/machines.py")
    return parser


def _fit_auto_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench fit-auto",
        description="What path 'auto' would win or lose by rules that choose between cuBLAS and our kernel.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    return parser


def _host_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench host",
        description="What an eager call of ours costs the calling thread, beside the torch calls that it stands for.",
    )
    add = parser.add_argument
    add("--ranks", metavar="N[,N]", type=_numbers, default=(1, 2), help="default: 1,2")
    add("--op", dest="ops", metavar="NAME[,NAME]", type=_names, default=(), help="operations (default: all)")
    add(
        "--backend",
        choices=["gloo", "nccl", "fake"],
        default="gloo",
        help="of the ranks (default: %(default)s); nccl: on GPUs; fake: one process on CPU that sends nothing",
    )
    add("--path", default="auto", help="of our operations (default: %(default)s)")
    add("--seconds", metavar="S", type=_seconds, default=1.0, help="for each number (default: %(default)s)")
    add("--profile", metavar="OP", default="", help="cProfile's table of one operation in place of times")
    return parser

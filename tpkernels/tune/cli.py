"""``tpk`` (or ``python -m tpkernels``): tune products, fit the cost model, see what is known and what would run; plan
how a model is cut over ranks."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

from tpkernels import _extensions
from tpkernels.errors import ArgumentError, TpkError
from tpkernels.ops.explain import explain
from tpkernels.planner import cli as planner_cli
from tpkernels.tune import asked, calibrate, local, models, shapes, show, store
from tpkernels.tune.shapes import Shape
from tpkernels.tune.store import Entry

EXIT_USAGE = 2
_STOPPED = {"tune": "; what was finished is kept", "calibrate": "; nothing was kept"}


class _Parser(argparse.ArgumentParser):
    """Errors are sentences."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message.rstrip('.')}; {self.prog} --help tells more.", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, or 2 after a printed sentence about what it was given."""
    given = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.formatwarning = lambda message, *_: f"tpk: {message}\n"
            given.run(given)
    except (TpkError, OSError) as error:
        print(f"tpk {given.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"stopped{_STOPPED.get(given.command, '')}.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tpk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=what, description=what[0].upper() + what[1:]
        )
        return added

    one = command("tune", "time products once and remember the fastest plan of each")
    one.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help=f"{shapes.GRAMMAR}; or a file with one on each line"
    )
    one.add_argument("--model", help=f"products of a model's layers: {', '.join(models.MODELS)}")
    one.add_argument("--tp", type=int, default=1, help="ranks that share the model's weights (1)")
    one.add_argument("--rows", help=f"M of the model's products ({shapes.ROWS})")
    _device_option(one)
    asked.add_options(one)
    one.add_argument("--again", action="store_true", help="time what is known already, too")
    one.add_argument("--plain", action="store_true", help="no progress bar")
    one.set_defaults(run=_tune)

    one = command(
        "calibrate", "fit the cost model's constants to this machine, and tell how well it predicts"
    )
    _device_option(one)
    one.add_argument(
        "--kernel",
        default="",
        help="portable: of the portable CUDA kernel, in each of its precisions (that of bf16 on the device)",
    )
    one.add_argument("--dry-run", action="store_true", help="keep nothing")
    one.add_argument("--plain", action="store_true", help="no progress bar")
    one.set_defaults(run=_calibrate)

    one = command("cache", "see, or delete, what was tuned")
    one.add_argument("--show", action="store_true", help="list every product (the default: files only)")
    one.add_argument("--clear", action="store_true", help="delete the files")
    one.set_defaults(run=_cache)

    one = command("explain", "tell what a product would run, and why")
    one.add_argument("shapes", nargs="+", metavar="SHAPE", help=shapes.GRAMMAR)
    one.add_argument("--path", default="auto", help="as in tpkernels.matmul (auto)")
    _device_option(one)
    asked.add_options(one)
    one.set_defaults(run=_explain)

    one = command("plan", "cut a model over ranks: the method, grid and copies of every operator")
    planner_cli.add_options(one)
    one.set_defaults(run=planner_cli.run)

    one = command("status", "tell which parts of the package are loaded, and why others are not")
    one.set_defaults(run=lambda given: print(*_extensions.status().values(), sep="\n"))
    return parser


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (a GPU if there is one)")


def _device(given: argparse.Namespace) -> torch.device:
    text = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device: expected cpu, cuda or cuda:N, got {text!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"--device: expected one of {torch.cuda.device_count()} GPUs, got {text!r}.")
    if device.type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def _tune(given: argparse.Namespace) -> None:
    device = _device(given)
    dtype = asked.dtype_of(given, device)
    todo = shapes.of(given.shapes, given.model, given.tp, given.rows)
    for shape in todo:  # options first
        asked.call_of(shape, given, dtype, torch.device("meta"))
    choice = asked.default_of(given, dtype, device)
    if not choice.open:
        option = "--dtype" if given.fp8 is None else "--fp8"
        raise ArgumentError(f"{option}: there is nothing to choose: {choice.why}.")
    cache = local.store_of(device)
    print(f"{len(todo)} products of {_kind(given, dtype)} on {cache.stamp['device']}")
    rows = []
    with show.Progress("tuning", len(todo), bar=not given.plain) as progress:
        for shape in todo:
            progress.at(str(shape))
            try:
                call = asked.call_of(shape, given, dtype, device)
                before = local.counts.timed
                entry = local.entry_of(call, choice.gemm, again=given.again)
            except torch.OutOfMemoryError:
                progress.step(f"{shape}: no memory for its operands")
                continue
            if entry is None:
                progress.step(f"{shape}: another process is timing it")
                continue
            known = "" if local.counts.timed > before else " (known)"
            progress.step(f"{shape}: {entry.what} {show.us(entry.us)} us{known}")
            rows.append(_row(shape, entry))
    library = choice.gemm
    print()
    print(
        show.table(
            ["shape", "model's choice", "predicted us", "us", "tuned", "us", f"{library} us", "gain"], rows
        )
    )
    print(f"\ngain: {library}'s time over the tuned one's")
    print(
        f"kept in {cache.path}; TPK_AUTOTUNE=1 or read uses it"
        if cache.path
        else "there is no folder to keep it in"
    )


def _kind(given: argparse.Namespace, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if given.fp8 is not None:
        return f"FP8, {given.fp8}, to {name}"
    return name if given.groups is None else f"{name} in {given.groups} groups"


def _row(shape: Shape, e: Entry) -> list[str]:
    gain = f"{e.library_us / e.us:.2f}x" if e.library_us and e.us else "-"
    times = [show.us(e.predicted_us), show.us(e.model_us)]
    return [str(shape), e.model, *times, e.what, show.us(e.us), show.us(e.library_us), gain]


def _calibrate(given: argparse.Namespace) -> None:
    device = _device(given)
    if given.kernel not in ("", "portable"):
        raise ArgumentError(f"--kernel: expected portable, or to leave it out, got {given.kernel!r}.")
    portable = given.kernel == "portable"
    todo = calibrate.products(calibrate.kind_of(device, portable=portable))
    name = local.store_of(device).stamp["device"]
    print(f"{len(todo)} products by several plans each, on {name}, and {calibrate.FITS} fits to their times")
    with show.Progress("calibrating", len(todo) + calibrate.FITS, bar=not given.plain) as progress:
        found = calibrate.calibrate(device, portable=portable, done=progress.step)
    print()
    rows = [
        [name, f"{score.median:.1%}", f"{score.p90:.1%}", f"{score.regret:.3f}", f"{score.worst:.3f}"]
        for name, score in (
            ("in use", found.before),
            ("fitted", found.after),
            ("fitted, on others", found.left_out),
        )
    ]
    print(show.table(["constants", "median error", "p90", "regret", "worst"], rows))
    print(
        f"\n{found.samples} plans. error: |log(predicted / measured)|; regret: time of the plan that is predicted to "
        "be the fastest,\nover that of the fastest; on others: on products that the fit had not seen\n"
    )
    changed = [
        [name, f"{found.was[name]:.6g}", f"{value:.6g}"]
        for name, value in found.constants.items()
        if value != found.was[name]
    ]
    print(show.table(["constant", "in use", "fitted"], changed))
    if given.dry_run:
        print("\nnothing was kept")
    elif not found.is_better:
        print("\nnot kept: the constants in use predict products that a fit has not seen as well")
    else:
        calibrate.keep(found, device)
        print(f"\nkept in {local.store_of(device).path}; TPK_AUTOTUNE=1 or read plans with it")


def _cache(given: argparse.Namespace) -> None:
    if given.clear and given.show:
        raise ArgumentError("--show and --clear: expected one of them, got both.")
    if given.clear:
        gone = store.clear()
        print(*(f"deleted {path}" for path in gone), sep="\n") if gone else print(
            "there was nothing to delete"
        )
        return
    where = store.folder()
    files = store.files()
    if not files:
        print(
            f"nothing is tuned in {where}" if where else "there is no folder for a cache: set TPK_CACHE_DIR"
        )
    for path in files:
        entries, constants, wrong = store.parse(path.read_bytes(), None)
        fitted = f"; constants of {', '.join(constants)} fitted" if constants else ""
        print(f"{path}: {len(entries)} products{fitted}{f'; {wrong}' if wrong else ''}")
        if given.show and entries:
            rows = [
                [key, e.what, show.us(e.us), show.us(e.library_us), show.us(e.model_us)]
                for key, e in entries.items()
            ]
            print(show.table(["product", "taken", "us", "library us", "model's plan us"], rows))


def _explain(given: argparse.Namespace) -> None:
    device = _device(given)
    dtype = asked.dtype_of(given, device)
    for shape in shapes.of(given.shapes, None, 1, None):
        op, arguments, options = asked.as_called(
            asked.call_of(shape, given, dtype, torch.device("meta")), given
        )
        print(explain(op, *arguments, path=given.path, **options))

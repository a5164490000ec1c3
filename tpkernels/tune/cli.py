"""``tpk`` (or ``python -m tpkernels``): tune products, fit the cost model, see what is known and what would run."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tpkernels import _extensions
from tpkernels.errors import ArgumentError, TpkError
from tpkernels.ops import _checks, _gemm, _paths
from tpkernels.ops.explain import explain
from tpkernels.tune import calibrate, local, models, shapes, show, store
from tpkernels.tune.local import Call
from tpkernels.tune.shapes import Shape
from tpkernels.tune.store import Entry

EXIT_USAGE = 2
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _checks.DTYPES} | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Which dimension of a and of b lies contiguous, in y = x w^T, dx = dy w and dw = dy^T x of a linear layer.
LAYOUTS = {"forward": ("k", "k"), "dgrad": ("k", "o"), "wgrad": ("o", "o")}
EPILOGUES = ("bias", "activation", "residual", "gate", "into")


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
        print("stopped; what was finished is kept.", file=sys.stderr)
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
    _product_options(one)
    one.add_argument("--again", action="store_true", help="time what is known already, too")
    one.add_argument("--plain", action="store_true", help="no progress bar")
    one.set_defaults(run=_tune)

    one = command(
        "calibrate", "fit the cost model's constants to this machine, and tell how well it predicts"
    )
    _device_option(one)
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
    _product_options(one)
    one.set_defaults(run=_explain)

    one = command("status", "tell which parts of the package are loaded, and why others are not")
    one.set_defaults(run=lambda given: print(*_extensions.status().values(), sep="\n"))
    return parser


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (a GPU if there is one)")


def _product_options(parser: argparse.ArgumentParser) -> None:
    _device_option(parser)
    parser.add_argument(
        "--dtype", help="of the operands: bf16, fp16, fp32, fp64 (bf16 on a GPU, fp32 on the CPU)"
    )
    parser.add_argument(
        "--layout", default="forward", help=f"products of a linear layer: {', '.join(LAYOUTS)} (forward)"
    )
    parser.add_argument(
        "--epilogue",
        default="",
        help=f"what follows the product, joined by +: {', '.join(EPILOGUES)} (an fp32 tensor that it is added to)",
    )


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


def _dtype(given: argparse.Namespace, device: torch.device) -> torch.dtype:
    name = given.dtype or ("bf16" if device.type == "cuda" else "fp32")
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArgumentError(f"--dtype: expected one of {', '.join(DTYPES)}, got {name!r}.")
    return dtype


def _call(shape: Shape, given: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Call:
    """Operands of a shape, random; on the meta device without values."""
    if given.layout not in LAYOUTS:
        raise ArgumentError(f"--layout: expected one of {', '.join(LAYOUTS)}, got {given.layout!r}.")
    follows = set(filter(None, given.epilogue.split("+")))
    if not follows <= set(EPILOGUES):
        raise ArgumentError(
            f"--epilogue: expected names of {', '.join(EPILOGUES)} joined by +, got {given.epilogue!r}."
        )
    if ("into" in follows and len(follows) > 1) or {"gate", "bias"} <= follows:
        raise ArgumentError(
            f"--epilogue: into goes with nothing else, and gate not with bias; got {given.epilogue!r}."
        )
    m, n, k = shape[:3]

    def matrix(rows: int, cols: int, by_columns: bool = False) -> Tensor:
        size = (cols, rows) if by_columns else (rows, cols)
        made = torch.empty(size, dtype=dtype, device=device)
        if device.type != "meta":
            made.normal_()
        return made.t() if by_columns else made

    a_lies, b_lies = LAYOUTS[given.layout]
    weight = [matrix(k, n, by_columns=b_lies == "k") for _ in range(1 + ("gate" in follows))]
    epilogue = _gemm.Epilogue(
        gate=weight[1] if "gate" in follows else None,
        bias=matrix(1, n)[0] if "bias" in follows else None,
        residual=matrix(m, n) if "residual" in follows else None,
        activation="silu" if "activation" in follows else "none",
    )
    into = torch.zeros(m, n, dtype=torch.float32, device=device) if "into" in follows else None
    out_dtype = dtype if into is None else into.dtype
    return Call(matrix(m, k, by_columns=a_lies == "o"), weight[0], epilogue, out_dtype, into=into)


def _tune(given: argparse.Namespace) -> None:
    device = _device(given)
    dtype = _dtype(given, device)
    asked = shapes.of(given.shapes, given.model, given.tp, given.rows)
    choice = _paths.choose_gemm(_paths.Request(None, None), device.type, dtype)
    if not choice.open:
        raise ArgumentError(f"--dtype: there is nothing to choose: {choice.why}.")
    _call(asked[0]._replace(m=1, n=1, k=1), given, dtype, torch.device("meta"))  # options first
    cache = local.store_of(device)
    print(f"{len(asked)} products of {str(dtype).removeprefix('torch.')} on {cache.stamp['device']}")
    rows = []
    with show.Progress("tuning", len(asked), bar=not given.plain) as progress:
        for shape in asked:
            progress.at(str(shape))
            try:
                call = _call(shape, given, dtype, device)
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


def _row(shape: Shape, e: Entry) -> list[str]:
    gain = f"{e.library_us / e.us:.2f}x" if e.library_us and e.us else "-"
    times = [show.us(e.predicted_us), show.us(e.model_us)]
    return [str(shape), e.model, *times, e.what, show.us(e.us), show.us(e.library_us), gain]


def _calibrate(given: argparse.Namespace) -> None:
    device = _device(given)
    kind = calibrate.kind_of(device)
    todo = calibrate.SHAPES[kind]
    print(f"{len(todo)} products by several plans each, on {local.store_of(device).stamp['device']}")
    with show.Progress("timing", len(todo), bar=not given.plain) as progress:
        found = calibrate.calibrate(device, measured=progress.step)
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
    dtype = _dtype(given, device)
    for shape in shapes.of(given.shapes, None, 1, None):
        call = _call(shape, given, dtype, torch.device("meta"))
        a, b = (x.to("meta") if device.type == "cuda" else x for x in (call.a, call.b))
        e = call.epilogue
        options: dict[str, Any] = {
            "gate": e.gate,
            "bias": e.bias,
            "residual": e.residual,
            "accumulate_into": call.into,
            "activation": None if e.activation == "none" else e.activation,
        }
        options = {name: x for name, x in options.items() if x is not None}
        print(explain("matmul", a, b, path=given.path, **options))

"""Options of the demo: parsing, defaults, and a sentence for everything that can be wrong with them."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from tpkernels.errors import ArgumentError
from tpkernels.fp8.recipe import RECIPES
from tpkernels.ops._paths import parse as parse_path
from tpkernels.ops._paths import streamk_missing

from .config import DTYPES, SIZES, RunConfig, check_divisible, fitting_ranks
from .dense import SEEDS
from .errors import DemoError
from .launch import under_torchrun

__all__ = ["check_output", "parse", "resolve"]

_EPILOG = """\
examples:
  python -m tpkernels.demo                                  2 CPU ranks, or all GPUs
  python -m tpkernels.demo --dtype float64 --steps 20       the losses agree to about 1e-12
  python -m tpkernels.demo --device cpu --tp 4 --path gloo  4 CPU ranks, the package's own Stream-K products
  python -m tpkernels.demo --fp8 blockwise                  products in FP8, beside a twin without
  torchrun --nproc-per-node 4 -m tpkernels.demo --size large
  python -m tpkernels.demo.dense demo-out "def main("       sample from the checkpoint with plain PyTorch

exit code: 0 when the sharded and the unsharded model agree, 1 otherwise or on a wrong option."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DemoError(f"{message}; see python -m tpkernels.demo --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tpkernels.demo",
        description="Trains a byte-level transformer language model with tensor and sequence parallelism on the source "
        "text of Python's standard library, beside its unsharded twin in plain PyTorch, and checks at every step that "
        "the two losses are equal.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--size", help=f"{', '.join(SIZES)} (default: small on CPU, medium on GPUs)")
    model.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: float32 on CPU, bfloat16 on GPUs)")
    model.add_argument("--steps", type=int, help="training steps (default: by size)")
    model.add_argument("--batch", type=int, help="sequences in a batch (default: by size)")
    model.add_argument("--seq", type=int, help="bytes in a sequence (default: by size)")
    model.add_argument("--lr", type=float, help="peak learning rate (default: by size)")
    model.add_argument(
        "--seed", type=int, default=0, help="weights, batches and sampling (default: %(default)s)"
    )
    where = parser.add_argument_group("ranks and kernels")
    where.add_argument(
        "--tp", type=int, help="tensor-parallel ranks (default: 2 on CPU, on GPUs as many as fit)"
    )
    where.add_argument("--device", default="auto", help="cpu, cuda or auto (default: %(default)s)")
    where.add_argument(
        "--path",
        default="auto",
        help="how the products run, e.g. gloo+blas, nccl+cublas, streamk (default: %(default)s)",
    )
    where.add_argument(
        "--fp8",
        metavar="RECIPE",
        help=f"products of the blocks in FP8: {', '.join(RECIPES)} (default: in --dtype)",
    )
    where.add_argument("--compile", action="store_true", help="run the sharded model through torch.compile")
    where.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard the sequence between the parallel layers (default: on)",
    )
    output = parser.add_argument_group("checks and output")
    output.add_argument(
        "--no-dense", action="store_true", help="train without the unsharded twin: nothing is compared"
    )
    output.add_argument("--sample", type=int, help="bytes to sample at the end, 0 for none (default: 120)")
    output.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="folder for plot, metrics, checkpoint (default: %(default)s)",
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options as given; raises DemoError for what argparse itself refuses."""
    return _parser().parse_args(arguments)


def resolve(options: argparse.Namespace) -> RunConfig:
    """Fills in defaults from this machine and the launcher, and checks everything; raises DemoError."""
    device = _device(options.device)
    size_name = options.size or ("medium" if device == "cuda" else "small")
    if size_name not in SIZES:
        raise DemoError(f"--size {size_name} is unknown; choose one of {', '.join(SIZES)}.")
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    if dtype not in DTYPES:
        raise DemoError(f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}.")
    size = SIZES[size_name]
    config = RunConfig(
        size=size_name,
        tp=_ranks(options.tp, device, size_name),
        steps=_at_least("--steps", options.steps, size.steps, 1),
        batch=_at_least("--batch", options.batch, size.batch, 1),
        seq=_at_least("--seq", options.seq, size.seq, 8),
        lr=size.lr if options.lr is None else options.lr,
        dtype=dtype,
        device=device,
        seed=_at_least("--seed", options.seed, 0, 0),
        out=options.out,
        path=_path(options.path, device, dtype),
        fp8=_fp8(options.fp8, dtype),
        compile=options.compile,
        dense=not options.no_dense,
        sequence_parallel=options.sequence_parallel,
        sample_bytes=_at_least("--sample", options.sample, 120, 0),
    )
    if not 0 < config.lr < math.inf:
        raise DemoError(f"--lr must be greater than 0 and finite, got {config.lr:g}.")
    if config.seed >= SEEDS:
        raise DemoError(f"--seed must be less than 2**63, got {config.seed}.")
    _check_packages()
    return config


def _at_least(name: str, value: int | None, default: int, least: int) -> int:
    if value is None:
        return default
    if value < least:
        raise DemoError(f"{name} must be at least {least}, got {value}.")
    return value


def _device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise DemoError(f"--device {name} is unknown; choose cpu, cuda or auto.")
    if name == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda was asked for, but PyTorch finds no CUDA GPU here; use --device cpu.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _ranks(asked: int | None, device: str, size: str) -> int:
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if asked is not None and asked != world:
            raise DemoError(
                f"--tp {asked} was asked for, but the launcher started {world} ranks; "
                f"leave --tp out, or start {asked} ranks (torchrun --nproc-per-node {asked} -m tpkernels.demo)."
            )
        ranks = world
    else:
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        default = max(n for n in fitting_ranks(size) if n <= gpus) if gpus else 2
        ranks = local = _at_least("--tp", asked, default, 1)
    if device == "cuda" and local > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DemoError(
            f"{local} ranks need {local} GPUs, but this machine has {count}; use --tp {count}, or --device cpu."
        )
    check_divisible(size, ranks)
    return ranks


def _path(name: str, device: str, dtype: str) -> str:
    transport = "nccl" if device == "cuda" else "gloo"
    try:
        request = parse_path(name, device, distributed=True)
    except ArgumentError as e:
        raise DemoError(f"--path {name}: {e}") from e
    if request.transport not in (None, transport):
        raise DemoError(
            f"--path {name}: ranks on {device} communicate through {transport}; use --path {transport} or auto."
        )
    missing = streamk_missing(device, getattr(torch, dtype))
    if request.gemm == "streamk" and missing is not None:
        raise DemoError(
            f"--path {name} runs the Stream-K kernel, but {missing}; use --path auto or another --dtype."
        )
    return name


def _fp8(recipe: str | None, dtype: str) -> str | None:
    if recipe is None:
        return None
    if recipe not in RECIPES:
        raise DemoError(f"--fp8 {recipe} is unknown; choose one of {', '.join(RECIPES)}.")
    if dtype == "float64":
        raise DemoError(
            "--fp8 goes with parameters in float32, bfloat16 or float16, not float64; take another --dtype."
        )
    return recipe


def _check_packages() -> None:
    for package in ("matplotlib", "rich"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(
                f"the demo needs the package {package}, which is not installed; run: pip install {package}"
            )


def check_output(folder: Path) -> None:
    """Creates the output folder and writes a file there once; raises DemoError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise DemoError(f"--out {folder} cannot be written ({e.strerror or e}); name another folder.") from e

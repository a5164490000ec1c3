"""A small set of calls for compute-sanitizer: every tile and cluster, whole and cut tiles, layouts, epilogues.

    compute-sanitizer --tool memcheck  python tests/gpu1/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu1/sanitize.py --tile 128x256x64
    compute-sanitizer --tool synccheck python tests/gpu1/sanitize.py
    compute-sanitizer --tool initcheck python tests/gpu1/sanitize.py

Prints a line per call, ends with 1 if a result is wrong. Memory comes from cudaMalloc, not from torch's pools, so that
an access beside a tensor or a workspace is one that memcheck sees. References are computed on the CPU, and tensors
are copied from there, so that little else runs on the GPU. The kernels alone: --kernel-name kernel_substring=tpk
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    os.environ.setdefault("TPK_KERNEL_TIMEOUT_S", "3000")  # a sanitizer makes kernels a hundred times slower
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gemm_checks import Product, differences, gemm, integers
from streamk_cases import DTYPES, GATED_TILES, HOPPER_NAMES, TILES

Tensor = torch.Tensor
MULTIPROCESSORS = 4  # few workers, so that each has several tiles and buffers are used again
Case = tuple[str, Product, torch.dtype, dict[str, Any]]


def matrix(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Integers, contiguous along rows or columns, or (odd) with a pitch and an offset that allow no 16-byte loads."""
    batch, rows, cols = shape
    if layout == "cols":
        return matrix((batch, cols, rows), "rows", dtype, generator).mT
    if layout == "odd":
        return integers(batch, rows, cols + 3, dtype=dtype, generator=generator)[:, :, 1 : 1 + cols]
    return integers(*shape, dtype=dtype, generator=generator)


def cases(tile: str, generator: torch.Generator) -> Iterator[Case]:
    """Names, products on the CPU, types of the output and plans."""
    bm, bn, bk = (int(x) for x in tile.partition("/")[0].split("x"))
    m, n, k = bm + 24, bn + 40, 16 * bk + 8  # two tiles each way; K long enough to be cut
    for i, (layout_a, layout_b) in enumerate(
        [("rows", "rows"), ("rows", "cols"), ("cols", "rows"), ("cols", "cols")]
    ):
        dtype = DTYPES[i % 2]
        a, b = matrix((1, m, k), layout_a, dtype, generator), matrix((1, k, n), layout_b, dtype, generator)
        plan = [{"schedule": "data_parallel"}, {"schedule": "stream_k"}][i % 2]
        yield f"{layout_a} x {layout_b}", Product(a, b), dtype, plan
    make = (torch.bfloat16, generator)
    a, b = matrix((1, m, k), "rows", *make), matrix((1, k, n), "rows", *make)
    residual = matrix((1, m, n), "odd", *make)
    everything = Product(a, b, bias=integers(n, dtype=torch.float32, generator=generator), activation="relu",
                         residual=residual, alpha=0.5)  # fmt: skip
    yield (
        "everything, preact",
        everything,
        torch.bfloat16,
        {"schedule": "split_k", "splits": 2, "preact": True},
    )
    yield "everything, odd", everything, torch.float32, {"schedule": "stream_k", "odd": True}
    yield (
        "fp32 sum",
        Product(a, b),
        torch.float32,
        {"schedule": "hybrid_aligned", "splits": 2, "accumulate": True},
    )
    # One tile, so that all workers have a piece of it and finish it together.
    one = Product(a[:, : bm - 8], b[:, :, : bn - 8], bias=integers(bn - 8, dtype=torch.float32, generator=generator),
                  activation="relu")  # fmt: skip
    yield "shares of one tile", one, torch.bfloat16, {"schedule": "hybrid_aligned"}
    ragged = Product(matrix((2, 65, k - 1), "odd", *make)[:, :, :72], matrix((2, 72, 9), "odd", *make))
    if "/" in tile:  # TMA takes neither
        ragged = Product(matrix((2, 65, 72), "rows", *make), matrix((2, 9, 72), "rows", *make).mT)
    yield "two small ones", ragged, torch.bfloat16, {"schedule": "auto"}
    if "/" not in tile or tile.partition("/")[0] in GATED_TILES:
        gate = matrix((1, k, n), "rows", *make)
        gated = Product(a, b, gate=gate, activation="relu")
        yield "gate", gated, torch.bfloat16, {"schedule": "stream_k"}


def run(
    tile: str, product: Product, dtype: torch.dtype, options: dict[str, Any], device: str = "cuda"
) -> str:
    """What is wrong, or nothing."""
    plan = {key: options[key] for key in ("schedule", "splits") if key in options}
    _, m, n = shape = product.value.shape
    old = torch.full(shape, 3.0, dtype=dtype)
    host = torch.full((shape[0], m, n + 3), float("nan"), dtype=dtype)
    view = (slice(None), slice(None), slice(1, 1 + n)) if options.get("odd") else (slice(None),)
    if not options.get("odd"):
        host = host[:, :, :n].clone()
    if options.get("accumulate"):
        host[view] = old
    out = host.to(device)
    on_gpu = {key: getattr(product, key) for key in ("a", "b", "bias", "gate", "residual")}
    on_gpu = {key: copied(x, device) for key, x in on_gpu.items()}
    preact = torch.full(shape, float("nan"), dtype=dtype).to(device) if options.get("preact") else None
    gemm(
        out=out[view], preact=preact, activation=product.activation, alpha=product.alpha, tile=tile,
        accumulate=bool(options.get("accumulate")), multiprocessors=MULTIPROCESSORS, **on_gpu, **plan,
    )  # fmt: skip
    got = out.cpu()[view]
    want = product.value + old.double() if options.get("accumulate") else product.value
    wrong = differences(got, want.to(dtype))
    if options.get("odd") and not bool(out[:, :, [0, n + 1, n + 2]].isnan().all()):
        wrong += " written beside the output"
    if preact is not None:
        wrong += differences(preact.cpu(), product.before.to(dtype))
    return wrong


def copied(x: Tensor | None, device: str) -> Tensor | None:
    """On the device, in the same layout, with what lies between its elements."""
    if x is None:
        return None
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls for compute-sanitizer.")
    parser.add_argument("--tile", default="", help="only tiles whose names start so")
    parser.add_argument("--quick", action="store_true", help="three calls a tile")
    arguments = parser.parse_args()
    tiles = HOPPER_NAMES
    if torch.cuda.get_device_capability() != (9, 0):
        print("no tiles of the Hopper kernel: they need compute capability 9.0")
        tiles = []
    calls = failed = 0
    for tile in [*tiles, *TILES]:
        if not tile.startswith(arguments.tile):
            continue
        for i, (what, product, dtype, options) in enumerate(cases(tile, torch.Generator().manual_seed(0))):
            if arguments.quick and i not in (0, 1, 4):
                continue
            start = time.perf_counter()
            wrong = run(tile, product, dtype, options)
            calls, failed = calls + 1, failed + bool(wrong)
            seconds = time.perf_counter() - start
            print(
                f"{'WRONG' if wrong else 'ok'} {tile} {what} {dtype} {options} {seconds:.2f} s {wrong}",
                flush=True,
            )
    print(f"{calls} calls, {failed} wrong")
    return 1 if failed or not calls else 0


if __name__ == "__main__":
    sys.exit(main())

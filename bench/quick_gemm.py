"""Our Stream-K kernel beside torch.mm (cuBLAS) on one GPU: python -m bench.quick_gemm [--out FILE.jsonl]

Each implementation is one CUDA graph that walks over copies of the operands, together larger than three L2 caches;
graphs are replayed in turn, so both meet the same clocks. Times are medians of device time per product. Every row of
the table is checked against float64 on sampled rows of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tpkernels  # noqa: F401  (loads the ops)

# name, M, N, K, layout: forward x @ w.t(), dgrad dy @ w, wgrad dy.t() @ x
SHAPES = [
    ("square 1k", 1024, 1024, 1024, "forward"),
    ("square 2k", 2048, 2048, 2048, "forward"),
    ("square 4k", 4096, 4096, 4096, "forward"),
    ("square 8k", 8192, 8192, 8192, "forward"),
    ("llama qkv", 2048, 5120, 8192, "forward"),
    ("llama down", 4096, 4096, 14336, "forward"),
    ("dgrad", 4096, 4096, 4608, "dgrad"),
    ("wgrad", 4096, 4096, 8192, "wgrad"),
    ("few rows", 128, 7168, 16384, "forward"),
    ("long K", 256, 256, 16384, "forward"),
    ("ragged", 3000, 3000, 3000, "forward"),
    ("odd stride", 2048, 2048, 2047, "forward"),
]


def make_set(m: int, n: int, k: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    def uniform(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, device="cuda") * 2 - 1).to(dtype)

    a = uniform(k, m).t() if layout == "wgrad" else uniform(m, k)
    b = uniform(n, k).t() if layout == "forward" else uniform(k, n)
    return a, b, torch.empty(m, n, dtype=dtype, device="cuda")


def streamk(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.tpkernels.streamk_gemm(a[None], b[None], None, out[None], None, "none", False)


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def capture(run: Callable[..., None], sets: list[tuple[torch.Tensor, ...]]) -> torch.cuda.CUDAGraph:
    run(*sets[0])  # loads the kernel, sets up cuBLAS
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in sets:
            run(*tensors)
    return graph


def relative_error(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    """Largest ||out - float64|| / ||float64|| of a row, over one row of every 64 (so every tile); inf for NaN."""
    if bool(out.isnan().any()):
        return float("inf")
    first = torch.arange(0, a.shape[0], 64, device=a.device)
    rows = (first + torch.randint_like(first, 64)).clamp(max=a.shape[0] - 1)
    want = a[rows].double() @ b.double()
    return float(((out[rows].double() - want).norm(dim=1) / want.norm(dim=1)).max())


def measure(
    name: str, m: int, n: int, k: int, layout: str, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    set_bytes = 2 * (m * k + k * n + m * n)
    copies = max(2, min(64, -(-3 * properties.L2_cache_size // set_bytes)))
    sets = [make_set(m, n, k, layout, dtype) for _ in range(copies)]
    implementations = {"streamk": streamk, "torch": torch_mm}
    errors, graphs = {}, {}
    for key, run in implementations.items():
        for tensors in sets:
            tensors[2].fill_(float("nan"))
        graphs[key] = capture(run, sets)
        graphs[key].replay()
        torch.cuda.synchronize()
        errors[key] = max(relative_error(*tensors) for tensors in (sets[0], sets[-1]))
    times: dict[str, list[float]] = {key: [] for key in graphs}
    for i in range(rounds + 3):
        for key, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                times[key].append(start.elapsed_time(end) * 1e3 / copies)
    row: dict[str, Any] = {"name": name, "m": m, "n": n, "k": k, "layout": layout, "dtype": str(dtype)}
    row |= {"copies": copies, "device": properties.name, "torch_version": torch.__version__}
    for key, values in times.items():
        deciles, mid = statistics.quantiles(values, n=10), statistics.median(values)
        row[key] = {"us_p20": deciles[1], "us": mid, "us_p80": deciles[7], "error": errors[key]}
        row[key]["tflops"] = 2e-6 * m * n * k / mid
    row["ratio"] = row["torch"]["us"] / row["streamk"]["us"]
    # Rounding gives a fifth of the dtype's epsilon; the order of summation in fp32 adds little.
    row["correct"] = all(errors[key] < (3e-3 if dtype == torch.bfloat16 else 4e-4) for key in errors)
    kind, numbers, row["predicted_us"] = torch.ops.tpkernels.streamk_plan(
        1, m, n, k, f"sm{properties.major}0", "auto", 0, 1, properties.multi_processor_count
    )
    row["plan"] = [kind, *numbers]
    return row


def markdown_table(rows: list[dict[str, Any]], dtype: str) -> str:
    """The rows of one dtype as the README shows them."""
    lines = [
        "| product | M x N x K | ours, us | cuBLAS, us | ours / cuBLAS speed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["dtype"] == f"torch.{dtype}":
            size = f"{row['m']} x {row['n']} x {row['k']}"
            times = f"{row['streamk']['us']:.0f} | {row['torch']['us']:.0f} | {row['ratio']:.2f}"
            lines.append(f"| {row['name']} | {size} | {times} |")
    return "\n".join(lines)


def current_commit() -> str:
    """Short commit of the checkout, "+" if it was changed since, "unknown" where git cannot tell."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append one JSON object a row to this file")
    parser.add_argument("--table", type=Path, help="measure nothing, print this file as a Markdown table")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument(
        "--commit", default=current_commit(), help="recorded in every row (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="run the shapes whose name holds this")
    options = parser.parse_args()
    if options.table is not None:
        print(markdown_table([json.loads(line) for line in options.table.open()], options.dtype))
        return 0
    torch.manual_seed(time.time_ns() % 2**31)
    rows = []
    for name, m, n, k, layout in SHAPES:
        if options.only not in name:
            continue
        row = measure(name, m, n, k, layout, getattr(torch, options.dtype), options.rounds)
        rows.append({"commit": options.commit, **row})
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name(0)
    print(
        f"{device}, torch {torch.__version__}, {options.dtype}; us: median device time of one product, cold L2"
    )
    heads = f"{'ours us':>10}{'TFLOP/s':>9}{'torch us':>10}{'TFLOP/s':>9}{'speed':>7}  plan, error"
    print(f"{'shape':<12}{'M x N x K':>20}{heads}")
    for row in rows:
        ours, theirs = row["streamk"], row["torch"]
        size = f"{row['m']}x{row['n']}x{row['k']}"
        print(
            f"{row['name']:<12}{size:>20}{ours['us']:>10.1f}{ours['tflops']:>9.0f}{theirs['us']:>10.1f}"
            f"{theirs['tflops']:>9.0f}{row['ratio']:>6.2f}x  {row['plan'][0]} {row['plan'][1]}x{row['plan'][2]}"
            f" w{row['plan'][6]}, {ours['error']:.1e} {'' if row['correct'] else 'WRONG'}"
        )
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

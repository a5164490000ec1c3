"""Synthetic results of every suite, for tests of what reads them: plausible H100 numbers, the same on every call.

``rows()`` gives the rows, ``write(path)`` a complete result file, ``trace(...)`` a trace summary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.records import Footer, Header, Row, Stats

RUN = "sample"
PEAK = 780e6  # flop/us
HBM = 2.9e6  # bytes/us
LINK = 330e3  # bytes/us
SMS = 132

GPU_STATE: dict[str, Any] = {
    "sm_mhz": 1980,
    "sm_mhz_max": 1980,
    "memory_mhz": 2619,
    "watts": 340.0,
    "watts_limit": 700.0,
    "celsius": 47,
    "throttle_reasons": 0,
}
ENV: dict[str, Any] = {
    "date": "2026-11-28",
    "device": "cuda",
    "world": 8,
    "gpu": "NVIDIA H100 80GB HBM3",
    "gpus": 8,
    "driver": "580.159",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "tpkernels": "0.1.0",
    "python": "3.12.3",
    "commit": "ec1131a",
    "dirty": False,
    "cpu": "Some processor",
    "cpus": 64,
    "multicast": {
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    },
    "before": [GPU_STATE] * 8,
}


def stats(us: float) -> Stats:
    """A tight distribution around a median."""
    return Stats(us * 0.995, us, us * 1.006, us * 0.99, 30)


def jitter(*key: object, by: float = 0.004) -> float:
    """A factor near 1 that depends on the key alone."""
    return 1 + by * (2 * random.Random(zlib.crc32(repr(key).encode())).random() - 1)


def gemm_us(m: int, n: int, k: int, tile: tuple[int, int] = (128, 256)) -> float:
    """Time of a data-parallel product: whole waves of tiles, or its bytes at HBM speed."""
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
    waves = math.ceil(tiles / SMS)
    mac = waves * SMS * tile[0] * tile[1] * k * 2 / PEAK
    return 3.5 + max(mac, 2 * (m * k + k * n + m * n) / HBM)


# --- gemm ----------------------------------------------------------------------------------------------------

SETS = {
    "square": [(s, s, s) for s in (1024, 2048, 4096, 8192)],
    "tp": [
        (8192, 6144, 12288),
        (2048, 6144, 12288),
        (8192, 3584, 8192),
        (8192, 1280, 8192),
        (8192, 4096, 1792),
    ],
    "waves": [(128 * w, 2048, 8192) for w in (9, 13, 17, 20, 25, 29, 33, 40, 50)],
    "tall-skinny": [(32768, 128, 4096), (128, 32768, 4096)],
    "decode": [(m, 7168, 8192) for m in (1, 16, 64, 128)],
}


def sweep_shapes(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    draw = lambda: int(2 ** rng.uniform(7, 13))  # noqa: E731
    return [(draw(), draw(), draw()) for _ in range(count)]


def gemm_rows(sweep: int = 40) -> list[Row]:
    rows = []
    for name, shapes in {**SETS, "sweep": sweep_shapes(sweep)}.items():
        for m, n, k in shapes:
            case = f"{name} {m}x{n}x{k}"
            rows += _gemm_case(case, name, m, n, k)
    return rows


def _gemm_case(case: str, shape_set: str, m: int, n: int, k: int) -> list[Row]:
    tiles = math.ceil(m / 128) * math.ceil(n / 256)
    waves = tiles / SMS
    plain = gemm_us(m, n, k)
    # Stream-K pays 6 % for its fix-up and fills the last wave.
    moved = 2 * (m * k + k * n + m * n) / HBM
    streamed = 3.5 + max(moved, (plain - 3.5) * 1.06 * max(waves, 0.2) / math.ceil(waves))
    times = {
        "cublas": min(plain, 1.05 * streamed) * jitter(case, by=0.09),
        "streamk": min(plain, streamed),
        "streamk:data_parallel": plain,
        "streamk:stream_k": streamed,
        "streamk:hybrid_first": streamed * 0.99 if waves > 2 else streamed * 1.02,
        "streamk:dp-same-tile": plain,
        "cublaslt-fp8": plain / 1.7,
    }
    times["cublas again"] = times["cublas"]
    schedule = "stream_k" if streamed < plain else "data_parallel"
    rows = []
    for variant, us in times.items():
        role = "noise" if variant.endswith("again") else "ours" if variant.startswith("streamk") else "peer"
        plan = {"schedule": schedule, "tile": [128, 256, 64], "tiles": tiles, "k_iters": math.ceil(k / 64)}
        plan |= {"workers": SMS, "splits": 1, "predicted_us": us * 0.97}
        rows.append(
            Row(
                "gemm",
                case,
                "matmul",
                variant,
                role,  # type: ignore[arg-type]
                shape_set=shape_set,
                dtype="bfloat16",
                params={"m": m, "n": n, "k": k, "layout": "forward"},
                us=stats(us * jitter(case, variant, by=0.006)),
                host_us=stats(us * 1.02 + 4),
                error=1.7e-3,
                tolerance=8e-3,
                flops=2.0 * m * n * k,
                bytes=2.0 * (m * k + k * n + m * n),
                partner="cublas" if role == "noise" else "",
                extra={"plan": plan, "waves": waves} if role == "ours" else {},
                run=RUN,
            )
        )
    return rows


# --- sweep ---------------------------------------------------------------------------------------------------

TILE_NAME = "128x256x64/2x1"


def sweep_row(index: int, size: tuple[int, int, int], variant: str, us: float, **more: Any) -> Row:
    """A row of suite sweep."""
    m, n, k = size
    role = "noise" if variant.endswith("again") else "ours" if variant[:4] in ("stre", "auto") else "peer"
    given: dict[str, Any] = {
        "params": {"index": index, "m": m, "n": n, "k": k, "layout": "forward"},
        "case": f"sweep {index:05d} {m}x{n}x{k}",
        "partner": "cublas" if role == "noise" else "",
        "flops": 2.0 * m * n * k,
        "bytes": 2.0 * (m * k + k * n + m * n),
    }
    given |= {"op": "matmul", "shape_set": "sweep", "dtype": "bfloat16", "error": 1.7e-3, "tolerance": 3.1e-3}
    return Row(**{"suite": "sweep", **given, **more}, variant=variant, role=role, us=stats(us), run=RUN)  # type: ignore[arg-type]


def sweep_rows(count: int = 40, tiles: bool = False) -> list[Row]:
    """The bars' sample; ``tiles``: two tiles forced as well, of which the second is 10 % faster than the choice."""
    from bench.suites.gemm_shapes import sweep

    rows = []
    for i, shape in enumerate(sweep(count, 0)):
        size = (shape.m, shape.n, shape.k)
        waves = math.ceil(shape.m / 128) * math.ceil(shape.n / 256) / SMS
        plain = gemm_us(*size)
        streamed = 3.5 + max((plain - 3.5) * 1.06 * max(waves, 0.2) / math.ceil(waves), 2.0)
        ours = min(plain, streamed)
        plan = {"schedule": "hybrid_aligned" if streamed < plain else "data_parallel", "tile_name": TILE_NAME}
        plan |= {
            "tiles": round(waves * SMS),
            "k_iters": math.ceil(shape.k / 64),
            "workers": SMS // 2,
            "splits": 1,
        }
        plan |= {"partial_tiles": SMS if streamed < plain else 0, "multiprocessors": SMS}
        plan["predicted_us"] = ours * jitter(i, by=0.1)
        whole = plan | {"schedule": "data_parallel", "partial_tiles": 0, "predicted_us": plain * 1.05}
        cublas = min(plain, 1.05 * streamed) * jitter(i, by=0.09)
        told = {"extra": {"plan": plan, "waves": waves}}
        rows += [
            sweep_row(i, size, "cublas", cublas),
            sweep_row(i, size, "streamk", ours, **told),
            sweep_row(i, size, "streamk:dp-same-tile", plain, extra={"plan": whole, "waves": waves}),
            sweep_row(i, size, "auto", cublas * jitter("auto", i)),
        ]
        if i % 10 == 0:
            rows.append(sweep_row(i, size, "cublas again", cublas * jitter("again", i)))
        if tiles:
            rows.append(sweep_row(i, size, f"streamk:data_parallel@{TILE_NAME}", plain, **told))
            rows.append(sweep_row(i, size, "streamk:hybrid_aligned@128x128x64/2x1", ours / 1.1, **told))
    return rows


# --- overlap -------------------------------------------------------------------------------------------------

PROJECTIONS = {
    "gpt3": (49152, 12288),
    "llama70b": (28672, 8192),
    "llama8b": (14336, 4096),
    "llama70b qkv": (10240, 8192),
}
OPS = {"AG": "all_gather_matmul", "RS": "matmul_reduce_scatter", "AR": "matmul_all_reduce"}


def overlap_rows(worlds: Iterable[int] = (4, 8), ms: Iterable[int] = (16, 256, 2048, 8192)) -> list[Row]:
    rows = []
    for world in worlds:
        for short, op in OPS.items():
            for name, (wide, hidden) in PROJECTIONS.items():
                for m in ms:
                    n, k = (wide // world, hidden) if short == "AG" else (hidden, wide // world)
                    rows += _overlap_case(f"{short} {name} M{m}", op, world, m, n, k)
    return rows


def _overlap_case(case: str, op: str, world: int, m: int, n: int, k: int) -> list[Row]:
    gathered = 2.0 * m * (k if op == "all_gather_matmul" else n)
    times_sent = 2 if op == "matmul_all_reduce" else 1
    comm = 9 + times_sent * gathered * (world - 1) / world / LINK
    gemm = gemm_us(m, n, k)
    exposed = {
        "ours:nccl+streamk": 1.0,
        "ours:nccl+cublas": 0.99,
        "nccl+cublas": 1.0,
        "symm_mem": 0.45 + 90 / (comm + gemm),
        "ceiling": 0.08,
    }
    if op == "matmul_all_reduce":
        exposed["symm_mem:two_shot"] = 0.8
    times = {v: gemm + part * comm for v, part in exposed.items()}
    times["ours:nccl+streamk"] = gemm * 0.93 + 0.3 * comm + 2
    times |= {"comm": comm, "gemm": gemm, "nccl+cublas again": times["nccl+cublas"], "cublasmp": 0.0}
    rows = []
    for variant, us in times.items():
        role = {"comm": "part", "gemm": "part", "ceiling": "ceiling"}.get(variant, "peer")
        role = "noise" if variant.endswith("again") else "ours" if variant.startswith("ours") else role
        row = Row(
            "overlap",
            case,
            op,
            variant,
            role,  # type: ignore[arg-type]
            shape_set=case.split()[1],
            dtype="bfloat16",
            world=world,
            params={"m": m, "n": n, "k": k},
            us=stats(us * jitter(case, world, variant)),
            host_us=stats(us + 25),
            error=2.1e-3,
            tolerance=8e-3,
            flops=2.0 * m * n * k,
            partner="nccl+cublas" if role == "noise" else "",
            run=RUN,
        )
        if variant == "cublasmp":
            row = _cublasmp(row, gemm + 0.5 * comm + 30, times["nccl+cublas"] + 40)
        if variant == "symm_mem" and m == 16:
            row = _lost(row, "skipped", "16 rows are fewer than one tile of each rank")
        rows.append(row)
    return rows


def _cublasmp(row: Row, us: float, baseline: float) -> Row:
    if "llama8b" in row.case and row.params["m"] == 8192:
        return _lost(row, "timeout", "no result after 120 s; the process was ended")
    if row.op == "matmul_all_reduce":
        return _lost(row, "skipped", "cuBLASMp 0.7.0 has no GEMM + all-reduce")
    return dataclasses.replace(row, us=None, host_us=stats(us), extra={"baseline_host_us": baseline})


def _lost(row: Row, status: str, reason: str) -> Row:
    return dataclasses.replace(row, us=None, host_us=None, error=None, status=status, reason=reason)  # type: ignore[arg-type]


# --- layer, train --------------------------------------------------------------------------------------------

FACTORS = {
    "ours": 0.84,
    "ours:nccl+cublas": 0.98,
    "nccl+cublas": 1.0,
    "torch-tp": 1.07,
    "torch-tp-async": 0.91,
    "torch-tp-compiled": 0.96,
}


def layer_rows(world: int = 4) -> list[Row]:
    rows = []
    for op, forward in {"mlp": 2900.0, "attention": 1700.0, "block": 4750.0}.items():
        for model, scale in {"llama70b": 1.0, "llama8b": 0.27}.items():
            case = f"{op} {model} M8192"
            for variant, factor in FACTORS.items():
                us = forward * scale * factor * jitter(case, variant)
                row = Row(
                    "layer",
                    case,
                    op,
                    variant,
                    "ours" if variant.startswith("ours") else "peer",
                    dtype="bfloat16",
                    world=world,
                    params={"m": 8192},
                    us=stats(3.05 * us),
                    peak_bytes=int((1.4 if variant.startswith("ours") else 1.9) * scale * 2**30),
                    error=3e-3,
                    tolerance=2e-2,
                    extra={"forward_us": us, "backward_us": 2.05 * us},
                    run=RUN,
                )
                if variant == "torch-tp-compiled" and op == "attention":
                    row = _lost(row, "crashed", "torch._dynamo.exc.Unsupported: <flash | attention>")
                rows.append(row)
            again = next(r for r in rows if r.case == case and r.variant == "nccl+cublas")
            rows.append(
                dataclasses.replace(
                    again,
                    variant="nccl+cublas again",
                    role="noise",
                    partner="nccl+cublas",
                    us=stats(again.us.p50 * 1.003),  # type: ignore[union-attr]
                )
            )
    return rows


def train_rows(world: int = 4) -> list[Row]:
    rows = []
    for size, (step, tokens) in {
        "tiny": (21e3, 65536),
        "small": (118e3, 65536),
        "medium": (402e3, 65536),
    }.items():
        for variant, factor in FACTORS.items():
            us = step * factor * jitter(size, variant)
            rows.append(
                Row(
                    "train",
                    size,
                    "train_step",
                    variant,
                    "ours" if variant.startswith("ours") else "peer",
                    dtype="bfloat16",
                    world=world,
                    us=stats(us),
                    peak_bytes=int(11 * 2**30 * factor),
                    extra={"tokens_per_s": tokens / us * 1e6, "mfu": 0.46 / factor * (step / 402e3) ** 0.1},
                    run=RUN,
                )
            )
    return rows


# --- link ----------------------------------------------------------------------------------------------------


MIB = 1 << 20


def link_rows(world: int = 4) -> list[Row]:
    def row(case: str, op: str, variant: str, us: float, **more: Any) -> Row:
        return Row("link", case, op, variant, "ceiling", world=world, us=stats(us), run=RUN, **more)

    kind = {"kind": "torch", "sms": 0}
    rows = [
        row("copy 1 GiB", "copy", "torch", 2**31 / HBM, bytes=2.0**31, params={"bytes": 2**30}, extra=kind),
        row("matmul 8192", "matmul", "torch", 2 * 8192**3 / PEAK, flops=2.0 * 8192**3, dtype="bfloat16"),
        row("flag round trip", "flag_round_trip", "one thread", 2.4),
    ]
    for op, factor in {"push": 1.0, "pull": 0.95, "all_gather": 0.9, "scatter": 0.91}.items():
        for mib in (1, 2, 4, 8, 16, 64):
            for sms in (0, 8, 16, 32):
                moved = mib * MIB * (1 if op in ("push", "pull") else world - 1)
                top = 360e3 if sms == 0 else min(335e3, 200e3 + sms * 5e3)
                extra = {"kind": "bulk" if sms else "engine", "sms": sms, "flag": False, "chunks": 1}
                rows.append(
                    row(
                        f"{op} {mib} MiB",
                        op,
                        f"bulk {sms} SMs" if sms else "engine",
                        (1.8 if sms else 5.5) + moved / (top * factor),
                        bytes=float(moved),
                        params={"bytes": mib * MIB},
                        extra=extra,
                        dtype="bfloat16",
                    )
                )
    shape = {"m": 8192, "n": 6144, "k": 12288, "bytes": 25 * MIB}
    for variant, slower, alone in (
        ("engine", 1.02, 403.0),
        ("bulk 16 SMs", 1.17, 390.0),
        ("nccl", 1.21, 575.0),
    ):
        extra = {"transport": variant, "gemm_alone_us": 1597.0, "transport_alone_us": alone}
        extra |= {"gemm_beside_us": 1600 * slower, "gemm_slowdown": slower, "together_us": 1597 * slower + 12}
        rows.append(
            row("beside gpt3 M8192", "beside", variant, 1597 * slower + 12, params=shape, extra=extra)
        )
    constants = {
        "hbm_gbps": 2900.0,
        "peak_tflops_bf16": 780.0,
        "copy_engine_gbps": 358.0,
        "flag_cost_us": 1.2,
    }
    rows.append(
        Row("link", "constants", "constants", "fit", "ceiling", world=world, extra=constants, run=RUN)
    )
    return rows


# --- files ---------------------------------------------------------------------------------------------------


# --- quantize ------------------------------------------------------------------------------------------------


def quantize_rows() -> list[Row]:
    rows = []
    for scaling, reads in (("tensorwise", 4), ("rowwise", 2), ("blockwise_1x128", 2)):
        params = {"m": 8192, "k": 8192, "scaling": scaling}
        moved = float(8192 * 8192 * (reads + 1))
        for variant, role, part in (
            ("torch", "peer", 0.3), ("torch-compile", "peer", 0.6), ("ours", "ours", 0.9), ("copy", "ceiling", 1.0)
        ):  # fmt: skip
            us = stats(moved / HBM / part)
            more = {"dtype": "bfloat16", "bytes": moved, "params": params, "shape_set": "large"}
            rows.append(
                Row(
                    "quantize",
                    f"square quantize {scaling}",
                    "quantize",
                    variant,
                    role,
                    us=us,
                    run=RUN,
                    **more,
                )
            )
    return rows


def rows() -> list[Row]:
    """Rows of every suite."""
    return [
        *link_rows(),
        *gemm_rows(),
        *sweep_rows(),
        *quantize_rows(),
        *overlap_rows(),
        *layer_rows(),
        *train_rows(),
    ]


def few_rows() -> list[Row]:
    """Some rows of every suite, in one small world."""
    return [
        *link_rows(2),
        *gemm_rows(sweep=6),
        *sweep_rows(6),
        *quantize_rows(),
        *overlap_rows((2,), (16, 2048, 8192)),
        *layer_rows(2),
        *train_rows(2),
    ]


def write(
    path: Path, these: Iterable[Row] | None = None, *, run: str = RUN, env: dict[str, Any] | None = None
) -> Path:
    """A result file that holds one complete run of these rows (default: all)."""
    records: list[Header | Row | Footer] = [
        Header(
            run, "all", "2026-11-28T03:00:00+00:00", ["python", "-m", "bench", "all"], {**ENV, **(env or {})}
        )
    ]
    records += [dataclasses.replace(row, run=run) for row in (rows() if these is None else these)]
    records.append(Footer(run, "2026-11-28T04:00:00+00:00", 3600.0))
    kinds = {Header: "header", Row: "row", Footer: "footer"}
    lines = [json.dumps({"kind": kinds[type(r)], **dataclasses.asdict(r)}) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def trace(title: str, *, fused: bool, world: int = 2, path: Path | None = None) -> dict[str, Any]:
    """A trace summary: a gather, then a product; or both at once."""
    ranks = []
    for rank in range(world):
        late = 4.0 * rank
        chunk = 95.0
        gather = [
            {
                "name": f"all_gather {i}",
                "start_us": late + i * chunk,
                "dur_us": chunk - 3,
                "category": "communication",
            }
            for i in range(4)
        ]
        start = late + 20 if fused else late + 4 * chunk
        product = [
            {"name": "streamk_gemm<128, 256>", "start_us": start, "dur_us": 620.0, "category": "compute"},
            {"name": "epilogue", "start_us": start + 622, "dur_us": 14.0, "category": "compute"},
        ]
        small = [{"name": "memset", "start_us": late, "dur_us": 3.0, "category": "other"}]
        exposed = 20.0 if fused else 380.0
        ranks.append(
            {
                "rank": rank,
                "streams": [
                    {"name": "stream 7", "events": small + product},
                    {"name": "stream 20 (high priority)", "events": gather},
                ],
                "overlap_fraction": 1 - exposed / 380,
                "compute_us": 634.0,
                "communication_us": 380.0,
                "exposed_us": exposed,
            }
        )
    summary = {"schema": 1, "kind": "trace_summary", "title": title, "ranks": ranks}
    if path is not None:
        path.write_text(json.dumps(summary))
    return summary


# --- single rows -------------------------------------------------------------------------------------------------


def row(variant: str, us: float | None, role: str = "peer", **more: Any) -> Row:
    """A row of one gemm case."""
    given: dict[str, Any] = {"suite": "gemm", "case": "square 64x64x64", "op": "matmul", "dtype": "bfloat16"}
    given |= {"params": {"m": 64, "n": 64, "k": 64}, "shape_set": "square", "run": "r"}
    return Row(**{**given, **more}, variant=variant, role=role, us=stats(us) if us else None)  # type: ignore[arg-type]


def fused(variant: str, us: float | None, role: str = "peer", **more: Any) -> Row:
    """A row of one overlap case."""
    given = {"suite": "overlap", "case": "AG small M8192", "op": "all_gather_matmul", "world": 4}
    return row(variant, us, role, **{**given, "params": {"m": 8192, "n": 32, "k": 16}, **more})

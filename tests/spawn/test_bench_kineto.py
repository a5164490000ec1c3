"""kineto profiles of two gloo ranks: what is recorded, merged and summed up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk

STEPS = 3


def record_sequential(ctx: Any, out: str) -> None:
    """Gather, then multiply: nothing is hidden."""
    from bench.profiling import kineto

    a, b = torch.randn(256, 512), torch.randn(512, 256, requires_grad=True)

    def run() -> None:
        tpk.all_gather_matmul(a, b, group=ctx.group).sum().backward()
        tpk.matmul_reduce_scatter(torch.ones(64, 32), torch.ones(32, 8), group=ctx.group)

    kineto.record(run, STEPS, Path(out), ctx.rank, title="one after the other", group=ctx.group)


def record_overlapped(ctx: Any, out: str) -> None:
    """A transfer in the background of a product."""
    from bench.profiling import kineto

    x, a = torch.ones(1 << 21), torch.randn(1024, 1024)

    def run() -> None:
        work = dist.all_reduce(x, group=ctx.group, async_op=True)
        for _ in range(4):
            torch.mm(a, a)
        assert work is not None
        work.wait()

    kineto.record(run, STEPS, Path(out), ctx.rank, group=ctx.group)


@pytest.fixture
def sequential(ranks, tmp_path):
    from bench.profiling import kineto

    ranks.run(record_sequential, str(tmp_path), world=2)
    return json.loads(kineto.finish(tmp_path).read_text()), tmp_path


def test_sequential(sequential):
    found, out = sequential
    assert (found["kind"], found["title"], found["steps"]) == ("trace_summary", "one after the other", STEPS)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["compute_us"] > 0 and rank["communication_us"] > 0
        assert rank["overlap_fraction"] < 0.2
        assert rank["exposed_us"] <= rank["communication_us"]
        names = {e["name"] for s in rank["streams"] for e in s["events"]}
        assert {"aten::mm", "gloo:all_gather", "gloo:all_to_all"} <= names
        assert all(e["start_us"] >= 0 and e["dur_us"] >= 0 for s in rank["streams"] for e in s["events"])
    text = (out / "summary.txt").read_text()
    for name in (
        "tpk::all_gather_matmul [256, 512] x [512, 256] float32",
        "gather gloo",
        "product blas",
        "sum",
    ):
        assert name in text

    merged = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))
    events = merged["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0: CPU", "rank 1: CPU"} <= set(rows.values())
    begins = {rows[e["pid"]]: e["ts"] for e in events if e["name"] == "step 0"}
    assert len(begins) == 2 and abs(begins["rank 0: CPU"] - begins["rank 1: CPU"]) < 2e6  # us: one clock
    # Phases nest in ops: every gather of a step is inside an op of its thread.
    ops = [e for e in events if e["ph"] == "X" and e["name"].startswith("tpk::")]
    phases = [
        e
        for e in events
        if e["ph"] == "X" and e["name"] in ("gather gloo", "reduce_scatter gloo", "product blas")
    ]
    assert {e["name"] for e in phases} == {"gather gloo", "reduce_scatter gloo", "product blas"}
    for p in phases:
        assert any(
            o["pid"] == p["pid"]
            and o["tid"] == p["tid"]
            and o["ts"] <= p["ts"]
            and p["ts"] + p["dur"] <= o["ts"] + o["dur"]
            for o in ops
        )


def test_overlapped(ranks, tmp_path):
    from bench.profiling import kineto

    ranks.run(record_overlapped, str(tmp_path), world=2)
    for rank in json.loads(kineto.finish(tmp_path, title="both").read_text())["ranks"]:
        assert rank["overlap_fraction"] > 0.2
        hidden = rank["overlap_fraction"] * rank["communication_us"]
        assert rank["exposed_us"] == pytest.approx(rank["communication_us"] - hidden, rel=1e-3)

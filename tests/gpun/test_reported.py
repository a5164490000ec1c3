"""Reports of users of other libraries, tried on GPUs of their own; the checks are in tests/reported_checks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import reported_checks
from few_rows import overlaps
from fused_checks import FUSED
from hopper_gpus import COUNT, ENDS, hopper_gpus
from op_checks import on_device

LIMIT = 4.0  # seconds until a rank that does not come is reported

pytestmark = hopper_gpus()
PLAIN = "nccl+cublas"
PATHS = [FUSED, "fused+streamk", PLAIN, "auto"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("path", PATHS)
def test_lengths_that_change(gpu_ranks, seed, path, world):
    gpu_ranks.run(on_device, reported_checks.check_lengths, path, 600, seed, world=world, timeout=300)


@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("path", [FUSED, PLAIN])
def test_every_dimension(gpu_ranks, seed, path, world):
    gpu_ranks.run(on_device, reported_checks.check_dimensions, path, seed, world=world)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("path", PATHS)
def test_layers_of_models(gpu_ranks, seed, path, world):
    gpu_ranks.run(on_device, reported_checks.check_layers_of_models, path, 40, seed, world=world, timeout=300)


def test_a_rank_late_with_its_memory(gpu_ranks, seed):
    check = reported_checks.check_a_rank_late_with_its_memory
    gpu_ranks.run(on_device, check, FUSED, 2.0, seed)


@overlaps()
def _training_of_many_rows(ctx, seed):
    reported_checks.check_training(ctx, FUSED, PLAIN, 30, seed, False)


@pytest.mark.parametrize("world", ENDS)
def test_training(gpu_ranks, seed, world):
    gpu_ranks.run(on_device, reported_checks.check_training, FUSED, PLAIN, 30, seed, False, world=world)
    gpu_ranks.run(on_device, _training_of_many_rows, seed, world=world)


@pytest.mark.parametrize("world", ENDS)
def test_a_hidden_size_of_4096(gpu_ranks, world):
    """It was twice as slow. What "auto" may cost is measured by the benchmarks; this is coarse."""
    check = reported_checks.check_not_slower
    gpu_ranks.run(on_device, check, PLAIN, 4096, 4096, 1.25, world=world)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("path", [FUSED, PLAIN])
def test_more_elements_than_32_bits_count(gpu_ranks, seed, path, world):
    gpu_ranks.run(on_device, reported_checks.check_huge_sum, path, seed, world=world, timeout=600)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ENDS)
def test_widest_scatter(gpu_ranks, seed, world):
    gpu_ranks.run(on_device, reported_checks.check_widest_scatter, FUSED, seed, world=world, timeout=600)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", [FUSED, "fused+streamk"])
def test_layers_come_and_go(gpu_ranks, path):
    gpu_ranks.run(on_device, reported_checks.check_layers_come_and_go, path, 200, world=2, timeout=300)


KILLED = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import tpkernels as tpk

rank, world, store, op, rows = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=world)
x = torch.ones(rows * world, 1024, dtype=torch.bfloat16, device="cuda")
w = torch.ones(1024, 2048, dtype=torch.bfloat16, device="cuda")

def calls():
    for _ in range(3):
        getattr(tpk, op)(x, w, path="fused")
    tpk.synchronize()

calls()
dist.barrier()
torch.cuda.synchronize()
if rank == world - 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    calls()
    print("no error")
except Exception as error:
    print(f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}")
sys.stdout.flush()
os._exit(0)  # destroying groups would wait for the one that is gone
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_rank_that_is_killed_is_reported(tmp_path: Path, op: str, rows: int) -> None:
    """Its memory is gone from its own process: the others get an error that names it, and no stale rows."""
    env = os.environ | {
        "TPK_CHECK": "0",
        "TPK_COMM_TIMEOUT_S": str(LIMIT),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    command = [sys.executable, "-c", KILLED]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(COUNT), str(tmp_path / "store"), op, str(rows)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(COUNT)
    ]
    try:
        texts = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[-1].returncode == -9
    for rank, text in enumerate(texts[:-1]):
        last = [line for line in text.splitlines() if " after " in line or line == "no error"]
        assert last and last[-1].startswith("CommTimeoutError after "), f"rank {rank}: {text[-3000:]}"
        assert f"rank {COUNT - 1}" in text[text.rindex("CommTimeoutError") :].lower(), text[-3000:]
        seconds = float(last[-1].split(" after ")[1].split(" s")[0])
        assert 0.5 * LIMIT < seconds < LIMIT + 20, last[-1]

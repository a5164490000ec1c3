"""Path "fused" with rows carried by NVSHMEM, on all GPUs: memory of NVSHMEM is that of all ranks of a job.

The checks of test_fused_gpus.py that rows and flags can get wrong; TPK_TRANSPORT=nvshmem runs all of tests/gpun with
it, on two GPUs.
"""

from __future__ import annotations

import fused_behaviour
import fused_checks
import fused_gradients
import fused_graphs
import fused_small
import pytest
import torch
from fused_checks import FUSED, new_group
from hopper_gpus import COUNT, hopper_gpus
from op_checks import check_all_gather_matmul, on_device

import tpkernels as tpk
from tpkernels.errors import BackendError
from tpkernels.testing import RankPool

BF16, F16 = torch.bfloat16, torch.float16


pytestmark = hopper_gpus("_C_nvshmem")


@pytest.fixture(scope="module")
def nvshmem_ranks():
    with RankPool(COUNT, "nccl", timeout=120.0, env={"TPK_TRANSPORT": "nvshmem"}) as pool:
        yield pool


def check_carried(ctx):
    """Kernels of NVSHMEM run, not copies to a peer."""
    a, b = torch.ones(8192, 1024, dtype=BF16), torch.ones(1024, 4096, dtype=BF16)
    tpk.all_gather_matmul(a, b, ctx.group, path=FUSED)
    tpk.matmul_reduce_scatter(a, b, ctx.group, path=FUSED)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tpk.all_gather_matmul(a, b, ctx.group, path=FUSED)
        tpk.matmul_reduce_scatter(a, b, ctx.group, path=FUSED)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("push_kernel" in name for name in names) >= 2 * (ctx.world - 1), names
    assert not [name for name in names if "Memcpy PtoP" in name], names


def test_rows_are_carried_by_nvshmem(nvshmem_ranks):
    nvshmem_ranks.run(on_device, check_carried)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "check",
    [
        fused_checks.check_gather,
        fused_checks.check_scatter,
        fused_checks.check_large,
        fused_checks.check_reference,
        fused_gradients.check_gradients,
        fused_small.check_all_reduce,
    ],
)
def test_values(nvshmem_ranks, seed, check, dtype):
    nvshmem_ranks.run(on_device, check, FUSED, dtype, seed)


@pytest.mark.parametrize("uneven", [False, True])
def test_every_dimension_and_option_with_gradients(nvshmem_ranks, uneven):
    nvshmem_ranks.run(on_device, check_all_gather_matmul, BF16, uneven, FUSED)


def test_repeats(nvshmem_ranks, seed):
    nvshmem_ranks.run(on_device, fused_behaviour.check_repeats, FUSED, 1000, seed, timeout=240)


def test_cuda_graphs(nvshmem_ranks, seed):
    nvshmem_ranks.run(on_device, fused_graphs.check_graphs, FUSED, 200, seed, timeout=240)


def check_part_of_the_job(ctx):
    group = new_group(ctx, [0, 1])
    if ctx.rank < 2:
        a = torch.ones(64, 64, dtype=BF16)
        with pytest.raises(BackendError, match="the group has only some of them"):
            tpk.all_gather_matmul(a, a, group, path=FUSED)


@pytest.mark.skipif(COUNT < 3, reason="a part of the job that is a group of two needs 3 GPUs")
def test_a_part_of_the_job_is_refused(nvshmem_ranks):
    nvshmem_ranks.run(on_device, check_part_of_the_job)

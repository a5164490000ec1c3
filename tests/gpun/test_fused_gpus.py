"""Path "fused" on GPUs of their own, NCCL groups, from 2 ranks to as many as there are GPUs; what takes long is here.

The checks are in tests/fused_checks.py and the other fused_*.py there; tests/gpu1 runs them on one GPU.
"""

from __future__ import annotations

import fused_behaviour
import fused_checks
import fused_gradients
import fused_graphs
import fused_pairs
import fused_small
import pytest
import torch
from fused_checks import FUSED
from fused_departures import check_who_moves, departing
from hopper_gpus import COUNT, ENDS, WORLDS, hopper_gpus
from op_checks import check_all_gather_matmul, check_reduce, on_device

from tpkernels.comm import departures
from tpkernels.testing import RankPool

BF16, F16 = torch.bfloat16, torch.float16
LIMIT = 4.0  # seconds until a stalled rank is reported


pytestmark = hopper_gpus()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "check",
    [
        fused_checks.check_gather,
        fused_checks.check_scatter,
        fused_checks.check_large,
        fused_checks.check_reference,
        fused_gradients.check_gradients,
        fused_pairs.check_pairs,
    ],
)
def test_values(gpu_ranks, seed, check, dtype, world):
    gpu_ranks.run(on_device, check, FUSED, dtype, seed, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("uneven", [False, True])
def test_every_dimension_and_option_with_gradients(gpu_ranks, uneven, world):
    gpu_ranks.run(on_device, check_all_gather_matmul, BF16, uneven, FUSED, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_small_sums(gpu_ranks, seed, dtype, world):
    gpu_ranks.run(on_device, fused_small.check_all_reduce, FUSED, dtype, seed, world=world)
    gpu_ranks.run(on_device, fused_small.check_empty, FUSED, world=world)
    gpu_ranks.run(on_device, fused_small.check_gradients, FUSED, world=world)
    gpu_ranks.run(on_device, fused_small.check_few_rows, FUSED, dtype, seed, world=world)
    gpu_ranks.run(on_device, fused_small.check_sums_are_in_order, FUSED, seed, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_small_sums_again_and_again(gpu_ranks, seed, world):
    gpu_ranks.run(on_device, fused_small.check_repeats, FUSED, 5000, seed, world=world, timeout=240)
    gpu_ranks.run(on_device, fused_small.check_graphs, FUSED, 1000, seed, world=world, timeout=240)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("check", [fused_checks.check_huge, fused_checks.check_widest])
def test_huge(gpu_ranks, seed, check, world):
    gpu_ranks.run(on_device, check, FUSED, seed, world=world, timeout=600)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", departures.WAYS)
@pytest.mark.parametrize("check", [fused_checks.check_scatter, fused_checks.check_large])
def test_departures(gpu_ranks, seed, check, way, world):
    gpu_ranks.run(on_device, departing, way, check, FUSED, BF16, seed, world=world)
    gpu_ranks.run(on_device, departing, way, check_reduce, BF16, True, FUSED, world=world)


def test_who_moves_what_departs(gpu_ranks):
    gpu_ranks.run(on_device, check_who_moves, FUSED, "Memcpy PtoP", world=2)


REPEATS = [fused_behaviour.check_repeats, fused_small.check_repeats_by_two_steps]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ENDS)
@pytest.mark.parametrize("way", departures.WAYS)
@pytest.mark.parametrize("check", REPEATS)
def test_ten_thousand_repeats(gpu_ranks, seed, check, way, world):
    gpu_ranks.run(on_device, departing, way, check, FUSED, 10_000, seed, world=world, timeout=600)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", departures.WAYS)
def test_cuda_graphs(gpu_ranks, seed, way, world):
    check = fused_graphs.check_graphs
    gpu_ranks.run(on_device, departing, way, check, FUSED, 1000, seed, world=world, timeout=240)


@pytest.mark.parametrize("world", ENDS)
def test_two_streams(gpu_ranks, seed, world):
    gpu_ranks.run(on_device, fused_behaviour.check_two_streams, FUSED, 1000, seed, world=world, timeout=240)


# These make groups, in which every rank of the pool has to take part.


@pytest.mark.parametrize("check", [fused_graphs.check_capture_needs_memory, fused_graphs.check_reserve])
def test_memory_and_captures(gpu_ranks, seed, check):
    gpu_ranks.run(on_device, check, FUSED, seed)


@pytest.mark.skipif(COUNT < 4 or COUNT % 2 == 1, reason="a grid of groups needs 4, 6 or 8 GPUs")
def test_two_groups(gpu_ranks, seed):
    gpu_ranks.run(on_device, fused_behaviour.check_two_groups, FUSED, 2000, seed, timeout=240)


@pytest.mark.timeout(600)
def test_groups_come_and_go(gpu_ranks, seed):
    gpu_ranks.run(on_device, fused_behaviour.check_groups_come_and_go, FUSED, 200, seed, timeout=500)


def test_beside_other_collectives(gpu_ranks, seed):
    check = fused_behaviour.check_beside_collectives
    gpu_ranks.run(on_device, check, FUSED, 1000, seed, timeout=240)


def test_disagreement(gpu_ranks):
    gpu_ranks.run(on_device, fused_behaviour.check_disagreement, FUSED)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiler(gpu_ranks, backend):
    gpu_ranks.run(on_device, fused_gradients.check_compile, FUSED, backend, world=2, timeout=240)


@pytest.mark.parametrize("kind", list(fused_behaviour.STALLS))
def test_a_stalled_rank_is_reported(kind):
    """Without TPK_CHECK, whose collective would wait for that rank; NCCL's watchdog is not to end the process first."""
    env = {"TPK_CHECK": "0", "TPK_COMM_TIMEOUT_S": str(LIMIT), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with RankPool(COUNT, "nccl", timeout=120.0, env=env) as pool:
        answers = pool.run(on_device, fused_behaviour.check_stalled, kind)
    fused_behaviour.judge_stalled(kind, answers, LIMIT)

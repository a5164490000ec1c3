"""csrc/comm on a GPU: flags, barriers and copies, compiled alone by NVRTC (CuPy RawModule), as kernels use them.

Every wait is bounded and every kernel counts what it saw, so a broken primitive fails a test; it does not hang it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

cp: Any = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

pytestmark = pytest.mark.gpu1

INCLUDE = Path(__file__).resolve().parents[2] / "csrc"
TIMEOUT_NS = 5_000_000_000
LATE = 1_000_000  # added to an error count by a wait that timed out

SOURCE = r"""
#include "comm/barrier.cuh"
#include "comm/copy.cuh"
#include "comm/flags.cuh"

using namespace tpk::comm;
constexpr u32 kLate = 1000000;

// Pairs of CTAs: the even one writes `words` words and raises the epoch, the odd one checks and acknowledges.
template <Scope kScope>
__device__ void pass_messages(u32* data, u32* flags, u32 words, u32 rounds, u32 start, u64 timeout, u32* errors) {
  const u32 pair = blockIdx.x / 2;
  const bool sends = blockIdx.x % 2 == 0;
  u32* mine = data + pair * words;
  u32* sent = flags + pair * 64;
  u32* taken = sent + 32;
  __shared__ bool late;
  for (u32 i = 1; i <= rounds; ++i) {
    const u32 epoch = start + i;
    if (sends) {
      for (u32 w = threadIdx.x; w < words; w += blockDim.x) mine[w] = epoch * 2654435761u + w;
      __syncthreads();
      if (threadIdx.x == 0) {
        store_release<kScope>(sent, epoch);
        late = !wait_epoch<kScope>(taken, epoch, timeout);
      }
      __syncthreads();
    } else {
      if (threadIdx.x == 0) late = !wait_epoch<kScope>(sent, epoch, timeout);
      __syncthreads();
      u32 wrong = 0;
      for (u32 w = threadIdx.x; w < words; w += blockDim.x) wrong += mine[w] != epoch * 2654435761u + w;
      if (wrong) atomicAdd(errors, wrong);
      __syncthreads();
      if (threadIdx.x == 0) store_release<kScope>(taken, epoch);
    }
    if (late) {
      if (threadIdx.x == 0) atomicAdd(errors, kLate);
      return;
    }
    __syncthreads();
  }
}

extern "C" __global__ void messages_gpu(u32* data, u32* flags, u32 words, u32 rounds, u32 start, u64 timeout,
                                        u32* errors) {
  pass_messages<Scope::kGpu>(data, flags, words, rounds, start, timeout, errors);
}
extern "C" __global__ void messages_sys(u32* data, u32* flags, u32 words, u32 rounds, u32 start, u64 timeout,
                                        u32* errors) {
  pass_messages<Scope::kSys>(data, flags, words, rounds, start, timeout, errors);
}

extern "C" __global__ void compare_epochs(const u32* seen, const u32* expected, int* reached, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) reached[i] = epoch_reached(seen[i], expected[i]);
}

// result: [reached, last value seen, nanoseconds / 1000]
extern "C" __global__ void wait_in_vain(const u32* flag, u32 expected, u64 timeout, u32* result) {
  const u64 start = now_ns();
  u32 seen = 0;
  result[0] = wait_epoch<Scope::kGpu>(flag, expected, timeout, &seen);
  result[1] = seen;
  result[2] = (u32)((now_ns() - start) / 1000);
}

// Many CTAs add to one counter; one waits for the sum and must see all their data.
extern "C" __global__ void gather_additions(u32* data, u32* counter, u32* tickets, u64 timeout, u32* errors) {
  const u32 last = gridDim.x - 1;
  if (threadIdx.x == 0) atomicAdd(tickets + 1 + take_ticket(tickets), 1);
  if (blockIdx.x != last) {
    data[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x * 7 + threadIdx.x + 1;
    __syncthreads();
    if (threadIdx.x == 0) add_release<Scope::kGpu>(counter, 1);
    return;
  }
  bool late = threadIdx.x == 0 && !wait_epoch<Scope::kGpu>(counter, last, timeout);
  if (__syncthreads_or(late)) {
    if (threadIdx.x == 0) atomicAdd(errors, kLate);
    return;
  }
  for (u32 b = 0; b < last; ++b) {
    if (data[b * blockDim.x + threadIdx.x] != b * 7 + threadIdx.x + 1) atomicAdd(errors, 1);
  }
}

// Each CTA writes the round into its slot; after the barrier all slots must hold it.
extern "C" __global__ void rounds_of_grid_barrier(u32* counter, u32* slots, u32 rounds, u32 base, u64 timeout,
                                                  u32* errors) {
  for (u32 r = 1; r <= rounds; ++r) {
    if (threadIdx.x == blockDim.x - 1) slots[blockIdx.x] = r;
    if (!grid_barrier(counter, gridDim.x, 2 * r - 1, timeout, base)) {
      atomicAdd(errors, kLate);
      return;
    }
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) if (slots[b] != r) atomicAdd(errors, 1);
    if (!grid_barrier(counter, gridDim.x, 2 * r, timeout, base)) {
      atomicAdd(errors, kLate);
      return;
    }
  }
}

// CTAs as ranks: words is an array of gridDim.x pointers to arrays of gridDim.x words.
extern "C" __global__ void rounds_of_flag_barrier(u32* const* words, u32* slots, u32 rounds, u32 start, u64 timeout,
                                                  u32* errors) {
  for (u32 r = 1; r <= rounds; ++r) {
    if (threadIdx.x == blockDim.x - 1) slots[blockIdx.x] = r;
    const u32 epoch = start + 2 * r;
    if (!flag_barrier<Scope::kSys>(words, gridDim.x, blockIdx.x, epoch - 1, timeout)) {
      atomicAdd(errors, kLate);
      return;
    }
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) if (slots[b] != r) atomicAdd(errors, 1);
    if (!flag_barrier<Scope::kSys>(words, gridDim.x, blockIdx.x, epoch, timeout)) {
      atomicAdd(errors, kLate);
      return;
    }
  }
}

// One participant that the other never joins. result: [ok of thread 0, ok of the last thread, late peer]
extern "C" __global__ void lonely_barriers(u32* counter, u32* const* words, u64 timeout, u32* result) {
  const bool grid = grid_barrier(counter, 2, 1, timeout);
  const bool flag = flag_barrier<Scope::kGpu>(words, 2, 0, 1, timeout, result + 2);
  if (threadIdx.x == 0) result[0] = grid + 2 * flag;
  if (threadIdx.x == blockDim.x - 1) result[1] = grid + 2 * flag;
}

// cases: [source offset, target offset, bytes] in bytes, one case a CTA at a time.
extern "C" __global__ void copies(const u64* cases, u32 count, char* dst, const char* src) {
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    copy_bytes(dst + cases[3 * i + 1], src + cases[3 * i], cases[3 * i + 2]);
  }
}
"""


@pytest.fixture(scope="module")
def kernels() -> Any:
    module = cp.RawModule(code=SOURCE, options=("--std=c++17", f"-I{INCLUDE}"))
    module.compile()
    return module


def launch(kernels: Any, name: str, grid: int, block: int, *args: Any) -> None:
    """Launches and waits, so that a failure is this kernel's."""
    kernels.get_function(name)((grid,), (block,), args)
    cp.cuda.Device().synchronize()


def multiprocessors() -> int:
    return int(cp.cuda.Device().attributes["MultiProcessorCount"])


def u32(value: int) -> Any:
    return np.uint32(value % 2**32)


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("start", [0, 2**31 - 500, 2**32 - 500], ids=["zero", "sign", "wrap"])
def test_messages_arrive_whole(kernels: Any, scope: str, start: int) -> None:
    pairs, words, rounds = max(1, multiprocessors() // 2), 300, 2000
    data = cp.zeros(pairs * words, cp.uint32)
    flags = cp.full(pairs * 64, u32(start), cp.uint32)
    errors = cp.zeros(1, cp.uint32)
    args = (data, flags, u32(words), u32(rounds), u32(start), np.uint64(TIMEOUT_NS), errors)
    launch(kernels, f"messages_{scope}", 2 * pairs, 128, *args)
    assert int(errors[0]) == 0, (
        f"{int(errors[0]) % LATE} stale words, {int(errors[0]) // LATE} waits timed out"
    )


def test_epochs_compare_across_wrap(kernels: Any) -> None:
    seen = [5, 5, 5, 0, 2**32 - 1, 3, 2**31, 2**31 - 1]
    expected = [5, 4, 6, 2**32 - 1, 0, 2**32 - 3, 1, 0]
    want = [1, 1, 0, 1, 0, 1, 1, 1]
    reached = cp.full(len(seen), -1, cp.int32)
    args = (cp.asarray(seen, cp.uint32), cp.asarray(expected, cp.uint32), reached, np.int32(len(seen)))
    launch(kernels, "compare_epochs", 1, 32, *args)
    assert reached.get().tolist() == want


def test_a_wait_expires_and_says_what_it_saw(kernels: Any) -> None:
    flag = cp.full(1, 41, cp.uint32)
    result = cp.zeros(3, cp.uint32)
    launch(kernels, "wait_in_vain", 1, 1, flag, u32(42), np.uint64(50_000_000), result)
    reached, seen, microseconds = result.get().tolist()
    assert (reached, seen) == (0, 41)
    assert 45_000 <= microseconds < 2_000_000
    launch(kernels, "wait_in_vain", 1, 1, flag, u32(41), np.uint64(50_000_000), result)
    assert result.get().tolist()[:2] == [1, 41], "the device must go on working after a wait that expired"


def test_additions_release_all_data_and_tickets_are_dense(kernels: Any) -> None:
    blocks, threads = multiprocessors(), 64
    for _ in range(50):
        data = cp.zeros(blocks * threads, cp.uint32)
        counter, errors = cp.zeros(1, cp.uint32), cp.zeros(1, cp.uint32)
        tickets = cp.zeros(blocks + 1, cp.uint32)
        args = (data, counter, tickets, np.uint64(TIMEOUT_NS), errors)
        launch(kernels, "gather_additions", blocks, threads, *args)
        assert int(errors[0]) == 0
        assert tickets.get().tolist() == [blocks] + [1] * blocks


@pytest.mark.parametrize("base", [0, 2**32 - 12345], ids=["zero", "wrap"])
def test_grid_barrier_orders_all_ctas(kernels: Any, base: int) -> None:
    blocks, rounds = multiprocessors(), 500
    counter = cp.full(1, u32(base), cp.uint32)
    slots, errors = cp.zeros(blocks, cp.uint32), cp.zeros(1, cp.uint32)
    args = (counter, slots, u32(rounds), u32(base), np.uint64(TIMEOUT_NS), errors)
    launch(kernels, "rounds_of_grid_barrier", blocks, 96, *args)
    assert int(errors[0]) == 0
    assert int(counter[0]) == (base + 2 * rounds * blocks) % 2**32


@pytest.mark.parametrize("peers", [1, 2, 8, 100])
def test_flag_barrier_orders_all_peers(kernels: Any, peers: int) -> None:
    peers, rounds, start = min(peers, multiprocessors()), 500, 2**32 - 400
    words = cp.full((peers, peers), u32(start), cp.uint32)
    pointers = cp.asarray([words.data.ptr + 4 * peers * p for p in range(peers)], cp.uint64)
    slots, errors = cp.zeros(peers, cp.uint32), cp.zeros(1, cp.uint32)
    args = (pointers, slots, u32(rounds), u32(start), np.uint64(TIMEOUT_NS), errors)
    launch(kernels, "rounds_of_flag_barrier", peers, 64, *args)
    assert int(errors[0]) == 0
    assert (words == u32(start + 2 * rounds)).all()


def test_barriers_that_nobody_joins_expire_for_all_threads(kernels: Any) -> None:
    counter, result = cp.zeros(1, cp.uint32), cp.full(3, 99, cp.uint32)
    words = cp.zeros((2, 2), cp.uint32)
    pointers = cp.asarray([words.data.ptr, words.data.ptr + 8], cp.uint64)
    launch(kernels, "lonely_barriers", 1, 64, counter, pointers, np.uint64(20_000_000), result)
    assert result.get().tolist() == [0, 0, 1]


@pytest.mark.parametrize("threads", [32, 96, 256])
def test_copies_of_any_size_and_alignment(kernels: Any, threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 100, 255, 1000, 4097, 16 * 256 * 4, 70001]
    skews = [(0, 0), (1, 1), (3, 7), (2, 6), (4, 12), (8, 8), (5, 13), (0, 15), (9, 0)]
    cases, at = [], 0
    for size in sizes:
        for source_skew, target_skew in skews:
            cases.append((at + source_skew, at + target_skew, size))
            at += (size + 64) // 16 * 16  # room for the skew and at least 16 bytes of canary
    source = random.integers(0, 256, at + 64, dtype=np.uint8)
    target = random.integers(0, 256, at + 64, dtype=np.uint8)
    want = target.copy()
    for src, dst, size in cases:
        want[dst : dst + size] = source[src : src + size]
    on_device, table = cp.asarray(target), cp.asarray(np.asarray(cases, np.uint64))
    launch(kernels, "copies", 64, threads, table, u32(len(cases)), on_device, cp.asarray(source))
    wrong = np.flatnonzero(on_device.get() != want)
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[:5].tolist()}"

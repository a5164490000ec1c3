// Copies between GPUs by SMs, and flags: the transports that the link suite measures.
//
// A launch of G CTAs (one an SM: they are meant to take the shared memory or the threads of a whole one) does
// `count` jobs of `bytes` bytes each. Any alignment and size is right; 16-byte aligned ones are fast.
//
//   bulk_copy    bulk copies through shared memory, driven by one thread: loads run kStages - kStoring pieces
//                ahead, kStoring stores drain behind. Little state: 8 CTAs fill an NVLink 4 port of H100.
//   bulk_spread  the same, where all jobs have the first one's source: each piece is loaded once and stored
//                `count` times (an all-gather that pushes).
//   lsu_copy     16-byte loads and stores of kLsuThreads threads.
//   lsu_spread   the same with one source.
//
// With flags, the last CTA to finish stores `epoch` to every job's flag, after which whoever acquires it at
// system scope sees the data. Waits are bounded; one that expires is counted in *late, and then nothing is
// promised.
//
// Compiled by NVRTC (bench/kernels/__init__.py); nvcc -arch=sm_90 -std=c++17 -I csrc works too.
#include "bulk.cuh"
#include "comm/copy.cuh"
#include "comm/flags.cuh"

namespace tpk::bench {

constexpr u32 kPieceBytes = 16384;  // of a stage: larger ones gain nothing, smaller ones cost instructions
constexpr u32 kStages = 12;         // 192 KiB of dynamic shared memory
constexpr u32 kStoring = 4;
constexpr u32 kBulkThreads = 32;  // more would only help copies that are not aligned
constexpr u32 kLsuThreads = 1024;
constexpr u64 kPieceTimeout = 2000000000;  // ns; a piece takes microseconds

struct Job {
  char* dst;
  const char* src;
  u32* flag;  // may be null
};

// After this CTA's part of all jobs. Thread 0 has waited for its bulk stores.
__device__ __forceinline__ void raise_flags(const Job* __restrict__ jobs, u32 count, u32 epoch,
                                            u32* finished) {
  if (jobs[0].flag == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  // The counter is never reset: every launch adds gridDim.x, and it starts at a multiple of it.
  if ((comm::take_ticket(finished) + 1) % gridDim.x != 0) return;
  fence_system();
#pragma unroll 1
  for (u32 j = 0; j < count; ++j) comm::store_release<comm::Scope::kSys>(jobs[j].flag, epoch);
}

__device__ __forceinline__ bool aligned(const Job* __restrict__ jobs, u32 count) {
  u64 bits = 0;
#pragma unroll 1
  for (u32 j = 0; j < count; ++j) {
    bits |= reinterpret_cast<u64>(jobs[j].dst) | reinterpret_cast<u64>(jobs[j].src);
  }
  return bits % 16 == 0;
}

// This CTA's share of every job, by all its threads.
__device__ __forceinline__ void copy_share(const Job* __restrict__ jobs, u32 count, u64 bytes) {
  const u64 share = (bytes / gridDim.x + 128) / 128 * 128;  // times gridDim.x at least bytes
  const u64 begin = blockIdx.x * share;
  if (begin >= bytes) return;
  const u64 size = bytes - begin < share ? bytes - begin : share;
#pragma unroll 1
  for (u32 j = 0; j < count; ++j) comm::copy_bytes(jobs[j].dst + begin, jobs[j].src + begin, size);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The pieces p = blockIdx.x, blockIdx.x + gridDim.x, ... of all jobs, by one thread. body: bytes of a job, a
// multiple of 16; piece: at most kPieceBytes, a multiple of 16.
template <bool kSpread>
__device__ __forceinline__ bool move_pieces(const Job* __restrict__ jobs, u32 count, u64 body, u32 piece,
                                            u32 stages, u32 full) {
  const u32 per_job = static_cast<u32>((body + piece - 1) / piece);
  const u32 total = kSpread ? per_job : per_job * count;
  const u32 mine = blockIdx.x < total ? (total - blockIdx.x - 1) / gridDim.x + 1 : 0;
  const auto locate = [&](u32 k, u32* job, u64* offset) {  // returns the size of my k-th piece
    const u32 p = blockIdx.x + k * gridDim.x;
    *job = kSpread ? 0 : p / per_job;
    *offset = static_cast<u64>(kSpread ? p : p - *job * per_job) * piece;
    return static_cast<u32>(body - *offset < piece ? body - *offset : piece);
  };
  const auto load = [&](u32 k) {
    u32 job;
    u64 offset;
    const u32 size = locate(k, &job, &offset);
    const u32 barrier = full + k % kStages * 8;
    barrier_expect(barrier, size);
    bulk_load(stages + k % kStages * kPieceBytes, jobs[job].src + offset, size, barrier);
  };

  for (u32 s = 0; s < kStages; ++s) barrier_init(full + s * 8);
  fence_barrier_init();
#pragma unroll 1
  for (u32 k = 0; k < kStages && k < mine; ++k) load(k);
  bool ok = true;
  for (u32 k = 0; k < mine; ++k) {
    ok = barrier_wait(full + k % kStages * 8, k / kStages % 2, kPieceTimeout);
    if (!ok) break;
    u32 job;
    u64 offset;
    const u32 size = locate(k, &job, &offset);
    const u32 stage = stages + k % kStages * kPieceBytes;
    if (kSpread) {
      // CTAs begin with different peers, so that no port is asked by all of them at once.
#pragma unroll 1
      for (u32 j = 0; j < count; ++j) bulk_store(jobs[(j + blockIdx.x) % count].dst + offset, stage, size);
    } else {
      bulk_store(jobs[job].dst + offset, stage, size);
    }
    bulk_commit();
    if (k >= kStoring && k - kStoring + kStages < mine) {
      bulk_wait_read<kStoring>();  // the stores of piece k - kStoring have left its stage
      load(k - kStoring + kStages);
    }
  }
  bulk_wait_all();
  return ok;
}
#endif

template <bool kSpread>
__device__ __forceinline__ void bulk(const Job* __restrict__ jobs, u32 count, u64 bytes, u32 piece, u32 epoch,
                                     u32* finished, u32* late) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ __align__(8) u64 full[kStages];
  if (aligned(jobs, count)) {
    const u64 body = bytes / 16 * 16;
    if (blockIdx.x == 0 && threadIdx.x < bytes - body) {
#pragma unroll 1
      for (u32 j = 0; j < count; ++j) jobs[j].dst[body + threadIdx.x] = jobs[j].src[body + threadIdx.x];
    }
    if (threadIdx.x == 0 && !move_pieces<kSpread>(jobs, count, body, piece, shared_address(dynamic_shared()),
                                                  shared_address(full))) {
      atomicAdd(late, 1);
    }
  } else {
    copy_share(jobs, count, bytes);
  }
  raise_flags(jobs, count, epoch, finished);
#else
  if (threadIdx.x == 0) atomicAdd(late, 1);  // the loader does not offer these kernels below sm_90
#endif
}

extern "C" __global__ void __launch_bounds__(kBulkThreads)
    bulk_copy(const Job* __restrict__ jobs, u32 count, u64 bytes, u32 piece, u32 epoch, u32* finished,
              u32* late) {
  bulk<false>(jobs, count, bytes, piece, epoch, finished, late);
}

extern "C" __global__ void __launch_bounds__(kBulkThreads)
    bulk_spread(const Job* __restrict__ jobs, u32 count, u64 bytes, u32 piece, u32 epoch, u32* finished,
                u32* late) {
  bulk<true>(jobs, count, bytes, piece, epoch, finished, late);
}

extern "C" __global__ void __launch_bounds__(kLsuThreads)
    lsu_copy(const Job* __restrict__ jobs, u32 count, u64 bytes, u32 epoch, u32* finished) {
  copy_share(jobs, count, bytes);
  raise_flags(jobs, count, epoch, finished);
}

extern "C" __global__ void __launch_bounds__(kLsuThreads)
    lsu_spread(const Job* __restrict__ jobs, u32 count, u64 bytes, u32 epoch, u32* finished) {
  constexpr u32 kBatch = 4;  // loads in flight before the first store
  if (!aligned(jobs, count)) {
    copy_share(jobs, count, bytes);
  } else {
    const uint4* src = reinterpret_cast<const uint4*>(jobs[0].src);
    const u64 words = bytes / 16;
    const u64 share = words / gridDim.x + 1;  // times gridDim.x more than words
    const u64 begin = blockIdx.x * share;
    const u64 end = begin + share < words ? begin + share : words;
#pragma unroll 1
    for (u64 i = begin + threadIdx.x; i < end; i += kBatch * kLsuThreads) {
      uint4 v[kBatch];
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        if (i + b * kLsuThreads < end) v[b] = src[i + b * kLsuThreads];
      }
#pragma unroll 1
      for (u32 j = 0; j < count; ++j) {
        uint4* out = reinterpret_cast<uint4*>(jobs[(j + blockIdx.x) % count].dst);
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) {
          if (i + b * kLsuThreads < end) out[i + b * kLsuThreads] = v[b];
        }
      }
    }
    if (blockIdx.x == 0 && threadIdx.x < bytes % 16) {
      const u64 at = words * 16 + threadIdx.x;
#pragma unroll 1
      for (u32 j = 0; j < count; ++j) jobs[j].dst[at] = jobs[j].src[at];
    }
  }
  raise_flags(jobs, count, epoch, finished);
}

// `rounds` round trips of a flag between two ranks, by one thread on each: the one that leads stores an epoch
// at the other and waits for it to come back.
extern "C" __global__ void flag_round_trips(const u32* mine, u32* theirs, u32 rounds, u32 first_epoch,
                                            u32 leads, u64 timeout_ns, u32* late) {
  for (u32 i = 0; i < rounds; ++i) {
    const u32 epoch = first_epoch + i;
    if (leads) comm::store_release<comm::Scope::kSys>(theirs, epoch);
    if (!comm::wait_epoch<comm::Scope::kSys>(mine, epoch, timeout_ns)) {
      atomicAdd(late, 1);
      return;
    }
    if (!leads) comm::store_release<comm::Scope::kSys>(theirs, epoch);
  }
}

// Ends when all flags have reached the epoch: what comes next on the stream sees what was released with them.
extern "C" __global__ void wait_flags(const u32* flags, u32 count, u32 epoch, u64 timeout_ns, u32* late) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    if (!comm::wait_epoch<comm::Scope::kSys>(flags + i, epoch, timeout_ns)) atomicAdd(late, 1);
  }
}

}  // namespace tpk::bench

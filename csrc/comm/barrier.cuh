// Barriers over flags: among the CTAs of one device, and among ranks.
//
// Every participant must be resident or certain to become so without the others' leaving: a barrier among
// more CTAs than fit on the device can only time out. Waits are bounded; a barrier that returns false
// orders nothing, and its words must not be used again.
//
// Self-contained: compiles under nvcc and NVRTC.
#pragma once

#include "comm/flags.cuh"

namespace tpk::comm {

// Barrier among `blocks` CTAs of one device over one counter word, which nobody else writes. All threads
// of each CTA call it, with round = 1, 2, 3, ... and the counter zero before round 1 (or, more generally,
// base + (round - 1) * blocks before each round; arithmetic is modulo 2^32).
// Returns the same value to all threads of a CTA. True: every memory operation that any thread of
// any of the CTAs made before the call is visible to every thread of every CTA after it, at gpu scope.
__device__ __forceinline__ bool grid_barrier(u32* counter, u32 blocks, u32 round, u64 timeout_ns,
                                             u32 base = 0) {
  __syncthreads();  // orders the CTA's operations before thread 0's release
  bool late = false;
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    add_release<Scope::kGpu>(counter, 1u);
    late = !wait_epoch<Scope::kGpu>(counter, base + round * blocks, timeout_ns);
  }
  return __syncthreads_or(late) == 0;  // and thread 0's acquire before the CTA's later operations
}

// Barrier among `peers` participants (ranks, or CTAs), each of which owns an array of `peers` words that
// the others write: participant self stores `epoch` to word `self` of every participant's array, then
// waits until all words of its own array have reached it. words[p] is participant p's array (a peer's memory
// mapped here). Each word has a single writer; epochs grow by one a call and are never reset, so graph
// replays and eager calls may alternate. All threads of one CTA call it; any number of threads, any number of
// peers. Returns the same value to all threads. True: every memory operation that this CTA's threads of each
// participant made before its call is visible to all threads of this CTA after it, at kScope.
// *late_peer (if given, in memory that all threads may write) names one that did not come; untouched
// otherwise.
template <Scope kScope>
__device__ __forceinline__ bool flag_barrier(u32* const* words, u32 peers, u32 self, u32 epoch,
                                             u64 timeout_ns, u32* late_peer = nullptr) {
  __syncthreads();
  const u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const u32 threads = blockDim.x * blockDim.y * blockDim.z;
  bool late = false;
  for (u32 p = thread; p < peers; p += threads) store_release<kScope>(words[p] + self, epoch);
  for (u32 p = thread; p < peers; p += threads) {
    if (!wait_epoch<kScope>(words[self] + p, epoch, timeout_ns)) {
      late = true;
      if (late_peer != nullptr) *late_peer = p;
    }
  }
  return __syncthreads_or(late) == 0;
}

}  // namespace tpk::comm

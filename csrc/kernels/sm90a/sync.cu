// The beginning of a call among ranks, and the end of an all-reduce: see host/protocol.hpp.
#include "kernels/sm90a/sync.hpp"

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

static_assert(protocol::kMaxRanks <= kSyncThreads, "Each peer has a thread.");

// Tells every peer that this rank has come to the next epoch, waits until all have, and begins it.
__global__ void __launch_bounds__(kSyncThreads) enter_kernel(const __grid_constant__ SyncParams p) {
  const comm::DeviceMemory memory{p.timeout_ns};
  const protocol::Page& mine = p.pages[p.rank];
  const int peer = static_cast<int>(threadIdx.x);
  const uint32_t epoch = protocol::epoch_of(memory, mine) + 1;
  if (peer < p.world && peer != p.rank) {
    protocol::publish_entered(memory, p.pages[peer], p.rank, epoch);
    protocol::Missed missed;
    if (!protocol::peer_entered(memory, mine, peer, epoch, &missed)) {
      report_late({p.timeout_ns, p.fault}, FaultKind::kEntered, missed.index, 0, missed.seen, missed.expected,
                  missed.peer);
    }
  }
  // Not before: a product that has started holds multiprocessors, which a rank that is late may need first.
  __syncwarp();
  allow_later_kernels();
  for (int32_t c = p.here_begin + peer; c < p.here_end; c += kSyncThreads) *mine.arrived(c) = epoch;
  __syncwarp();
  if (peer == 0) protocol::advance_epoch(memory, mine, epoch);
}

// Rows [begin, end), by all threads of the launch together. Loads go around L1, which knows of no peers.
__device__ __forceinline__ void copy_rows(const CollectParams& c, int64_t begin, int64_t end) {
  const int64_t first = int64_t{blockIdx.x} * kCollectThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kCollectThreads;
  if (c.row_bytes == c.pitch) {
    const auto* from = reinterpret_cast<const uint4*>(c.results + begin * c.pitch);
    auto* to = reinterpret_cast<uint4*>(c.out + begin * c.pitch);
    const int64_t total = (end - begin) * c.pitch / static_cast<int64_t>(sizeof(uint4));
#pragma unroll 4
    for (int64_t i = first; i < total; i += step) to[i] = __ldcg(from + i);
    return;
  }
  using Unit = unsigned short;  // no element is smaller
  const int64_t units = c.row_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = first; i < (end - begin) * units; i += step) {
    const int64_t row = begin + i / units;
    const auto* from = reinterpret_cast<const Unit*>(c.results + row * c.pitch);
    reinterpret_cast<Unit*>(c.out + row * c.row_bytes)[i % units] = __ldcg(from + i % units);
  }
}

__global__ void __launch_bounds__(kCollectThreads)
    collect_kernel(const __grid_constant__ SyncParams p, const __grid_constant__ CollectParams c) {
  const comm::DeviceMemory memory{p.timeout_ns};
  const protocol::Page& mine = p.pages[p.rank];
  const uint32_t epoch = protocol::epoch_of(memory, mine);
  // In the order in which they arrive: the first chunk of every rank, then the second ones.
  bool more = true;
  for (int32_t nth = 0; more; ++nth) {
    more = false;
    for (int step = 0; step < p.world; ++step) {
      const int owner = (p.rank + step) % p.world;
      const int32_t i = c.chunks.first[owner] + nth;
      if (i >= c.chunks.first[owner + 1]) continue;
      more = true;
      if (owner == p.rank && !c.with_own) continue;
      if (owner != p.rank && threadIdx.x == 0) {
        protocol::Missed missed;
        const bool here = c.gathered ? protocol::wait_arrived(memory, mine, i, owner, epoch, &missed)
                                     : protocol::wait_sums(memory, mine, i, owner, epoch, &missed);
        if (!here) {
          report_late({p.timeout_ns, p.fault}, c.gathered ? FaultKind::kChunk : FaultKind::kResult,
                      c.gathered ? i : owner, c.gathered ? 0 : i, missed.seen, missed.expected, owner);
        }
      }
      __syncthreads();
      if (c.out != nullptr) copy_rows(c, c.chunks.begin(i), c.chunks.row_end[i]);
    }
  }
}

const void* enter_function() { return reinterpret_cast<const void*>(&enter_kernel); }
const void* collect_function() { return reinterpret_cast<const void*>(&collect_kernel); }

}  // namespace tpk::sm90a

// The ends of a call among ranks: see host/protocol.hpp. A thread for each peer.
#include "kernels/sm90a/sync.hpp"

#include "kernels/sm90a/fault.cuh"

namespace tpk::sm90a {

static_assert(protocol::kMaxRanks <= kSyncThreads, "Each peer has a thread.");

// Waits until every peer has read what the last call brought to it, then begins an epoch.
__global__ void __launch_bounds__(kSyncThreads) enter_kernel(const __grid_constant__ SyncParams p) {
  const comm::DeviceMemory memory{p.timeout_ns};
  const protocol::Page& mine = p.pages[p.rank];
  const int peer = static_cast<int>(threadIdx.x);
  const uint32_t last = protocol::epoch_of(memory, mine);
  protocol::Missed missed;
  if (peer < p.world && peer != p.rank && !protocol::peer_consumed(memory, mine, peer, last, &missed)) {
    report_late({p.timeout_ns, p.fault}, FaultKind::kConsumed, missed.index, 0, missed.seen, missed.expected,
                missed.peer);
  }
  __syncwarp();
  if (peer == 0) protocol::advance_epoch(memory, mine, last);
}

// Tells every peer that this rank has read what the call brought to it.
__global__ void __launch_bounds__(kSyncThreads) leave_kernel(const __grid_constant__ SyncParams p) {
  const comm::DeviceMemory memory{p.timeout_ns};
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= p.world || peer == p.rank) return;
  protocol::publish_consumed(memory, p.pages[peer], p.rank, protocol::epoch_of(memory, p.pages[p.rank]));
}

// Waits until what every peer in `ranks` sends behind word first + peer is here.
__global__ void __launch_bounds__(kSyncThreads)
    wait_kernel(const __grid_constant__ SyncParams p, int32_t first, uint32_t ranks) {
  const comm::DeviceMemory memory{p.timeout_ns};
  const protocol::Page& mine = p.pages[p.rank];
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= p.world || peer == p.rank || (ranks >> peer & 1) == 0) return;
  protocol::Missed missed;
  const uint32_t epoch = protocol::epoch_of(memory, mine);
  if (!protocol::wait_arrived(memory, mine, first + peer, peer, epoch, &missed)) {
    report_late({p.timeout_ns, p.fault}, FaultKind::kResult, peer, 0, missed.seen, missed.expected, peer);
  }
}

const void* enter_function() { return reinterpret_cast<const void*>(&enter_kernel); }
const void* wait_function() { return reinterpret_cast<const void*>(&wait_kernel); }
const void* leave_function() { return reinterpret_cast<const void*>(&leave_kernel); }

}  // namespace tpk::sm90a

// What a kernel says before it stops: a record in host memory that the launcher turns into a sentence. printf
// would be a function call, and ptxas serialises wgmma in kernels that have one.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

// Where a bounded wait is reported, and its bound.
struct WaitBound {
  uint64_t timeout_ns;
  FaultRecord* record;
};

// Fills the record, unless another thread does, and traps. The launch fails; its output must not be used.
__device__ __forceinline__ void report_late(const WaitBound& bound, FaultKind kind, int index, int part,
                                            uint32_t seen, uint32_t expected, int peer = -1) {
  FaultRecord* const record = bound.record;
  if (atomicCAS_system(&record->kind, 0u, static_cast<uint32_t>(FaultKind::kFilling)) == 0u) {
    record->cta = blockIdx.x;
    record->index = index;
    record->part = part;
    record->peer = peer;
    record->seen = seen;
    record->expected = expected;
    record->timeout_ms = static_cast<uint32_t>(bound.timeout_ns / 1000000);
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&record->kind) = static_cast<uint32_t>(kind);
    __threadfence_system();
  }
  // A trap ends the other threads too, who may be filling it.
  const auto filling = static_cast<uint32_t>(FaultKind::kFilling);
  for (int i = 0; i < 100000 && *static_cast<volatile uint32_t*>(&record->kind) == filling; ++i)
    __nanosleep(100);
  __trap();
}

// Waits (bounded) until *flag has reached `expected`; see comm::wait_epoch. peer(): the rank that raises it.
template <comm::Scope kScope, class Peer>
__device__ __forceinline__ void wait_or_fail(const uint32_t* flag, uint32_t expected, const WaitBound& bound,
                                             FaultKind kind, int index, int part, Peer peer) {
  uint32_t seen;
  if (!comm::wait_epoch<kScope>(flag, expected, bound.timeout_ns, &seen)) {
    report_late(bound, kind, index, part, seen, expected, peer());
  }
}

__device__ __forceinline__ int no_peer() { return -1; }

}  // namespace tpk::sm90a

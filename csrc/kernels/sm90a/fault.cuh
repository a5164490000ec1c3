// What a kernel says before it stops: a record in host memory that the launcher turns into a sentence. printf
// would be a function call, and ptxas serialises wgmma in kernels that have one.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

// Fills the record, unless another thread did, and traps. The launch fails; its output must not be used.
__device__ __forceinline__ void report_late(FaultRecord* record, FaultKind kind, int index, int part,
                                            uint32_t seen, uint32_t expected) {
  if (atomicCAS_system(&record->kind, 0u, static_cast<uint32_t>(FaultKind::kFilling)) == 0u) {
    record->cta = blockIdx.x;
    record->index = index;
    record->part = part;
    record->seen = seen;
    record->expected = expected;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&record->kind) = static_cast<uint32_t>(kind);
    __threadfence_system();
  }
  __trap();
}

// Waits (bounded) until *flag has reached `expected`; see comm::wait_epoch.
template <comm::Scope kScope>
__device__ __forceinline__ void wait_or_fail(const uint32_t* flag, uint32_t expected, uint64_t timeout_ns,
                                             FaultRecord* record, FaultKind kind, int index, int part) {
  uint32_t seen;
  if (!comm::wait_epoch<kScope>(flag, expected, timeout_ns, &seen)) {
    report_late(record, kind, index, part, seen, expected);
  }
}

}  // namespace tpk::sm90a

// See sync.cu.
#pragma once

#include <cstdint>

#include "host/protocol.hpp"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

struct SyncParams {
  protocol::Page pages[protocol::kMaxRanks];
  int32_t world = 1;
  int32_t rank = 0;
  uint64_t timeout_ns = 0;
  FaultRecord* fault = nullptr;
};

// For cudaLaunchKernelExC, one CTA of kSyncThreads; argument: SyncParams.
constexpr int kSyncThreads = 32;
const void* enter_function();
const void* leave_function();
// Behind what still runs: waits for a word of every peer that has rows. Arguments: SyncParams, int32_t first
// (the word of rank 0), uint32_t ranks (a bit for each with rows).
const void* wait_function();

}  // namespace tpk::sm90a

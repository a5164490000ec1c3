// See sync.cu.
#pragma once

#include <cstdint>

#include "host/protocol.hpp"
#include "host/pushes.hpp"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

struct SyncParams {
  protocol::Page pages[protocol::kMaxRanks];
  int32_t world = 1;
  int32_t rank = 0;
  // Chunks [here_begin, here_end) of a gather come from nobody: enter says that they are there. What reads
  // them stands behind what writes them, on one stream.
  int32_t here_begin = 0;
  int32_t here_end = 0;
  uint64_t timeout_ns = 0;
  FaultRecord* fault = nullptr;
};

// For cudaLaunchKernelExC, one CTA of kSyncThreads; argument: SyncParams.
constexpr int kSyncThreads = 32;
const void* enter_function();

// Rows that every rank gets: chunk by chunk, as they arrive, from the rank's buffer to its output.
struct CollectParams {
  protocol::ChunkList chunks;
  const char* results = nullptr;  // [M, pitch bytes]: sums, or what a gather brings
  int64_t pitch = 0;
  char* out = nullptr;  // [M, row_bytes]; nullptr: wait, and leave them where they are
  int64_t row_bytes = 0;
  bool with_own = false;  // the own rows lie in `results`, too
  bool gathered = false;  // wait for `arrived`, not for `sums`
};

// Any number of CTAs of kCollectThreads; arguments: SyncParams, CollectParams.
constexpr int kCollectThreads = 512;
constexpr int kCollectCtas = 64;  // enough for the link
const void* collect_function();

}  // namespace tpk::sm90a

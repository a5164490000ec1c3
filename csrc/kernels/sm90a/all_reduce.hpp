// See all_reduce.cu.
#pragma once

#include <cstdint>

#include "host/all_reduce.hpp"
#include "kernels/gemm_types.hpp"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

// All tensors contiguous: partial, out and residual [rows, n], of one dtype; bias [n]. A scatter's out and
// residual have the rows of the own shard; so has what a gather takes for the partial.
struct AllReduceParams {
  all_reduce::Call call;
  const void* partial = nullptr;
  const void* residual = nullptr;               // or null
  const void* bias = nullptr;                   // or null
  void* out = nullptr;                          // may be partial
  int32_t elements = 0;                         // of the partial and result of an all-reduce
  int32_t firsts[all_reduce::kMaxRanks + 1]{};  // gather, scatter: elements before each shard, and of all
  int32_t n = 1;
  ScalarKind bias_kind = ScalarKind::kFp32;
  uint64_t timeout_ns = 0;
  FaultRecord* fault = nullptr;
};

// For cudaLaunchKernelExC, call.ctas CTAs of kAllReduceThreads that all run at once; argument:
// AllReduceParams. May start early (programmatic stream serialization): it waits for what comes before.
constexpr int kAllReduceThreads = 512;
const void* all_reduce_function(all_reduce::Way way, ScalarKind kind);

}  // namespace tpk::sm90a

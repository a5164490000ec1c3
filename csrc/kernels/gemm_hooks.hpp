// What a product can be tied to while it runs: operand rows that still arrive, results that someone waits
// for, and buffers that the epilogue adds. A plain product has none of the three. Pure C++.
#pragma once

#include <cstdint>

#include "kernels/gemm_types.hpp"

namespace tpk {

constexpr int kMaxChunks = 64;   // blocks of rows that arrive, or leave, together
constexpr int kMaxAddends = 16;  // peers, and a residual

// Arrival: the rows [row_end[c - 1], row_end[c]) of A, or a slab of slab_k elements of K of them, are written
// by someone else, who raises flags[c * slabs + slab] to *epoch afterwards (release, system scope). The
// kernel reads no element of a chunk before its flag has been seen, so flags and rows may be raised in any
// order; but a schedule whose first tiles need the last chunks only waits.
struct ArrivalHook {
  const uint32_t* flags = nullptr;  // null: A is complete
  const uint32_t* epoch = nullptr;  // in device memory, so that a CUDA graph may be replayed
  int32_t num_chunks = 0;
  int32_t slabs = 1;
  int32_t slab_k = 0;  // a multiple of 64, or 0: all of K
  int32_t row_end[kMaxChunks] = {};
};

// Doorbell: when every tile that has rows of a chunk is in memory, bells[c] is set to 1 (release, system
// scope). Counters must be zero before the first call and are zero after each. Chunks as above, of the
// output's rows of batch 0; batches must then be one.
struct DoorbellHook {
  uint32_t* counters = nullptr;  // null: nobody waits
  uint32_t* bells = nullptr;
  int32_t num_chunks = 0;
  int32_t row_end[kMaxChunks] = {};
  uint32_t target[kMaxChunks] = {};  // filled by the launcher
};

// A buffer that the epilogue adds in fp32, [batch, M, N]; strides in bytes. Its rows [i * flag_rows,
// (i + 1) * flag_rows) are ready when flags[i] has reached *epoch; flags null: it is ready.
struct Addend {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  ScalarKind kind = ScalarKind::kBf16;
  int32_t flag_rows = 1;
  const uint32_t* flags = nullptr;
  const uint32_t* epoch = nullptr;
};

// Added to the product in this order, before bias and activation; the residual comes after.
struct AddendHook {
  int32_t count = 0;
  Addend addends[kMaxAddends];
};

struct GemmHooks {
  ArrivalHook arrival;
  DoorbellHook doorbell;
  AddendHook sum;
};

}  // namespace tpk

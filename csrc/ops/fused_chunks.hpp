// Blocks of rows that the fused operations send as one, which their plans depend on: the ops themselves, and
// streamk_plan, which tells of their plans, cut alike.
#pragma once

#include <cstdint>
#include <vector>

#include "host/problem.hpp"
#include "host/pushes.hpp"

namespace tpk::ops {

// Elements of a row of what is gathered, [M, K], and of what is sent, [M, N]: rows begin at whole units of 16
// bytes.
inline int64_t gathered_pitch(int64_t k) { return ceil_div(k, 8) * 8; }
inline int64_t departing_pitch(int64_t n, int64_t bytes) { return ceil_div(n, 16 / bytes) * (16 / bytes); }

inline protocol::ChunkList gathered_chunks(const std::vector<int64_t>& shard_rows, int64_t k) {
  constexpr int64_t kBytes = 2;
  return protocol::cut_chunks(shard_rows, gathered_pitch(k) * kBytes);
}

// sums: those of own rows go to all ranks. stored: by the product, not by copy engines.
inline protocol::ChunkList departing_chunks(const std::vector<int64_t>& shard_rows, int64_t n, int64_t bytes,
                                            bool sums, bool stored) {
  return protocol::cut_departing(shard_rows, departing_pitch(n, bytes) * bytes, sums, stored);
}

}  // namespace tpk::ops

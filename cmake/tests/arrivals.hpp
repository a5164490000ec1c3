// Random numbers, and ranks that rows arrive from, for the tests of plans that know of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "host/pushes.hpp"
#include "kernels/sm90a/plan.hpp"

namespace tpk::test {

inline std::mt19937 generator(11);
inline int64_t pick(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(generator() % (high - low + 1));
}
inline double real(double most) { return most * static_cast<double>(generator()) / 4294967296.0; }

// What a gather of these shards tells its product.
inline sm90a::Ranks arrival_of(const std::vector<int64_t>& rows, int32_t rank, int64_t k) {
  const auto chunks = protocol::cut_chunks(rows, k * sm90a::kElementBytes);
  GemmHooks hooks;
  hooks.arrival.num_chunks = chunks.count;
  std::copy(chunks.row_end, chunks.row_end + chunks.count, hooks.arrival.row_end);
  hooks.arrival.ranks.world = static_cast<int32_t>(rows.size());
  hooks.arrival.ranks.rank = rank;
  int32_t end = 0;
  for (size_t i = 0; i < rows.size(); ++i)
    hooks.arrival.ranks.row_end[i] = end += static_cast<int32_t>(rows[i]);
  return sm90a::ranks_of(&hooks);
}
inline sm90a::Ranks even_arrival(int64_t m, int32_t world, int64_t k) {
  return arrival_of(std::vector<int64_t>(static_cast<size_t>(world), m / world), 1, k);
}

}  // namespace tpk::test

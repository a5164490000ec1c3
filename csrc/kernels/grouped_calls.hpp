// The calls that a grouped product of any number of groups takes. Pure C++.
#pragma once

#include <cstdint>
#include <vector>

#include "host/problem.hpp"
#include "kernels/grouped_rows.hpp"

namespace tpk {

// Group i has sizes[i] rows: the calls that take them all, as few as there can be, with as many groups each.
// Rows in all must be below 2^31.
inline std::vector<GroupedRows> grouped_calls(const std::vector<int64_t>& sizes) {
  int64_t left = 0;  // groups that have rows
  for (const int64_t size : sizes) left += size > 0;
  int64_t calls_left = ceil_div(left, kMaxChunks);
  std::vector<GroupedRows> calls;
  int32_t begin = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) continue;
    if (calls.empty() || calls.back().count == ceil_div(left, calls_left)) {
      if (!calls.empty()) {
        left -= calls.back().count;
        --calls_left;
      }
      calls.emplace_back().matrices = static_cast<int64_t>(sizes.size());
    }
    GroupedRows& call = calls.back();
    const int32_t end = begin + static_cast<int32_t>(sizes[i]);
    call.rows[call.count] = {begin, end};
    call.matrix[call.count++] = static_cast<int32_t>(i);
    begin = end;
  }
  return calls;
}

}  // namespace tpk

// Rows of a grouped product: each group of them is multiplied by a matrix of B of its own. Pure C++.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/gemm_hooks.hpp"

namespace tpk {

// Rows [rows[i].begin, rows[i].end) of A, and of all that is as long as it, belong to matrix[i] of B. Groups
// are not empty and follow each other; they need not cover A.
struct GroupedRows {
  int32_t count = 0;
  int64_t matrices = 0;  // that B has
  RowSpan rows[kMaxChunks] = {};
  int32_t matrix[kMaxChunks] = {};

  int64_t num_rows() const { return count == 0 ? 0 : int64_t{rows[count - 1].end} - rows[0].begin; }

  // Equal for equal groups.
  std::string key() const {
    std::string text(reinterpret_cast<const char*>(rows), count * sizeof rows[0]);
    return text.append(reinterpret_cast<const char*>(matrix), count * sizeof matrix[0]);
  }
};

}  // namespace tpk

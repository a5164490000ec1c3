// Sizes of one matrix product and of its tiles. All extents are int64: M * N may exceed 2^31.
#pragma once

#include <cstdint>

#include "host/divide.hpp"
#include "host/macros.hpp"

namespace tpk {

// For a >= 0 and b >= 1. (a + b - 1) / b would wrap near 2^63.
TPK_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
  const Division d = divide(a, b);
  return d.quotient + (d.remainder != 0);
}
TPK_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
TPK_HD constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// D[batch, m, n] = A[batch, m, k] * B[batch, k, n].
struct Problem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t batch = 1;
};

// Output tile bm x bn, advanced bk along K per iteration.
struct TileShape {
  int64_t bm = 128;
  int64_t bn = 128;
  int64_t bk = 32;
};

TPK_HD constexpr int64_t tiles_m(const Problem& p, const TileShape& t) { return ceil_div(p.m, t.bm); }
TPK_HD constexpr int64_t tiles_n(const Problem& p, const TileShape& t) { return ceil_div(p.n, t.bn); }
TPK_HD constexpr int64_t num_tiles(const Problem& p, const TileShape& t) {
  return p.batch * tiles_m(p, t) * tiles_n(p, t);
}

// Iterations per tile. K = 0 still takes one iteration (of zeros), so that every tile has an epilogue
// and "each (tile, iteration) exactly once" has no special case.
TPK_HD constexpr int64_t iters_per_tile(const Problem& p, const TileShape& t) {
  return max64(1, ceil_div(p.k, t.bk));
}

}  // namespace tpk

// Several products that are summed in one go: one pair of operands behind the other along K, each from an
// iteration of its own on. Where K of a pair ends inside an iteration, TMA fills the rest with zeros. Pure
// functions, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gemm_call.hpp"
#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

// The call's problem with K as schedules see it: of all pairs, in whole iterations but for the last one's.
inline Problem whole_problem(const GemmCall& c) {
  Problem p = c.problem;
  for (int i = 0; i < c.num_more; ++i) p.k = ceil_div(p.k, kBK) * kBK + c.more[i].k;
  return p;
}

// Where each pair ends in that K. Nothing comes behind the last one.
struct PairEnds {
  int32_t k_end[kMaxPairs];
};

inline PairEnds pair_ends(const GemmCall& c) {
  PairEnds ends;
  std::fill_n(ends.k_end, kMaxPairs, INT32_MAX);
  int64_t end = 0;
  for (int i = 0; i < c.num_more; ++i) {
    end += ceil_div(i == 0 ? c.problem.k : c.more[i - 1].k, kBK) * kBK;
    ends.k_end[i] = static_cast<int32_t>(end);
  }
  return ends;
}

// The part of [k, end) that is of one pair.
struct PairRun {
  int32_t pair;
  int32_t begin;  // where the pair begins
  int32_t end;    // where the part ends
};

TPK_HD PairRun pair_run(const PairEnds& ends, int32_t k, int32_t end) {
  PairRun run{0, 0, end};
  for (; ends.k_end[run.pair] <= k; ++run.pair) run.begin = ends.k_end[run.pair];
  if (ends.k_end[run.pair] < end) run.end = ends.k_end[run.pair];
  return run;
}

}  // namespace tpk::sm90a

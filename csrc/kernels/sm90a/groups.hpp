// Groups of rows of tiles that a schedule takes one after the other, each as waves and a remainder cut along
// K: every worker works on what has landed, instead of standing before a tile that has not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/sm90a/waits.hpp"

namespace tpk::sm90a {

// Depths of K that remainders are cut at; 1: as many as suit each best.
inline constexpr int64_t kDepths[] = {1, 2, 3, 4, 5, 6, 7, 8, 11};

struct GroupCost {
  int64_t workers = 1;
  int64_t k_iters = 1;
  int64_t min_iters = 1;
  int64_t row_tiles = 1;  // tiles in a row of tiles, over all batches
  double iter = 0;        // us
  double epilogue = 0;
  double publish = 0;
  double add = 0;
  double least = 0;  // what a group takes at least: reading B
};

// So few that partials of all of them are no burden: each may have as many as there are workers.
constexpr int64_t kMostGroups = 8;

class GroupChooser {
 public:
  GroupChooser(const std::vector<Band>& bands, const GroupCost& c) : c_(c), bands_(bands) {}

  // The division with which the last group ends first; the fewest groups among those within a microsecond.
  std::vector<int64_t> run() {
    const int64_t count = static_cast<int64_t>(bands_.size());
    constexpr double kNever = std::numeric_limits<double>::infinity();
    // ends[g][e]: bands 0 ... e - 1 in g groups; cut[g][e]: where the last of them begins.
    std::vector<std::vector<double>> ends(kMostGroups + 1, std::vector<double>(count + 1, kNever));
    std::vector<std::vector<int64_t>> cut(kMostGroups + 1, std::vector<int64_t>(count + 1, 0));
    ends[0][0] = 0;
    int64_t best = 1;
    for (int64_t g = 1; g <= min64(kMostGroups, count); ++g) {
      for (int64_t e = g; e <= count; ++e) {
        for (int64_t b = g - 1; b < e; ++b) {
          const double end = ends[g - 1][b] == kNever ? kNever : end_of(ends[g - 1][b], b, e);
          if (end < ends[g][e]) {
            ends[g][e] = end;
            cut[g][e] = b;
          }
        }
      }
      if (ends[g][count] < ends[best][count] - 1) best = g;
    }
    std::vector<int64_t> rows(static_cast<size_t>(min64(best, count)), 0);
    int64_t e = count;
    for (int64_t g = static_cast<int64_t>(rows.size()); g > 0; --g) {
      const int64_t b = cut[g][e];
      for (int64_t i = b; i < e; ++i) rows[g - 1] += bands_[i].rows;
      e = b;
    }
    return rows;
  }

 private:
  // When bands b ... e - 1, as one group, end if all workers begin them at `start`.
  double end_of(double start, int64_t b, int64_t e) const {
    int64_t tiles = 0;
    for (int64_t i = b; i < e; ++i) tiles += bands_[i].rows * c_.row_tiles;
    const int64_t rest = tiles % c_.workers;
    const double tile = static_cast<double>(c_.k_iters) * c_.iter + c_.epilogue;
    double end = start;
    int64_t left = tiles - rest;
    for (int64_t i = b; i < e && left > 0; ++i) {
      end = std::max(end,
                     std::max(start, bands_[i].at) + static_cast<double>(ceil_div(left, c_.workers)) * tile);
      left -= bands_[i].rows * c_.row_tiles;
    }
    if (rest > 0) end = std::max(end, bands_[e - 1].at) + rest_us(rest);
    return std::max(end, start + c_.least);
  }

  // Fewer tiles than workers.
  double rest_us(int64_t rest) const {
    double best = static_cast<double>(c_.k_iters) * c_.iter + c_.epilogue;
    for (const int64_t n : kDepths) {
      if (n == 1 || n > c_.k_iters / c_.min_iters) continue;
      const int64_t longest = ceil_div(rest * n, c_.workers);  // in n-ths of K
      const double us = static_cast<double>(ceil_div(longest * c_.k_iters, n)) * c_.iter + c_.publish +
                        static_cast<double>(ceil_div(n, longest)) * c_.add + c_.epilogue;
      best = std::min(best, us);
    }
    return best;
  }

  const GroupCost& c_;
  const std::vector<Band>& bands_;
};

// Rows of tiles of each group.
inline std::vector<int64_t> choose_groups(const std::vector<Band>& bands, const GroupCost& cost) {
  if (bands.empty()) return {};
  return GroupChooser(bands, cost).run();
}

}  // namespace tpk::sm90a

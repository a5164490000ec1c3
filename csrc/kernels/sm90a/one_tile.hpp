// Products of less than a few waves: what a CTA of one_tile.cuh holds, and which part of its tile it
// finishes. Pure C++: shared by kernel, launcher, planner and CPU tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/macros.hpp"
#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

constexpr int kUnit = 16;             // rows of the product that travel together
constexpr int kMostStages = 10;       // more gain nothing
constexpr int kSharedOfTwo = 115712;  // bytes of a CTA's shared memory where two share a multiprocessor
constexpr int kOneTileSharedLimit = 232448;

struct OneTileBarriers {
  uint64_t full[kMostStages];
  uint64_t empty[kMostStages];
  uint64_t met;  // all that other CTAs along K send is here
};

// The CTA at depth d along K (of 2^log_k) finishes units [first_unit(d), first_unit(d + 1)) of its tile.
TPK_HD constexpr int first_unit(int depth, int units, int log_k) { return depth * units >> log_k; }
// The depth whose CTA finishes a unit.
TPK_HD constexpr int owner_of_unit(int unit, int units, int log_k) {
  return (((unit + 1) << log_k) - 1) / units;
}
constexpr int most_units(int units, int cluster_k) { return (units + cluster_k - 1) / cluster_k; }

// Shared memory of a CTA: stages, what CTAs along K send each other, barriers.
struct OneTileMemory {
  int stage_bytes = 0;
  int stages = 0;
  int meeting_bytes = 0;
  int total() const {
    return stages * stage_bytes + meeting_bytes + static_cast<int>(sizeof(OneTileBarriers));
  }
};

// iterations: of this CTA. outer_rows: the rows of the product (A) are outer-major, in boxes of 64.
// crowded: there are more CTAs than multiprocessors, so that two should fit into one.
inline OneTileMemory one_tile_memory(TileId tile, ClusterShape cluster, int64_t iterations, bool outer_rows,
                                     bool crowded) {
  const TileShape t = tile_shape(tile);
  const int rows = static_cast<int>(t.bm);
  const int columns = static_cast<int>(t.bn);
  const int units = most_units(rows / kUnit, cluster.k);
  const int unit_bytes = kUnit * columns * static_cast<int>(sizeof(float));
  OneTileMemory m;
  m.stage_bytes =
      (columns + (outer_rows ? (rows + kChunkOuter - 1) / kChunkOuter * kChunkOuter : rows)) * kSwizzleBytes;
  m.meeting_bytes = cluster.k > 1 ? cluster.k * units * unit_bytes : 0;
  // Stages also hold what a CTA finishes, in fp32, when they have been read.
  const int least = std::max(2, (units * unit_bytes + m.stage_bytes - 1) / m.stage_bytes);
  const auto fit = [&](int limit) {
    return (limit - m.meeting_bytes - static_cast<int>(sizeof(OneTileBarriers))) / m.stage_bytes;
  };
  const int two = fit(kSharedOfTwo);
  m.stages = crowded && two >= std::max(3, least) ? two : fit(kOneTileSharedLimit);
  m.stages = std::min(m.stages, kMostStages);
  m.stages = static_cast<int>(std::min<int64_t>(m.stages, std::max<int64_t>(iterations, least)));
  return m;
}

// CTAs of so much shared memory that a multiprocessor holds. Its registers hold four of 64 columns (160
// threads) or two of 128 (288): one_tile.cuh takes at most 96 a thread.
inline int one_tile_sharers(TileId tile, const OneTileMemory& m) {
  constexpr int kSharedOfAll = 2 * (kSharedOfTwo + 1024);  // each CTA takes 1 KiB more
  return std::min(tile_shape(tile).bn > 64 ? 2 : 4, kSharedOfAll / (m.total() + 1024));
}

}  // namespace tpk::sm90a

// Products of less than a few waves: what a CTA of one_tile.cuh holds, and which part of its tile it
// finishes. Pure C++: shared by kernel, launcher, planner and CPU tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "host/macros.hpp"
#include "kernels/sm90a/tiles.hpp"

namespace tpk::sm90a {

constexpr int kUnit = kColumnStep;  // columns of wgmma that travel together
constexpr int kMostStages = 16;
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

// Bytes from row to row of a straight tile that lies in shared memory, of 2 or 4 bytes an element: 16 more
// than it has, so that 8 rows meet no bank twice.
TPK_HD constexpr int straight_pitch(int columns, int element_bytes) { return columns * element_bytes + 16; }

// How the CTAs of a launch get through its tiles: one each while there is room for all at once; one each, two
// to a multiprocessor, so that the end of one runs beside the main loop of the other; or as many as run at
// once, which take tiles in turn and load the next while they store. Beyond two rounds the last is faster by
// 6 to 22 %, and by 7 at two where registers leave no room for two; else the crowd is, by 3.
enum class Turns { kOnce, kCrowd, kWalk };
inline Turns turns_of(TileId tile, ClusterShape cluster, int64_t tiles, int64_t clusters, bool plain) {
  if (tiles <= clusters) return Turns::kOnce;
  const bool alone = kOneTileKernels[one_tile_shape(tile).kernel].sharers == 1;
  const bool may_walk = plain && cluster.k == 1 && tiles <= std::numeric_limits<int32_t>::max();
  return may_walk && (alone || tiles > 2 * clusters) ? Turns::kWalk : Turns::kCrowd;
}

// iterations: of this CTA for a tile. outer_columns: the operand of wgmma's columns is outer-major, in boxes
// of 64.
inline OneTileMemory one_tile_memory(TileId tile, ClusterShape cluster, int64_t iterations,
                                     bool outer_columns, Turns turns) {
  const OneTileShape t = one_tile_shape(tile);
  const int units = most_units(t.columns / kUnit, cluster.k);
  const int unit_bytes = kUnit * t.rows * static_cast<int>(sizeof(float));
  const int boxes = (t.columns + kChunkOuter - 1) / kChunkOuter * kChunkOuter;
  OneTileMemory m;
  m.stage_bytes = (t.rows + (outer_columns ? boxes : t.columns)) * kSwizzleBytes;
  m.meeting_bytes = cluster.k > 1           ? cluster.k * units * unit_bytes
                    : turns == Turns::kWalk ? t.rows * straight_pitch(t.columns, 2)
                                            : 0;
  const auto fit = [&](int limit) {
    return (limit - m.meeting_bytes - static_cast<int>(sizeof(OneTileBarriers))) / m.stage_bytes;
  };
  if (turns == Turns::kWalk) {
    m.stages = std::min(fit(kOneTileSharedLimit), kMostStages);
    return m;
  }
  // Stages also hold what a CTA finishes, in fp32, when they have been read.
  const int finished = t.rows * straight_pitch(units * kUnit, sizeof(float));
  const int least = std::max(2, (finished + m.stage_bytes - 1) / m.stage_bytes);
  const bool alone = kOneTileKernels[t.kernel].sharers == 1;
  const int two = turns == Turns::kCrowd && !alone ? fit(kSharedOfTwo) : 0;
  m.stages = two >= std::max(3, least) ? two : fit(kOneTileSharedLimit);
  m.stages = std::min(m.stages, kMostStages);
  m.stages = static_cast<int>(std::min<int64_t>(m.stages, std::max<int64_t>(iterations, least)));
  return m;
}

// CTAs of so much shared memory that a multiprocessor holds.
inline int one_tile_sharers(TileId tile, const OneTileMemory& m) {
  constexpr int kSharedOfAll = 2 * (kSharedOfTwo + 1024);  // each CTA takes 1 KiB more
  return std::min(kOneTileKernels[one_tile_shape(tile).kernel].sharers, kSharedOfAll / (m.total() + 1024));
}

}  // namespace tpk::sm90a

// Predicted time of a product on the Hopper kernel. It has to rank tiles, clusters and schedules, not to tell time:
//
//   time = launch + max(bytes / bandwidth, max over workers (iterations + epilogues + fix-up))
//
// Fitted on an H100 by `python -m bench gemm --tiles` (bench/results). Under a full load the clock follows power, so
// iterations take longer than their cycles at the nominal clock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/cost_model.hpp"
#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

// Times in microseconds.
struct HopperCost {
  double launch_us;          // launch, first loads, last stores
  double split_launch_us;    // beside that, where tiles are split: flags are cleared, tickets drawn
  double bytes_per_us;       // of device memory
  double publish_us;         // writing a partial tile and raising its flag, per 32 Ki elements of a CTA
  double add_us;             // adding one partial, likewise
  double depth;              // relative cost of an iteration for every depth of K at which workers stand, beyond the first
  double iter_us[kNumTiles][kNumClusterShapes];  // one iteration, in the order of TileId and kClusterShapes
  double epilogue_us[kNumTiles];                 // one tile: what is not hidden
};

inline constexpr HopperCost kCostHopper{
    4.5,
    7.0,
    2.6e6,
    1.0,
    2.0,
    0.001,
    {{0.752, 0.758, 0.762}, {0.760, 0.748, 0.765}, {1.146, 1.120, 1.150}, {0.581, 0.600, 0.622}, {0.407, 0.387, 0.430}},
    {2.5, 2.6, 6.0, 0.9, 0.6}};

// running: clusters at work at once.
inline double predict_us(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster, int64_t running,
                         const HopperCost& c) {
  const int t = static_cast<int>(tile);
  int shape = 0;
  while (kClusterShapes[shape].m != cluster.m || kClusterShapes[shape].n != cluster.n) ++shape;
  const double part = static_cast<double>(kTileShapes[t].bm) * kTileShapes[t].bn / 32768;
  double longest = 0;
  // The first workers have the most whole tiles, and shares differ by one granule or less: a few tell.
  const int64_t last = s.workers - 1;
  for (const int64_t w : {int64_t{0}, int64_t{1}, last / 4, last / 2, last - last / 4, last - 1, last}) {
    if (w < 0 || w > last) continue;
    const WorkCounts n = count_work(s, w);
    longest = std::max(longest, n.iterations * c.iter_us[t][shape] + n.epilogues * c.epilogue_us[t] +
                                    n.partials_written * c.publish_us * part + n.partials_added * c.add_us * part);
  }
  int64_t depths = 1;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& piece = s.pieces[i];
    if (piece.kind == PieceKind::kStreamed) depths = std::max(depths, piece.granules > 0 ? piece.granules : piece.workers);
  }
  longest *= 1 + c.depth * static_cast<double>(std::min<int64_t>(depths, 64) - 1);
  longest *= static_cast<double>(ceil_div(s.workers, std::max<int64_t>(1, running)));
  const double bytes = static_cast<double>(p.batch) *
                       ((static_cast<double>(p.m) + p.n) * p.k * kElementBytes + 2.0 * p.m * p.n);
  return c.launch_us + (s.num_slots > 0 ? c.split_launch_us : 0) + std::max(longest, bytes / c.bytes_per_us);
}

}  // namespace tpk::sm90a

// Predicted time of a product on the Hopper kernel. It has to rank tiles, clusters and schedules, not to tell
// time:
//
//   time = launch + max(work, memory) + overlap * min(work, memory)
//   work = max over workers (iterations + epilogues + fix-up)
//   memory = bytes / bandwidth, every operand once
//
// Of one_tile.cuh: one_tile_cost.hpp.
//
// Fitted on one H200 by `python -m bench fit` to 1,710 rows of 140 shapes
// (bench/results/2026-11-29_h200x1_sweep_first_97.jsonl,
// ..._sweep_tiles.jsonl and 2026-11-28_h200x1_tiles.jsonl): rms error 10 %, 6 % in the median, and the plan
// chosen loses 1.1 % against the fastest. Before, the constants were an H100's, fitted to large products: 17
// %, launches 2 us too long, which matters where the other kernel's plans (one_tile_cost.hpp) are compared.
// What the fit could not tell (finish_us and below, but for iterations and epilogues) is from there. Under a
// full load the clock follows power, so iterations take longer than their cycles at the nominal clock.
// launch_us is 1.5 us more than that fit says: so much longer than predicted took 870 plans of 10 to 80 us of
// 300 other shapes, beside which those of the other kernel were predicted right. It decides between the two.
// split_per_us was set by hand: of 475 shapes of 6 to 1,700 us, the fastest of up to 15 plans, most of them
// whole tiles, was missed by 3.4 % in the mean without it, and by 2.9 with 70 KB/us.
#pragma once

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdint>
#include <optional>

#include "host/cost_model.hpp"
#include "kernels/sm90a/one_tile_cost.hpp"
#include "kernels/sm90a/scaled_cost.hpp"
#include "kernels/sm90a/tiles.hpp"

namespace tpk::sm90a {

// Times in microseconds.
struct HopperCost {
  double launch_us;        // launch, first loads, last stores
  double split_launch_us;  // beside that, where tiles are split: flags are cleared, tickets drawn, partials
                           // waited for
  double divided_us;       // likewise where fix-up is divided
  double exchange_us;      // then: writing a partial and adding a share of all, per 32 Ki elements
  double bytes_per_us;     // of device memory
  double overlap;          // how much of the shorter of work and memory shows
  double l2_bytes;         // operands of so many bytes stay in L2
  double publish_us;       // writing a partial tile, per 32 Ki elements of a warpgroup pair
  double add_us;           // adding one, likewise
  double finish_us;        // cooperative: arithmetic of an epilogue with bias, activation or sums, per 32 Ki
                           // elements
  double owner_us;   // departure: an own tile, beside its addends, per 32 Ki elements of a warpgroup pair
  double addend_us;  // one of them, likewise
  double departing_split_us;  // departure: where tiles are split
  double outer_us;            // 128x128 with both operands outer-major: of an iteration, beside that
  double split_per_us;        // bytes that a CTA loads itself where rows of K begin within lines of 128 bytes
  double iter_us[kNumWalkingTiles]
                [kNumWalkingClusters];   // one iteration, in the order of TileId and kClusterShapes
  double epilogue_us[kNumWalkingTiles];  // one tile: what is not hidden
  OneTileCost whole;                     // of the other kernel
};

inline constexpr HopperCost kCostHopper{4.6,
                                        6.76,
                                        4.78,
                                        3.06,
                                        2.4e+06,
                                        0.0215,
                                        4.0e7,
                                        0.198,
                                        1.26,
                                        1.5,
                                        1.0,
                                        1.6,
                                        25,
                                        0.035,
                                        7e4,
                                        {{0.720, 0.723, 0.730},
                                         {0.740, 0.718, 0.739},
                                         {1.097, 1.097, 1.112},
                                         {0.603, 0.604, 0.641},
                                         {0.389, 0.378, 0.417},
                                         {0.822, 0.818, 0.844}},
                                        {1.62, 1.55, 4.22, 1.46, 0.424, 1.95},
                                        kCostOneTile};

// What plans are made with; see CostInUse.
inline constinit CostInUse<HopperCost> hopper_cost{kCostHopper};

// Copies to the peers by the copy engine, as a gather makes them: all ranks at once, one peer after the
// other, beside a product.
struct LinkCost {
  double copy_us;          // a copy and its flag, beside what it moves
  double bytes_per_us[3];  // what a GPU sends where it has one peer, up to three, more
  double rate(int32_t world) const { return bytes_per_us[world <= 2 ? 0 : world <= 4 ? 1 : 2]; }
};

// One peer: `bench link` on two H200 (bench/results/2026-11-28_h200x2.jsonl), all_gather by the engine with
// flags, 27 us for 8 MiB and 73 for 25. Up to three: the copies of path fused alone on four H200, 104 us for
// 3 x 8 MiB, 345 for 12 x 8. More: eight H200, 7 x 25 MiB in 722 us.
inline constexpr LinkCost kCostLink{5.0, {3.8e+05, 3.4e+05, 2.7e+05}};

// matrices: of B that rows of one batch are multiplied by (Demands).
inline bool fits_l2(const Problem& p, const HopperCost& c, int element_bytes, int64_t matrices = 1) {
  return (static_cast<double>(p.m) + static_cast<double>(matrices) * p.n) * p.k * element_bytes <= c.l2_bytes;
}

// What the workers of a streamed piece bring from device memory takes so much longer than an iteration: those
// that stand at one depth of K share operands, the c of them in a square block sqrt(c) times each; those at
// other depths do not.
inline double starved_iter_us(const Piece& piece, TileId tile, ClusterShape cluster, double iter_us,
                              const HopperCost& c) {
  const TileShape shape = cluster_tile(tile, cluster);
  const auto workers = static_cast<double>(piece.workers);
  const double depths =
      piece.granules > 0 ? std::min<double>(static_cast<double>(piece.granules), workers) : workers;
  const double bytes = static_cast<double>(shape.bm + shape.bn) * kSwizzleBytes * workers;
  const double load_us = bytes / std::sqrt(workers / depths) / c.bytes_per_us;
  return std::max(0.0, load_us - iter_us);
}

inline double starved_us(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster,
                         double iter_us, const HopperCost& c, int64_t matrices = 1) {
  if (fits_l2(p, c, element_bytes(tile), matrices)) return 0;
  double total = 0;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& piece = s.pieces[i];
    if (piece.kind != PieceKind::kStreamed) continue;
    const auto workers = static_cast<double>(piece.workers);
    const double iters = static_cast<double>(piece.num_tiles) * static_cast<double>(s.k_iters) / workers;
    total += iters * starved_iter_us(piece, tile, cluster, iter_us, c);
  }
  return total;
}

// What a product asks of a plan beside its size.
struct Demands {
  bool gated = false;
  bool finishes = false;     // the epilogue does more than round, which pingpong tiles hide
  bool outer_major = false;  // both operands
  int64_t matrices = 1;      // of B: the groups of a grouped product
  Product product = Product::kHalf;
  bool keeps_rows = false;     // other ranks are served by rows of tiles, which may not be swapped then
  bool outer_rows = false;     // A is outer-major
  bool outer_columns = false;  // B is
  std::optional<bool> rounds;  // rounds_alone() of the call, where it is known
  bool wide = false;           // results in float32, which show how sums were made
  // Whether whole tiles leave as they are rounded.
  bool rounds_alone() const { return rounds.value_or(!finishes); }
  auto operator<=>(const Demands&) const = default;
};

// What a worker's work is made of.
struct WorkCost {
  double iter;      // us
  double epilogue;  // us, one tile
  double part;      // size of a partial, in 32 Ki elements of a warpgroup pair
};

// What a CTA asks L2 for in an iteration; the rest of its tile comes from others of its cluster.
inline double loaded_bytes(TileId tile, ClusterShape cluster) {
  const TileShape shape = tile_shape(tile);
  return static_cast<double>(shape.bm / cluster.n + shape.bn / cluster.m) * kSwizzleBytes;
}

inline WorkCost work_cost(const Problem& p, TileId tile, ClusterShape cluster, const Demands& demands,
                          const HopperCost& c) {
  const int t = static_cast<int>(tile);
  const int shape = cluster_index(cluster);
  const double elements = static_cast<double>(tile_shape(tile).bm) * tile_shape(tile).bn / 32768;
  if (is_scaled(tile)) {
    const int of = t - kNumTiles;
    const int product = std::max(0, static_cast<int>(demands.product) - 1);
    return {kCostScaled.iter_us[product][of][shape],
            kCostScaled.epilogue_us[of] + (demands.finishes ? c.finish_us * elements : 0), elements};
  }
  // A pingpong tile's partials are written and added by one warpgroup.
  const double part = is_pingpong(tile) ? 2 * elements : elements;
  const double epilogue =
      c.epilogue_us[t] + (demands.finishes && !is_pingpong(tile) ? c.finish_us * elements : 0);
  const bool reads_slowly = demands.outer_major && tile == TileId::k128x128;
  double iter = c.iter_us[t][shape] + (reads_slowly ? c.outer_us : 0);
  // Lines in which one row ends and another begins are asked for twice.
  if (p.k % kBK != 0 && !demands.outer_major)
    iter = longest({iter, loaded_bytes(tile, cluster) / c.split_per_us});
  return {iter, epilogue, part};
}

// What its longest worker takes. running: clusters at work at once.
inline double work_us(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster, int64_t running,
                      const Demands& demands, const HopperCost& c) {
  const auto [iter, epilogue, part] = work_cost(p, tile, cluster, demands, c);
  const int64_t shares = s.workers <= running ? divided_shares(s) : 0;
  double work = 0;
  // The first workers have the most whole tiles, and shares differ by one granule or less: a few tell.
  const int64_t last = s.workers - 1;
  for (const int64_t w : {int64_t{0}, int64_t{1}, last / 4, last / 2, last - last / 4, last - 1, last}) {
    if (w < 0 || w > last) continue;
    const WorkCounts n = count_work(s, w);
    double us = n.iterations * iter + n.epilogues * epilogue;
    if (shares == 0) {
      us += (n.partials_written * c.publish_us + n.partials_added * c.add_us) * part;
    } else if (n.partials_written + n.partials_added > 0) {  // whoever ends the tile, all store a share of it
      us += c.exchange_us * part + epilogue / shares - (n.partials_added > 0 ? epilogue : 0);
    }
    work = std::max(work, us);
  }
  work += starved_us(p, s, tile, cluster, iter, c, demands.matrices);
  return work * static_cast<double>(ceil_div(s.workers, std::max<int64_t>(1, running)));
}

// reread_bytes: brought from device memory beside every operand once.
inline double total_us(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster,
                       int64_t running, double work, double reread_bytes, const HopperCost& c) {
  const int64_t shares = s.workers <= running ? divided_shares(s) : 0;
  const double bytes = static_cast<double>(p.batch) *
                           ((static_cast<double>(p.m) + p.n) * p.k * element_bytes(tile) + 2.0 * p.m * p.n) +
                       reread_bytes;
  const double memory = bytes / c.bytes_per_us;
  const double split = shares > 0 ? c.divided_us : s.num_slots > 0 ? c.split_launch_us : 0;
  return c.launch_us + split + std::max(work, memory) + c.overlap * std::min(work, memory);
}

// What a departure takes beside that: sums of own tiles, which lie close together in time, for all workers.
// Measured on one H200 with all words raised, 2 to 8 ranks: docs/hopper-kernel.md.
inline double departure_us(const Schedule& s, int64_t own_tiles, int32_t addends, int64_t running,
                           double part, const HopperCost& c) {
  const double tiles = static_cast<double>(own_tiles) / static_cast<double>(std::max<int64_t>(1, running));
  return tiles * part * (c.owner_us + addends * c.addend_us) + (s.num_slots > 0 ? c.departing_split_us : 0);
}

inline double predict_us(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster,
                         int64_t running, const Demands& demands, const HopperCost& c) {
  return total_us(p, s, tile, cluster, running, work_us(p, s, tile, cluster, running, demands, c), 0, c);
}

}  // namespace tpk::sm90a

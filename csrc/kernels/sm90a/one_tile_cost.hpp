// Predicted time of a product on one_tile.cuh. It has to rank tiles and clusters, not to tell time:
//
//   time = launch + end of a CTA + longest of (chain, work, tensor, L2, memory) + launches of later clusters
//   chain = waves * iterations, which wait for loads where stages are few, + later waves' ends; all
//           iterations where clusters walk
//   work, tensor = iterations and ends of a multiprocessor's CTAs, and what its tensor cores take
//
// A wave is as many CTAs as fit at once, up to four on a multiprocessor. "Longest" is smooth.
//
// Fitted on one H200 to 1,449 shapes (1 to 8192 rows, 128 to 16384 columns, K of 128 to 16384, bf16, graphs
// of up to 256 products whose operands are in memory, not in L2), 44 plans each or the eight that it thought
// cheapest before, every plan that takes less than 1.5 times the fastest, which weighs most, and to what the
// plan chosen loses: 3.3 % against the fastest measured in the mean and 27 at worst, 1.4 in the mean for the
// best of its first three. About 1 is noise: so much loses the plan that was fastest in another run. On
// shapes that a fit had not seen it lost as much. Times within 10 % of the fastest have an rms error of 8.3
// %, and what features of tile, cluster and shape explain of it, linearly, is worth 0.2 %.
//
// crowding and deep_eight are from weights of 10 to 470 MB with 1 to 128 rows (32 products by 24 plans each,
// 10 by 424): the plan chosen loses 1.9 % there, and 5.3 % on the 32 with a crowding of 0.75, which had been
// fitted to few plans without CTAs along K. Whether the CTAs of a launch begin at the same place along K, or
// each at another, makes no difference.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "kernels/sm90a/one_tile.hpp"

namespace tpk::sm90a {

struct OneTileCost {
  double launch_us;
  double cluster_us;    // of clusters, each time that they are twice as large
  double iteration_us;  // one iteration
  double row_us;        // likewise, of each row
  double skew;     // how much longer it takes where CTAs share rows and columns, for each doubling of both
  double peak_us;  // products of 64 elements of K: of each element of a tile
  double sustained_us;   // likewise, under a full load, when the clock follows power
  double asked_per_us;   // bytes that a CTA loads itself; what others load for it comes beside that
  double company;        // how much longer it takes when all multiprocessors load
  double l2_per_us;      // bytes that L2 is asked for
  double sent_per_us;    // bytes that L2 sends
  double split_lines;    // how many more are asked for where rows of K begin within lines of 128 bytes
  double split_sectors;  // beside that, within sectors of 32 bytes
  double latency_us;     // from a stage's release to its next operands
  double end_column_us;  // from the last product to the last store, of 128 columns
  double end_us;         // likewise, of 128x128 elements
  double later_end_us;   // what it takes from other CTAs of the multiprocessor, of 128 columns
  double walk_end;       // the part of the former two that the next tile waits for where clusters walk
  double meet_us;        // CTAs along K
  double meet_unit_us;   // likewise, of each unit of 128 rows that another CTA sends
  double wave_us;        // a wave of clusters behind another
  double bytes_per_us;   // of device memory
  double crowding;       // how much longer that takes where K is a multiple of 8192: it did where it is
                         // 8192, less so of CTAs at different depths, which may ask more of its channels
  double deep_eight;     // likewise of clusters of eight along K
};

inline constexpr OneTileCost kCostOneTile{
    1.508, 0.1284, 0.03271, 0.0008981, 0.2484, 1.73e-5, 1.826e-5, 7.375e5, 0.309, 5.12e7,  8.282e6, 3.827,
    2.146, 1.116,  0.1533,  1.054,     1.61,   1.416,   1.351,    0.1756,  3.175, 4.909e6, 0.1,     0.2};

inline double log2_of(int32_t power) { return std::countr_zero(static_cast<uint32_t>(power)); }

// The longest of some times, and more where several are as long: a norm of 4.
inline double longest(std::initializer_list<double> times) {
  double sum = 0;
  for (const double us : times) sum += us * us * us * us;
  return std::sqrt(std::sqrt(sum));
}

// plain: nothing but the product is stored. clusters: that run at once where a CTA has a multiprocessor to
// itself. outer_columns: see one_tile_memory().
inline double one_tile_us(const Problem& p, TileId tile, ClusterShape cluster, bool gated, bool plain,
                          bool outer_columns, int64_t clusters, const OneTileCost& c) {
  TileShape of_cluster = cluster_tile(tile, cluster);
  if (gated) of_cluster.bn /= 2;
  const OneTileShape shape = one_tile_shape(tile);
  const Sharers sharers = sharers_of(tile, cluster);
  const int64_t tiles = num_tiles(p, of_cluster);
  const int64_t depth = iters_per_tile(p, of_cluster);
  const Turns turns = turns_of(tile, cluster, tiles, clusters, plain);
  const OneTileMemory memory = one_tile_memory(tile, cluster, depth, outer_columns, turns);
  const auto rows = static_cast<double>(shape.rows);
  const auto columns = static_cast<double>(shape.columns);
  const auto iterations = static_cast<double>(depth);
  const auto stages = static_cast<double>(memory.stages);
  const double along_rows = log2_of(sharers.rows);
  const double along_columns = log2_of(sharers.columns);
  // Clusters after each other on the same multiprocessors, and all of them.
  const auto waves = static_cast<double>(ceil_div(tiles, clusters * one_tile_sharers(tile, memory)));
  const auto queue = static_cast<double>(ceil_div(tiles, clusters));
  const double later = std::max(0.0, waves - 1);

  const double loaded_columns = memory.stage_bytes / kSwizzleBytes - rows;
  const double own = (rows / sharers.rows + loaded_columns / sharers.columns) * kSwizzleBytes;
  const double asked =
      own * (1 + (p.k % kBK != 0 ? c.split_lines : 0) + (p.k % 16 != 0 ? c.split_sectors : 0));
  const double full = std::min(1.0, static_cast<double>(tiles) / static_cast<double>(clusters));
  const double loads = asked / c.asked_per_us * (1 + c.company * full);
  const double products = c.iteration_us + c.row_us * rows;
  const double longer = std::max(loads, products);
  const double ratio = std::min(loads, products) / longer;
  const double iteration = longer * std::sqrt(longest({1, ratio * ratio})) *  // a norm of 8
                           (1 + c.skew * along_rows * along_columns);
  // Stages are loaded again as they are released, one iteration after their products.
  const double round = longest({stages * iteration, c.latency_us + 2 * iteration});

  const int units = most_units(shape.columns / kUnit, cluster.k);
  const double finished = units * kUnit / 128.0;
  const double high = rows / 128;
  double end = finished * (c.end_column_us + c.end_us * high);
  if (cluster.k > 1) end += c.meet_us + c.meet_unit_us * high * units * (cluster.k - 1);

  const auto rounds = [&](double of_iterations) {
    return stages * iteration + std::max(0.0, of_iterations / stages - 1) * round;
  };
  const bool walks = turns == Turns::kWalk;
  const double chain = walks ? rounds(queue * iterations) + (queue - 1) * end * c.walk_end
                             : waves * rounds(iterations) + later * end;
  const double work = queue * iterations * iteration + std::max(0.0, queue - 1) * c.later_end_us * finished;
  const double tensor = iterations * rows * columns *
                        std::max(c.peak_us * queue,
                                 c.sustained_us * static_cast<double>(tiles) / static_cast<double>(clusters));
  const double loaders = static_cast<double>(tiles) * cluster.size() * iterations;
  const double l2 = loaders * std::max(asked / c.l2_per_us, own / c.sent_per_us);
  const double bytes = 2.0 * static_cast<double>(p.batch) *
                       ((static_cast<double>(p.m) + static_cast<double>(p.n) * (gated ? 2 : 1)) * p.k +
                        static_cast<double>(p.m) * p.n);
  const bool crowds = p.k % (16384 / kElementBytes) == 0 && waves > 0;
  const double device = bytes / c.bytes_per_us * (1 + (crowds ? c.crowding / (cluster.k * waves) : 0)) *
                        (1 + (cluster.k > 1 && cluster.size() == 8 ? c.deep_eight : 0));
  double us = c.launch_us + end + longest({chain, work, tensor, l2, device});
  if (cluster.size() > 1) us += c.cluster_us * log2_of(cluster.size()) + (walks ? 0 : later * c.wave_us);
  return us;
}

}  // namespace tpk::sm90a

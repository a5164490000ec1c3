// Predicted time of a product on one_tile.cuh. It has to rank tiles and clusters, not to tell time:
//
//   time = launch + waves of CTAs + what several waves hide of each other, or what device memory takes
//   wave = fill + iterations * iteration + tail + meeting of CTAs along K
//   iteration = the longest of products, what a multiprocessor receives, and what all take from L2
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/sm90a/one_tile.hpp"

namespace tpk::sm90a {

struct OneTileCost {
  double launch_us;
  double fill_us;          // from a CTA's start to its first products
  double product_us[2];    // an iteration's products, of 64 and of 128 columns: beside its rows
  double row_us[2];        // likewise, of each row
  double received_per_us;  // bytes that a multiprocessor receives
  double l2_per_us;        // bytes that L2 sends
  double unaligned;        // how much more L2 sends where rows are no multiple of 128 bytes
  double tail_us;          // from the last product to the last store, of 128x128
  double meet_us;          // CTAs along K
  double meet_unit_us;     // likewise, of each unit that another CTA sends
  double hidden_us;        // of a wave, by the one before
  double cluster_wave_us;  // of a wave behind another, each time clusters are twice as large
  double bytes_per_us;     // of device memory
};

inline constexpr OneTileCost kCostOneTile{
    1.575, 0.221, {0.1526, 0.1966}, {0.000367, 0.00041}, 1.0e5, 1.14e7, 0.81, 2.18, 0.91, 0.141, 0.865,
    0.48,  3.5e6};

// clusters: that run at once where a CTA has a multiprocessor to itself.
inline double one_tile_us(const Problem& p, TileId tile, ClusterShape cluster, bool gated, bool outer_rows,
                          int64_t clusters, const OneTileCost& c) {
  TileShape of_cluster = cluster_tile(tile, cluster);
  if (gated) of_cluster.bn /= 2;
  const TileShape t = tile_shape(tile);
  const auto rows = static_cast<double>(t.bm);
  const auto columns = static_cast<double>(t.bn);
  const int64_t tiles = num_tiles(p, of_cluster);
  const auto iterations = static_cast<double>(iters_per_tile(p, of_cluster));
  const OneTileMemory memory =
      one_tile_memory(tile, cluster, iters_per_tile(p, of_cluster), outer_rows, tiles > clusters);
  const double alone = static_cast<double>(clusters);
  const double slots = alone * one_tile_sharers(memory);
  const double unaligned = p.k % kBK == 0 ? 0 : c.unaligned;
  const auto wave_us = [&](double active) {
    const double sharing = active > alone ? one_tile_sharers(memory) : 1;
    const int wide = t.bn > 64;
    const double products = (c.product_us[wide] + c.row_us[wide] * rows) * sharing;
    const double received = (rows + columns) * kSwizzleBytes * sharing / c.received_per_us;
    const double sent = active * cluster.size() * (columns / cluster.m + rows / cluster.n) * kSwizzleBytes *
                        (1 + unaligned) / c.l2_per_us;
    const double meeting =
        cluster.k > 1 ? c.meet_us + c.meet_unit_us * most_units(static_cast<int>(t.bm) / kUnit, cluster.k) *
                                        (cluster.k - 1)
                      : 0;
    const double steepness = 6;  // of the bend from one limit to the other
    const double iteration =
        std::pow(std::pow(products, steepness) + std::pow(received, steepness) + std::pow(sent, steepness),
                 1 / steepness);
    return c.fill_us + iterations * iteration + c.tail_us * rows * columns / 16384 + meeting;
  };
  const double full = std::floor(static_cast<double>(tiles) / slots);
  const double rest = static_cast<double>(tiles) - full * slots;
  const double waves = full + (rest > 0 ? 1 : 0);
  const double later = std::max(0.0, waves - 1);
  const double work = full * wave_us(slots) + (rest > 0 ? wave_us(rest) : 0) - later * c.hidden_us +
                      later * c.cluster_wave_us * std::log2(cluster.size());
  const double bytes =
      2.0 * static_cast<double>(p.batch) *
      ((static_cast<double>(p.m) + p.n * (gated ? 2 : 1)) * p.k + static_cast<double>(p.m) * p.n);
  return c.launch_us + std::max(work, c.fill_us + bytes / c.bytes_per_us);
}

}  // namespace tpk::sm90a

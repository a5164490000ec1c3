// CTAs of one_tile.cuh on the CPU: units along K are dealt out once, and what a CTA holds fits.
#include <cstdint>
#include <string>

#include "check.hpp"
#include "kernels/sm90a/one_tile_cost.hpp"
#include "kernels/sm90a/plan.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;

void check_units() {
  for (int units = 1; units <= kNumHeights; ++units) {
    for (int log_k = 0; log_k <= 3; ++log_k) {
      const std::string here = std::to_string(units) + " units, depth 2^" + std::to_string(log_k);
      TPK_CHECK(first_unit(0, units, log_k) == 0 && first_unit(1 << log_k, units, log_k) == units, here);
      for (int depth = 0; depth < 1 << log_k; ++depth) {
        ++cases;
        const int first = first_unit(depth, units, log_k);
        const int end = first_unit(depth + 1, units, log_k);
        TPK_CHECK(first <= end && end - first <= most_units(units, 1 << log_k), here);
        for (int u = first; u < end; ++u) TPK_CHECK(owner_of_unit(u, units, log_k) == depth, here);
      }
    }
  }
}

void check_memory() {
  for (int t = kNumWalkingTiles; t < kNumTiles; ++t) {
    const auto tile = static_cast<TileId>(t);
    const TileShape shape = tile_shape(tile);
    TPK_CHECK(swapped_tile(static_cast<int>(shape.bm), static_cast<int>(shape.bn)) == tile, name(tile));
    for (const ClusterShape cluster : kClusterShapes) {
      if (!takes_cluster(tile, cluster)) continue;
      for (const int64_t iterations : {0, 1, 3, 1000}) {
        for (const bool outer : {false, true}) {
          for (const bool crowded : {false, true}) {
            ++cases;
            const std::string here = name(tile, cluster) + ", " + std::to_string(iterations) + " iterations";
            const OneTileMemory m = one_tile_memory(tile, cluster, iterations, outer, crowded);
            TPK_CHECK(m.total() <= kOneTileSharedLimit && m.stages >= 2 && m.stages <= kMostStages, here);
            TPK_CHECK(m.stage_bytes % 1024 == 0, here + ": operands are swizzled in 1024 bytes");
            // Where stages were, the units that a CTA finishes lie in fp32.
            const int units = most_units(static_cast<int>(shape.bm) / kUnit, cluster.k);
            TPK_CHECK(m.stages * m.stage_bytes >= units * kUnit * shape.bn * 4, here);
            TPK_CHECK(m.meeting_bytes >= (cluster.k > 1 ? cluster.k * units * kUnit * shape.bn * 4 : 0),
                      here);
            TPK_CHECK(one_tile_sharers(tile, m) * (m.total() + 1024) <= 233472, here);
          }
        }
      }
    }
  }
}

// Predictions are times, also of products that nobody measured.
void check_cost() {
  for (const int64_t m : {0, 1, 100, 5000, 100000}) {
    for (const int64_t n : {0, 8, 3000, 60000}) {
      for (const int64_t k : {0, 8, 700, 8192, 100000}) {
        for (int t = kNumWalkingTiles; t < kNumTiles; ++t) {
          for (const ClusterShape cluster : kClusterShapes) {
            const auto tile = static_cast<TileId>(t);
            if (!takes_cluster(tile, cluster)) continue;
            ++cases;
            const double us = one_tile_us({m, n, k, 1}, tile, cluster, false, false,
                                          clusters_that_fit(132, cluster.size()), kCostOneTile);
            TPK_CHECK(us > 1 && us < 1e8, name(tile, cluster) + " " + std::to_string(us));
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_units();
  check_memory();
  check_cost();
  return tpk::test::result("sm90a one tile", cases);
}

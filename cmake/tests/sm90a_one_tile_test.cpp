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
  for (int units = 1; units <= 16; ++units) {
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

// Every tile has a number and a name of its own, and both orientations are there.
void check_names() {
  for (int t = 0; t < kNumAllTiles; ++t) {
    const auto id = static_cast<TileId>(t);
    const auto found = find_tile(name(id));
    TPK_CHECK(found && found->id == id && found->cluster == -1, name(id));
    for (int c = 0; c < kNumClusterShapes; ++c) {
      ++cases;
      const std::string full = name(id, kClusterShapes[c]);
      const auto with = find_tile(full);
      TPK_CHECK(with.has_value() == takes_cluster(id, kClusterShapes[c]), full);
      TPK_CHECK(!with || (with->id == id && with->cluster == c), full);
    }
    if (!is_one_tile(id)) continue;
    const OneTileShape shape = one_tile_shape(id);
    const OneTileKernel& kernel = kOneTileKernels[shape.kernel];
    TPK_CHECK(kernel.rows == shape.rows && kernel.first <= shape.columns && shape.columns <= kernel.last,
              name(id));
    const TileShape tile = tile_shape(id);
    TPK_CHECK(tile.bm == (shape.swapped ? shape.columns : shape.rows) &&
                  tile.bn == (shape.swapped ? shape.rows : shape.columns),
              name(id));
    const auto mirrored = find_tile(std::to_string(tile.bn) + "x" + std::to_string(tile.bm) + "x64" +
                                    (shape.swapped ? "w" : "s"));
    TPK_CHECK(mirrored.has_value(), name(id));
  }
  for (const char* wrong :
       {"", "/1x1", "128x128", "128x128x64/", "128x128x64s/2", "256x256x64w", "24x64x64s"})
    TPK_CHECK(!find_tile(wrong), wrong);
}

void check_memory() {
  for (int t = kNumWalkingTiles; t < kNumTiles; ++t) {
    const auto tile = static_cast<TileId>(t);
    const OneTileShape shape = one_tile_shape(tile);
    for (const ClusterShape cluster : kClusterShapes) {
      if (!takes_cluster(tile, cluster)) continue;
      const Sharers sharers = sharers_of(tile, cluster);
      TPK_CHECK(sharers.rows * sharers.columns * sharers.depth == cluster.size(), name(tile, cluster));
      TPK_CHECK(shape.rows / sharers.rows % 8 == 0 && shape.columns / sharers.columns % 8 == 0,
                name(tile, cluster) + ": parts are whole groups of 8 rows");
      for (const int64_t iterations : {0, 1, 3, 1000}) {
        for (const bool outer : {false, true}) {
          for (const Turns turns : {Turns::kOnce, Turns::kCrowd, Turns::kWalk}) {
            if (turns == Turns::kWalk && cluster.k > 1) continue;
            ++cases;
            const std::string here = name(tile, cluster) + ", " + std::to_string(iterations) + " iterations";
            const OneTileMemory m = one_tile_memory(tile, cluster, iterations, outer, turns);
            TPK_CHECK(m.total() <= kOneTileSharedLimit && m.stages >= 2 && m.stages <= kMostStages, here);
            TPK_CHECK(m.stage_bytes % 1024 == 0, here + ": operands are swizzled in 1024 bytes");
            // Where stages were, the units that a CTA finishes lie in fp32, or the tile in 2 bytes; where
            // clusters walk, that lies behind them.
            const int units = most_units(shape.columns / kUnit, cluster.k);
            const int finished = units * kUnit * shape.rows * 4;
            const int in_pairs = shape.rows * straight_pitch(shape.columns, 2);
            if (turns == Turns::kWalk) {
              TPK_CHECK(m.meeting_bytes >= in_pairs, here);
            } else {
              const int room = m.stages * m.stage_bytes;
              TPK_CHECK(room >= (shape.swapped ? finished : shape.rows * straight_pitch(units * kUnit, 4)),
                        here);
              TPK_CHECK(room >= in_pairs || cluster.k > 1, here);
              TPK_CHECK(m.meeting_bytes >= (cluster.k > 1 ? cluster.k * finished : 0), here);
            }
            const int sharing = one_tile_sharers(tile, m);
            TPK_CHECK(sharing >= 1 && sharing * (m.total() + 1024) <= 233472, here);
          }
        }
      }
    }
  }
}

// Few tiles are there at once; many are walked through where nothing but the product is stored.
void check_turns() {
  const auto turns = [](const char* text, int64_t tiles, bool plain) {
    const NamedTile t = *find_tile(text);
    return turns_of(t.id, kClusterShapes[t.cluster], tiles, 60, plain);
  };
  TPK_CHECK(turns("128x256x64w/2x1", 60, true) == Turns::kOnce, "all fit");
  TPK_CHECK(turns("128x256x64w/2x1", 61, true) == Turns::kWalk, "no room for two");
  TPK_CHECK(turns("128x256x64w/2x1", 61, false) == Turns::kCrowd, "bias and the like lie where stages were");
  TPK_CHECK(turns("128x128x64w/2x1", 120, true) == Turns::kCrowd, "two to a multiprocessor");
  TPK_CHECK(turns("128x128x64w/2x1", 121, true) == Turns::kWalk, "more than two");
  TPK_CHECK(turns("64x128x64s/1x1x2", 500, true) == Turns::kCrowd, "CTAs along K have sums to send");
  TPK_CHECK(turns("128x256x64w/2x1", int64_t{1} << 31, true) == Turns::kCrowd, "a number for each tile");
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
            const double us = one_tile_us({m, n, k, 1}, tile, cluster, false, true, false,
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
  check_names();
  check_memory();
  check_turns();
  check_cost();
  return tpk::test::result("sm90a one tile", cases);
}

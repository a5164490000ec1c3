// What the tiles of 8-bit operands cost, beside what HopperCost says of all tiles.
#pragma once

#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

// How products are made: of 2-byte operands, or of 8-bit ones with sums in the tensor cores, in two levels,
// or with scales of blocks: scaled.cuh.
enum class Product : int32_t { kHalf, kFast, kPromoted, kBlocks };
constexpr int kNumScaledProducts = 3;

// Times in microseconds, by tile in the order of TileId.
struct ScaledCost {
  double iter_us[kNumScaledProducts][kNumScaledTiles][kNumClusterShapes];  // one iteration, 128 of K
  double epilogue_us[kNumScaledTiles];                                     // one tile: what is not hidden
};

// Not fitted yet: iterations take what 64 of K of 2-byte operands do.
inline constexpr ScaledCost kCostScaled{{{{0.772, 0.776, 0.779}, {0.413, 0.398, 0.427}},
                                         {{0.800, 0.800, 0.800}, {0.430, 0.430, 0.430}},
                                         {{0.850, 0.850, 0.850}, {0.450, 0.450, 0.450}}},
                                        {2.6, 1.5}};

}  // namespace tpk::sm90a

// What the tiles of 8-bit operands cost, beside what HopperCost says of all tiles.
#pragma once

#include "kernels/sm90a/tiles.hpp"

namespace tpk::sm90a {

// How products are made: of 2-byte operands, or of 8-bit ones with sums in the tensor cores, in two levels,
// or with scales of blocks: scaled.cuh.
enum class Product : int32_t { kHalf, kFast, kPromoted, kBlocks };
constexpr int kNumScaledProducts = 3;

// Times in microseconds, by tile in the order of TileId.
struct ScaledCost {
  double iter_us[kNumScaledProducts][kNumScaledTiles][kNumWalkingClusters];  // one iteration, 128 of K
  double epilogue_us[kNumScaledTiles];                                       // one tile: what is not hidden
};

// Iterations are fitted to ten shapes of bfloat16 outputs by data_parallel on one H200 (development
// measurement), 64x7168x2048 to 8192x8192x8192, together with an epilogue; rms error 9 to 15 %, most of it
// power.
inline constexpr ScaledCost kCostScaled{{{{0.725, 0.726, 0.728}, {0.394, 0.393, 0.392}},
                                         {{0.829, 0.835, 0.831}, {0.437, 0.437, 0.436}},
                                         {{0.990, 1.000, 0.985}, {0.610, 0.606, 0.596}}},
                                        {2.0, 1.6}};

}  // namespace tpk::sm90a

// Compile-time choices of the Hopper Stream-K kernel. Pure C++: shared by kernel, launcher, planner and CPU
// tests. All its source files include this, and none tiles.hpp, which names the tiles of all kernels.
#pragma once

#include <cstdint>

#include "kernels/gemm_types.hpp"

namespace tpk::sm90a {

// How an operand lies in memory; "outer" is M for A and N for B. TMA takes both, wgmma reads both. Anything
// else goes to the portable kernel.
enum class Major : int32_t { kK, kOuter };

constexpr int kElementBytes = 2;
constexpr int kSwizzleBytes = 128;                          // rows of a swizzled box
constexpr int kBK = kSwizzleBytes / kElementBytes;          // 64 elements of K per iteration
constexpr int kChunkOuter = kSwizzleBytes / kElementBytes;  // columns of a box of an outer-major operand
constexpr int kWarpgroup = 128;                             // threads
constexpr int kStagingBytes = 2048;                         // of a consumer warp: 16 rows x 128 bytes
constexpr int kSharedLimit = 232448;                        // 227 KiB
constexpr int kScaledBK = kSwizzleBytes;                    // elements of K per iteration, of 8 bits

// A CTA computes tiles of kBM x kBN. Cooperative: its consumer warpgroups share a tile, as many rows each.
// Pingpong: two of them take tiles in turn, so that the epilogue of one runs under the main loop of the
// other.
template <int BM, int BN, int Stages, bool Pingpong, int Consumers = 2>
struct TileConfig {
  static constexpr int kBM = BM;
  static constexpr int kBN = BN;
  static constexpr int kStages = Stages;
  static constexpr bool kPingpong = Pingpong;
  static constexpr int kConsumers = Consumers;                    // warpgroups that multiply
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);  // and one that loads

  static constexpr int kRows = Pingpong ? BM : BM / kConsumers;  // of a consumer warpgroup
  static constexpr int kBlocks = kRows / 64;                     // wgmma computes 64 rows
  static constexpr int kBlockAccumulators = BN / 2;              // fp32 registers of a thread for 64 x BN
  static constexpr int kAccumulators = kBlocks * kBlockAccumulators;

  static constexpr int kBK = sm90a::kBK;
  static constexpr bool kScaled = false;

  static constexpr int kBytesA = BM * kSwizzleBytes;  // of one stage
  static constexpr int kBytesB = BN * kSwizzleBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  // setmaxnreg: one warpgroup at kProducerRegisters and the others at kConsumerRegisters share 64 Ki
  // registers.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kAccumulators > 128 ? 40 : 72;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kAccumulators > 128 ? 232 : 216;

  static_assert(kRows % 64 == 0, "wgmma computes blocks of 64 rows.");
  static_assert(!Pingpong || Consumers == 2, "Turns are taken by two.");
  static_assert(kWarpgroup * (kProducerRegisters + Consumers * kConsumerRegisters) <= 65536,
                "Too many registers.");
  static_assert(BN % 64 == 0 && BN <= 256, "Boxes of an outer-major B are 64 columns wide; wgmma takes 256.");
  static_assert(kAccumulators <= 192, "More accumulators would spill.");
};

// Of 8-bit operands with scales: twice the elements in the same bytes. The consumers need registers for 64 x
// 128 products beside their sums: scaled.cuh.
template <int BM, int BN, int Stages>
struct ScaledTileConfig : TileConfig<BM, BN, Stages, false> {
  static constexpr int kBK = kScaledBK;
  static constexpr bool kScaled = true;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(BM == 128, "A warpgroup has 64 rows: of more, the sums leave no registers for products.");
  static_assert(BN % 128 == 0, "A product has 128 columns, and one scale of B where blocks are square.");
};

using Tile128x256 = TileConfig<128, 256, 4, false>;
using Tile256x128 = TileConfig<256, 128, 4, false>;
using Tile256x192 = TileConfig<256, 192, 3, false>;
using Tile128x192 = TileConfig<128, 192, 5, true>;
using Tile128x128 = TileConfig<128, 128, 6, true>;
using Tile192x192 = TileConfig<192, 192, 4, false, 3>;
using ScaledTile128x256 = ScaledTileConfig<128, 256, 4>;
using ScaledTile128x128 = ScaledTileConfig<128, 128, 6>;

}  // namespace tpk::sm90a

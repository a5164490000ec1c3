// Compile-time choices of the portable Stream-K kernel. Pure C++: shared by kernel, launcher and CPU tests.
#pragma once

#include <cstdint>

#include "host/problem.hpp"
#include "kernels/gemm_types.hpp"

namespace tpk::sm80 {

using tpk::Activation;
using tpk::Element;
using tpk::ScalarKind;

// How an operand lies in memory. "Outer" is M for A and N for B.
//   kKMajor      K is contiguous and 16-byte loads are possible
//   kOuterMajor  M or N is contiguous and 16-byte loads are possible
//   kStrided     anything else: element loads through arbitrary strides
enum class OperandLayout : int32_t { kKMajor, kOuterMajor, kStrided };

enum class TileId : int32_t { k128x128, k64x64 };

// Operand elements are 2 bytes; they move in chunks of 16 bytes.
constexpr int kElementBytes = 2;
constexpr int kChunkBytes = 16;
constexpr int kChunkElements = kChunkBytes / kElementBytes;

// Output tile kBM x kBN, advanced kBK along K per iteration, by kWarpsM x kWarpsN warps.
template <int BM, int BN, int WarpsM, int WarpsN, int Stages, int MinCtas>
struct TileConfig {
  static constexpr int kBM = BM;
  static constexpr int kBN = BN;
  static constexpr int kBK = 32;
  static constexpr int kWarpsM = WarpsM;
  static constexpr int kWarpsN = WarpsN;
  static constexpr int kThreads = 32 * WarpsM * WarpsN;
  static constexpr int kStages = Stages;
  static constexpr int kMinCtas = MinCtas;  // CTAs per multiprocessor that the register budget must allow

  static constexpr int kWarpM = BM / WarpsM;  // a warp's part of the tile
  static constexpr int kWarpN = BN / WarpsN;
  static constexpr int kFragmentsM = kWarpM / 16;  // mma.m16n8k16 blocks of a warp
  static constexpr int kFragmentsN = kWarpN / 8;
  static constexpr int kKSteps = kBK / 16;
  static constexpr int kAccumulators = kFragmentsM * kFragmentsN * 4;  // fp32 registers per thread

  static constexpr int kBytesA = BM * kBK * kElementBytes;  // one stage
  static constexpr int kBytesB = BN * kBK * kElementBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kOutputBytes = BM * BN * 4;  // the epilogue stages the fp32 tile in the same memory
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kOutputBytes ? kStages * kStageBytes : kOutputBytes;

  static_assert(kBK == 32, "The shared-memory layouts are written for 32 elements of K per stage.");
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "A warp loads operand fragments of 16 x 16 elements.");
  static_assert(kKSteps % 2 == 0, "Fragment buffers alternate between the two K steps of a stage.");
  static_assert(Stages >= 3, "One stage is read, one is filled, one is waited for.");
};

// Four warps of 64 x 64: each operand byte read from shared memory feeds the most products, which is what
// limits mma.sync kernels; 128 accumulators leave room for two CTAs per multiprocessor.
using Tile128x128 = TileConfig<128, 128, 2, 2, 4, 2>;
// For small outputs: four times as many tiles to spread over the multiprocessors.
using Tile64x64 = TileConfig<64, 64, 2, 2, 4, 4>;

// In the order of TileId.
inline constexpr TileShape kTileShapes[] = {{Tile128x128::kBM, Tile128x128::kBN, Tile128x128::kBK},
                                            {Tile64x64::kBM, Tile64x64::kBN, Tile64x64::kBK}};

inline TileShape tile_shape(TileId id) { return kTileShapes[static_cast<int>(id)]; }

}  // namespace tpk::sm80

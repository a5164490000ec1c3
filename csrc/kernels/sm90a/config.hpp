// Compile-time choices of the Hopper Stream-K kernel. Pure C++: shared by kernel, launcher, planner and CPU
// tests.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "host/problem.hpp"
#include "kernels/gemm_types.hpp"

namespace tpk::sm90a {

// How an operand lies in memory; "outer" is M for A and N for B. TMA takes both, wgmma reads both. Anything
// else goes to the portable kernel.
enum class Major : int32_t { kK, kOuter };

// CTAs of a cluster: those along M share B, those along N share A, by multicast of each other's loads. Those
// along K (swapped tiles alone: one_tile.hpp) work on one tile, take its iterations in turn, and add what
// they have through each other's shared memory.
struct ClusterShape {
  int32_t m = 1;
  int32_t n = 1;
  int32_t k = 1;
  constexpr int32_t size() const { return m * n * k; }
};
// The first three are those of tiles that are not swapped.
inline constexpr ClusterShape kClusterShapes[] = {{2, 1},    {1, 2},    {1, 1},    {2, 2},    {4, 1},
                                                  {4, 2},    {1, 1, 2}, {2, 1, 2}, {1, 2, 2}, {2, 2, 2},
                                                  {1, 1, 4}, {2, 1, 4}, {1, 2, 4}, {1, 1, 8}};
constexpr int kNumClusterShapes = 14;
constexpr int kNumWalkingClusters = 3;
static_assert(std::size(kClusterShapes) == kNumClusterShapes);

constexpr int cluster_index(ClusterShape c) {
  int i = 0;
  while (kClusterShapes[i].m != c.m || kClusterShapes[i].n != c.n || kClusterShapes[i].k != c.k) ++i;
  return i;
}

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

// Swapped tiles are 16 to 128 rows high, in steps of 16, and 64 or 128 columns wide.
constexpr int kNumHeights = 8;
constexpr int kHeightStep = 16;
constexpr int kNumWidths = 2;

// First the tiles of the kernel that walks a schedule, then the swapped ones of the kernel that does not
// (one_tile.cuh), in the order of widths and heights, then those of 8-bit operands.
enum class TileId : int32_t {
  k128x256,
  k256x128,
  k256x192,
  k128x192,
  k128x128,
  k192x192,
  kFirstSwapped,
  kScaled128x256 = kFirstSwapped + kNumHeights * kNumWidths,
  kScaled128x128
};
using Tile128x256 = TileConfig<128, 256, 4, false>;
using Tile256x128 = TileConfig<256, 128, 4, false>;
using Tile256x192 = TileConfig<256, 192, 3, false>;
using Tile128x192 = TileConfig<128, 192, 5, true>;
using Tile128x128 = TileConfig<128, 128, 6, true>;
using Tile192x192 = TileConfig<192, 192, 4, false, 3>;
using ScaledTile128x256 = ScaledTileConfig<128, 256, 4>;
using ScaledTile128x128 = ScaledTileConfig<128, 128, 6>;

constexpr int kNumWalkingTiles = static_cast<int>(TileId::kFirstSwapped);
constexpr int kNumTiles = static_cast<int>(TileId::kScaled128x256);  // of 2-byte operands, which come first
constexpr int kNumScaledTiles = 2;
constexpr int kNumAllTiles = kNumTiles + kNumScaledTiles;

constexpr bool is_scaled(TileId id) { return static_cast<int>(id) >= kNumTiles; }
constexpr bool is_swapped(TileId id) {
  return static_cast<int>(id) >= kNumWalkingTiles && static_cast<int>(id) < kNumTiles;
}
constexpr TileId swapped_tile(int height, int width) {
  return static_cast<TileId>(kNumWalkingTiles + (width / 64 - 1) * kNumHeights + height / kHeightStep - 1);
}
constexpr int element_bytes(TileId id) { return is_scaled(id) ? 1 : kElementBytes; }

// The tile of one CTA, as rows and columns of the product (not of the kernel, where they may be swapped).
constexpr TileShape tile_shape(TileId id) {
  constexpr TileShape kWalking[] = {{128, 256, kBK}, {256, 128, kBK}, {256, 192, kBK},
                                    {128, 192, kBK}, {128, 128, kBK}, {192, 192, kBK}};
  static_assert(std::size(kWalking) == kNumWalkingTiles);
  if (is_scaled(id)) return {128, id == TileId::kScaled128x256 ? 256 : 128, kScaledBK};
  if (!is_swapped(id)) return kWalking[static_cast<int>(id)];
  const int i = static_cast<int>(id) - kNumWalkingTiles;
  return {(i % kNumHeights + 1) * kHeightStep, (i / kNumHeights + 1) * 64, kBK};
}

constexpr bool is_pingpong(TileId id) { return id == TileId::k128x192 || id == TileId::k128x128; }

// Clusters that a tile is compiled for. Each CTA loads a part of what others need, too: whole groups of 8
// rows.
constexpr bool takes_cluster(TileId id, ClusterShape c) {
  if (!is_swapped(id)) return cluster_index(c) < kNumWalkingClusters;
  return tile_shape(id).bm / c.n % 8 == 0;
}

// Parts of a partial tile: one for every warpgroup that works on it.
constexpr int parts_per_cta(TileId id) { return is_pingpong(id) ? 1 : id == TileId::k192x192 ? 3 : 2; }

// The tile of a cluster, which is what schedules count.
inline TileShape cluster_tile(TileId id, ClusterShape c) {
  const TileShape t = tile_shape(id);
  return {t.bm * c.m, t.bn * c.n, t.bk * c.k};
}

// "128x256x64" is the tile of a CTA, "64x128x64s" one that is swapped.
inline std::string name(TileId id) {
  const TileShape t = tile_shape(id);
  return std::to_string(t.bm) + "x" + std::to_string(t.bn) + "x" + std::to_string(t.bk) +
         (is_swapped(id) ? "s" : "");
}

// "128x256x64/2x1" names the cluster too, "64x128x64s/1x1x4" one with CTAs along K.
inline std::string name(TileId id, ClusterShape c) {
  return name(id) + "/" + std::to_string(c.m) + "x" + std::to_string(c.n) +
         (c.k > 1 ? "x" + std::to_string(c.k) : "");
}

}  // namespace tpk::sm90a

// Compile-time choices of the Hopper Stream-K kernel. Pure C++: shared by kernel, launcher, planner and CPU
// tests.
#pragma once

#include <cstdint>
#include <string>

#include "host/problem.hpp"
#include "kernels/gemm_types.hpp"

namespace tpk::sm90a {

// How an operand lies in memory; "outer" is M for A and N for B. TMA takes both, wgmma reads both. Anything
// else goes to the portable kernel.
enum class Major : int32_t { kK, kOuter };

// CTAs of a cluster: those along M share B, those along N share A, by multicast of each other's loads. Those
// along K (swapped tiles alone) work on one tile, take its iterations in turn, and add what they have through
// each other's shared memory.
struct ClusterShape {
  int32_t m = 1;
  int32_t n = 1;
  int32_t k = 1;
  constexpr int32_t size() const { return m * n * k; }
};
inline constexpr ClusterShape kClusterShapes[] = {{2, 1}, {1, 2}, {1, 1}, {1, 1, 2}, {1, 1, 4}, {1, 1, 8}};
constexpr int kNumClusterShapes = 6;
constexpr int kMostDepth = 8;  // CTAs along K

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

// A CTA computes tiles of kBM x kBN. Cooperative: its consumer warpgroups share a tile, as many rows each.
// Pingpong: two of them take tiles in turn, so that the epilogue of one runs under the main loop of the
// other.
template <int BM, int BN, int Stages, bool Pingpong, int Consumers = 2>
struct TileConfig {
  static constexpr int kBM = BM;
  static constexpr int kBN = BN;
  static constexpr int kStages = Stages;
  static constexpr bool kPingpong = Pingpong;
  static constexpr bool kSwapped = false;
  static constexpr int kConsumers = Consumers;                    // warpgroups that multiply
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);  // and one that loads

  static constexpr int kRows = Pingpong ? BM : BM / kConsumers;  // of a consumer warpgroup
  static constexpr int kBlocks = kRows / 64;                     // wgmma computes 64 rows
  static constexpr int kBlockAccumulators = BN / 2;              // fp32 registers of a thread for 64 x BN
  static constexpr int kAccumulators = kBlocks * kBlockAccumulators;

  static constexpr int kBytesA = BM * kBK * kElementBytes;  // of one stage
  static constexpr int kBytesB = BN * kBK * kElementBytes;
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

// The kernel computes the transpose, with N of the product as its rows and M, which is small, as its columns,
// so that the 64 rows of wgmma are columns of weights, and not padding. kBM and kBN are the kernel's.
template <int BN, int Stages>
struct SwappedTileConfig : TileConfig<128, BN, Stages, false> {
  static constexpr bool kSwapped = true;
};

enum class TileId : int32_t { k128x256, k256x128, k256x192, k128x192, k128x128, k192x192, k64x128s };
using Tile128x256 = TileConfig<128, 256, 4, false>;
using Tile256x128 = TileConfig<256, 128, 4, false>;
using Tile256x192 = TileConfig<256, 192, 3, false>;
using Tile128x192 = TileConfig<128, 192, 5, true>;
using Tile128x128 = TileConfig<128, 128, 6, true>;
using Tile192x192 = TileConfig<192, 192, 4, false, 3>;
using Tile64x128s = SwappedTileConfig<64, 8>;

// In the order of TileId: the tile of one CTA, as rows and columns of the product (not of the kernel, where
// they are swapped).
inline constexpr TileShape kTileShapes[] = {{128, 256, kBK}, {256, 128, kBK}, {256, 192, kBK},
                                            {128, 192, kBK}, {128, 128, kBK}, {192, 192, kBK},
                                            {64, 128, kBK}};
inline constexpr bool kIsPingpong[] = {false, false, false, true, true, false, false};
inline constexpr bool kIsSwapped[] = {false, false, false, false, false, false, true};
constexpr int kNumTiles = 7;

constexpr bool is_swapped(TileId id) { return kIsSwapped[static_cast<int>(id)]; }

// Clusters that a tile is compiled for.
constexpr bool takes_cluster(TileId id, ClusterShape c) {
  return is_swapped(id) ? c.m == 1 && c.n == 1 : c.k == 1;
}

// Parts of a partial tile: one for every warpgroup that works on it.
inline int parts_per_cta(TileId id) {
  constexpr int kParts[] = {2, 2, 2, 1, 1, 3, 2};
  return kParts[static_cast<int>(id)];
}

// The tile of a cluster, which is what schedules count.
inline TileShape cluster_tile(TileId id, ClusterShape c) {
  const TileShape& t = kTileShapes[static_cast<int>(id)];
  return {t.bm * c.m, t.bn * c.n, t.bk * c.k};
}

// "128x256x64" is the tile of a CTA, "64x128x64s" one that is swapped.
inline std::string name(TileId id) {
  const TileShape& t = kTileShapes[static_cast<int>(id)];
  return std::to_string(t.bm) + "x" + std::to_string(t.bn) + "x" + std::to_string(t.bk) +
         (is_swapped(id) ? "s" : "");
}

// "128x256x64/2x1" names the cluster too, "64x128x64s/1x1x4" one with CTAs along K.
inline std::string name(TileId id, ClusterShape c) {
  return name(id) + "/" + std::to_string(c.m) + "x" + std::to_string(c.n) +
         (c.k > 1 ? "x" + std::to_string(c.k) : "");
}

}  // namespace tpk::sm90a

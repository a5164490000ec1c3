// The tiles and clusters of all Hopper kernels, by number and by name. Pure C++: shared by launcher, planner
// and CPU tests.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "host/problem.hpp"
#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

// CTAs of a cluster: those along M share B, those along N share A, by multicast of each other's loads. Those
// along K (one_tile.hpp alone) work on one tile, take a part of K each, and add what they have through
// each other's shared memory.
struct ClusterShape {
  int32_t m = 1;
  int32_t n = 1;
  int32_t k = 1;
  constexpr int32_t size() const { return m * n * k; }
};
// The first three are those of the kernel that walks schedules.
inline constexpr ClusterShape kClusterShapes[] = {
    {2, 1},    {1, 2},    {1, 1},    {2, 2},    {4, 1},    {1, 4},    {4, 2},    {2, 4},
    {1, 1, 2}, {2, 1, 2}, {1, 2, 2}, {2, 2, 2}, {1, 1, 4}, {2, 1, 4}, {1, 2, 4}, {1, 1, 8}};
constexpr int kNumClusterShapes = 16;
constexpr int kNumWalkingClusters = 3;
static_assert(std::size(kClusterShapes) == kNumClusterShapes);

constexpr int cluster_index(ClusterShape c) {
  int i = 0;
  while (kClusterShapes[i].m != c.m || kClusterShapes[i].n != c.n || kClusterShapes[i].k != c.k) ++i;
  return i;
}

// Kernels of one_tile.cuh, for products of less than a few waves: rows of wgmma, whose columns go from the
// first to the last in steps of 16. Registers are dealt out to four warps at a time: the one that loads would
// leave the three warpgroups of 192 rows 128 each, too few beside 96 sums, so that there it is a
// warpgroup, which gives most of its own away.
struct OneTileKernel {
  int rows;
  int first;
  int last;
  int sharers;  // CTAs whose registers a multiprocessor holds
  constexpr bool gives_registers() const { return rows == 192; }
  constexpr int threads() const { return 2 * rows + (gives_registers() ? kWarpgroup : 32); }
};
constexpr int kColumnStep = 16;
inline constexpr OneTileKernel kOneTileKernels[] = {
    {64, 16, 128, 4}, {64, 144, 256, 2}, {128, 16, 128, 2}, {128, 144, 256, 1}, {192, 80, 192, 1}};
constexpr int kNumOneTileKernels = 5;
static_assert(std::size(kOneTileKernels) == kNumOneTileKernels);
constexpr int num_columns(const OneTileKernel& k) { return (k.last - k.first) / kColumnStep + 1; }
constexpr int kNumOneTileShapes = [] {
  int count = 0;
  for (const OneTileKernel& k : kOneTileKernels) count += num_columns(k);
  return count;
}();

// First the tiles of the kernel that walks a schedule, then those of the kernel that does not (one_tile.cuh),
// swapped and straight, in the order of kOneTileKernels and columns, then those of 8-bit operands.
enum class TileId : int32_t {
  k128x256,
  k256x128,
  k256x192,
  k128x192,
  k128x128,
  k192x192,
  kFirstOneTile,
  kScaled128x256 = kFirstOneTile + 2 * kNumOneTileShapes,
  kScaled128x128
};

constexpr int kNumWalkingTiles = static_cast<int>(TileId::kFirstOneTile);
constexpr int kNumTiles = static_cast<int>(TileId::kScaled128x256);  // of 2-byte operands, which come first
constexpr int kNumScaledTiles = 2;
constexpr int kNumAllTiles = kNumTiles + kNumScaledTiles;

constexpr bool is_scaled(TileId id) { return static_cast<int>(id) >= kNumTiles; }
constexpr bool is_one_tile(TileId id) {
  return static_cast<int>(id) >= kNumWalkingTiles && static_cast<int>(id) < kNumTiles;
}
constexpr int element_bytes(TileId id) { return is_scaled(id) ? 1 : kElementBytes; }

// A tile as one_tile.cuh computes it. Swapped: the transpose of the product, whose few rows are columns of
// wgmma then.
struct OneTileShape {
  int kernel;  // of kOneTileKernels
  int rows;    // of wgmma, and its columns
  int columns;
  bool swapped;
};
constexpr OneTileShape one_tile_shape(TileId id) {
  const int i = static_cast<int>(id) - kNumWalkingTiles;
  int left = i % kNumOneTileShapes;
  int kernel = 0;
  for (; left >= num_columns(kOneTileKernels[kernel]); ++kernel) left -= num_columns(kOneTileKernels[kernel]);
  const OneTileKernel& k = kOneTileKernels[kernel];
  return {kernel, k.rows, k.first + left * kColumnStep, i < kNumOneTileShapes};
}
constexpr bool is_swapped(TileId id) { return is_one_tile(id) && one_tile_shape(id).swapped; }

// The tile of one CTA, as rows and columns of the product (not of the kernel, where they may be swapped).
constexpr TileShape tile_shape(TileId id) {
  constexpr TileShape kWalking[] = {{128, 256, kBK}, {256, 128, kBK}, {256, 192, kBK},
                                    {128, 192, kBK}, {128, 128, kBK}, {192, 192, kBK}};
  static_assert(std::size(kWalking) == kNumWalkingTiles);
  if (is_scaled(id)) return {128, id == TileId::kScaled128x256 ? 256 : 128, kScaledBK};
  if (!is_one_tile(id)) return kWalking[static_cast<int>(id)];
  const OneTileShape t = one_tile_shape(id);
  return t.swapped ? TileShape{t.columns, t.rows, kBK} : TileShape{t.rows, t.columns, kBK};
}

constexpr bool is_pingpong(TileId id) { return id == TileId::k128x192 || id == TileId::k128x128; }

// CTAs of a one-tile kernel's cluster that share the rows of wgmma, its columns, and the tile.
struct Sharers {
  int rows;
  int columns;
  int depth;
};
constexpr Sharers sharers_of(TileId id, ClusterShape c) {
  return is_swapped(id) ? Sharers{c.m, c.n, c.k} : Sharers{c.n, c.m, c.k};
}

// Clusters that a tile takes. Each CTA loads a part of what others need, too: whole groups of 8 rows. CTAs
// along K hold what others send beside their stages, so that larger tiles have no room.
constexpr int kMostOfDepth = 128 * 128;  // elements
constexpr bool takes_cluster(TileId id, ClusterShape c) {
  if (!is_one_tile(id)) return cluster_index(c) < kNumWalkingClusters;
  const OneTileShape t = one_tile_shape(id);
  return t.columns / sharers_of(id, c).columns % 8 == 0 && (c.k == 1 || t.rows * t.columns <= kMostOfDepth);
}

// Parts of a partial tile: one for every warpgroup that works on it.
constexpr int parts_per_cta(TileId id) { return is_pingpong(id) ? 1 : id == TileId::k192x192 ? 3 : 2; }

// The tile of a cluster, which is what schedules count.
inline TileShape cluster_tile(TileId id, ClusterShape c) {
  const TileShape t = tile_shape(id);
  return {t.bm * c.m, t.bn * c.n, t.bk * c.k};
}

// "128x256x64" is the tile of a CTA; of those of one_tile.cuh, "64x128x64s" is swapped, "64x128x64w" not.
constexpr const char* suffix(TileId id) { return !is_one_tile(id) ? "" : is_swapped(id) ? "s" : "w"; }
inline std::string name(TileId id) {
  const TileShape t = tile_shape(id);
  return std::to_string(t.bm) + "x" + std::to_string(t.bn) + "x" + std::to_string(t.bk) + suffix(id);
}

// "128x256x64/2x1" names the cluster too, "64x128x64s/1x1x4" one with CTAs along K.
inline std::string name(TileId id, ClusterShape c) {
  return name(id) + "/" + std::to_string(c.m) + "x" + std::to_string(c.n) +
         (c.k > 1 ? "x" + std::to_string(c.k) : "");
}

// A tile that was named, and the index into kClusterShapes of its cluster; -1: any.
struct NamedTile {
  TileId id;
  int cluster = -1;
};
inline std::optional<NamedTile> find_tile(std::string_view text) {
  const size_t slash = text.find('/');
  for (int t = 0; t < kNumAllTiles; ++t) {
    const auto id = static_cast<TileId>(t);
    if (text.substr(0, slash) != name(id)) continue;
    if (slash == std::string_view::npos) return NamedTile{id};
    for (int c = 0; c < kNumClusterShapes; ++c) {
      if (takes_cluster(id, kClusterShapes[c]) && text == name(id, kClusterShapes[c]))
        return NamedTile{id, c};
    }
  }
  return std::nullopt;
}

}  // namespace tpk::sm90a

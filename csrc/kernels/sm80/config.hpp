// Compile-time choices of the portable Stream-K kernel. Pure C++: shared by kernel, launcher and CPU tests.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

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

// Operands move in chunks of 16 bytes.
constexpr int kChunkBytes = 16;
constexpr int chunk_elements(int element_bytes) { return kChunkBytes / element_bytes; }

// Type of the sums, and of all that is computed once per tile.
template <Element kElement>
using SumOf = std::conditional_t<kElement == Element::kFp64, double, float>;

// K elements of a step: of an mma instruction (for fp64 of the shortest, which needs the fewest registers;
// see TileConfig::kInPairs); a chunk for plain fp32, which multiplies on the ordinary cores.
constexpr int step_elements(Element e) {
  return e == Element::kFp32 || e == Element::kFp64 ? 4 : e == Element::kTf32 ? 8 : 16;
}

// Output tile kBM x kBN by kWarpsM x kWarpsN warps. K is cut in iterations of kBK elements, and comes in
// stages of kStageK: of a segment's last stage there may be nothing but zeros behind the segment's end.
template <Element Operand, int BM, int BN, int BK, int StageK, int WarpsM, int WarpsN, int Stages,
          int MinCtas>
struct TileConfig {
  static constexpr Element kElement = Operand;
  static constexpr int kElementBytes = bytes_of(Operand);
  using Sum = SumOf<Operand>;

  static constexpr int kBM = BM;
  static constexpr int kBN = BN;
  static constexpr int kBK = BK;
  static constexpr int kStageK = StageK;
  static constexpr int kWarpsM = WarpsM;
  static constexpr int kWarpsN = WarpsN;
  static constexpr int kThreads = 32 * WarpsM * WarpsN;
  static constexpr int kStages = Stages;
  static constexpr int kMinCtas = MinCtas;  // CTAs per multiprocessor that the register budget must allow

  static constexpr int kWarpM = BM / WarpsM;  // a warp's part of the tile
  static constexpr int kWarpN = BN / WarpsN;
  static constexpr int kFragmentsM = kWarpM / 16;  // blocks of 16 x 8 elements of a warp
  static constexpr int kFragmentsN = kWarpN / 8;
  static constexpr int kStep = step_elements(Operand);
  static constexpr int kKSteps = kStageK / kStep;
  // fp64: two steps are one instruction, which takes less power: 2 to 20 % of long products on an H200 under
  // a full load, nothing of short ones. Warps of 64 x 32 have no registers to read ahead then; smaller ones
  // read ahead, and would lose 7 %.
  static constexpr bool kInPairs = Operand == Element::kFp64 && kFragmentsM * kFragmentsN >= 16;

  static constexpr int kBytesA = BM * kStageK * kElementBytes;  // one stage
  static constexpr int kBytesB = BN * kStageK * kElementBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kRingBytes = kStages * kStageBytes;

  // The epilogue stages the tile's sums in the same memory: whole, or in kParts bands of every warp's rows.
  static constexpr int kSumBytes = BM * BN * static_cast<int>(sizeof(Sum));
  static constexpr int kParts = kSumBytes > kRingBytes ? 2 : 1;
  static constexpr int kSharedBytes = kRingBytes;

  static_assert(kSumBytes <= kParts * kRingBytes, "A part of the sums fits into the stages' memory.");
  static_assert(kFragmentsM % kParts == 0, "A part is whole fragments of every warp.");
  static_assert(kStageK % kBK == 0, "A stage is whole iterations.");
  static_assert(kStageK * kElementBytes == 64 || kStageK * kElementBytes == 128,
                "The shared-memory layouts are written for rows of 64 or 128 bytes along K.");
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "A warp loads operand fragments 16 elements high.");
  static_assert(kKSteps % 2 == 0, "Fragment buffers alternate between the K steps of a stage.");
  static_assert(Stages >= 3, "One stage is read, one is filled, one is waited for.");
};

// The tiles of an element, and what the planner has to know of each.
struct TileFacts {
  TileShape shape;
  int64_t resident;  // CTAs that a multiprocessor holds of its vector kernels, where shared memory allows it
};

template <class... Tiles>
struct TileSet {
  static constexpr TileFacts kFacts[sizeof...(Tiles)] = {
      {{Tiles::kBM, Tiles::kBN, Tiles::kBK}, Tiles::kMinCtas}...};
  static constexpr TileShape kShapes[sizeof...(Tiles)] = {{Tiles::kBM, Tiles::kBN, Tiles::kBK}...};
};

// Half precision. Warps of 64 x 64: each operand byte read from shared memory feeds the most products. Eight
// of them, on a multiprocessor of their own, read the fewest bytes from L2, the next limit of mma.sync.
template <Element kElement>
using HalfTiles = TileSet<TileConfig<kElement, 128, 256, 32, 64, 2, 4, 3, 1>,
                          TileConfig<kElement, 128, 128, 32, 64, 2, 2, 3, 2>,
                          // For small outputs: more tiles to spread over the multiprocessors.
                          TileConfig<kElement, 64, 64, 32, 64, 2, 2, 3, 4>>;

using Tf32Tiles = TileSet<TileConfig<Element::kTf32, 128, 256, 16, 32, 2, 4, 3, 1>,
                          TileConfig<Element::kTf32, 64, 64, 16, 32, 2, 2, 3, 4>>;

// A thread has 8 x 8 sums, or 4 x 8.
using Fp32Tiles = TileSet<TileConfig<Element::kFp32, 128, 128, 16, 16, 2, 4, 4, 1>,
                          TileConfig<Element::kFp32, 64, 64, 16, 16, 2, 2, 4, 3>>;

using Fp64Tiles = TileSet<TileConfig<Element::kFp64, 128, 128, 16, 16, 2, 4, 3, 1>,
                          TileConfig<Element::kFp64, 128, 64, 16, 16, 2, 2, 3, 2>,
                          TileConfig<Element::kFp64, 64, 128, 16, 16, 1, 4, 3, 2>,
                          // Where a multiprocessor has no second CTA: eight warps.
                          TileConfig<Element::kFp64, 128, 64, 8, 16, 4, 2, 3, 1>,
                          TileConfig<Element::kFp64, 64, 64, 16, 16, 2, 2, 4, 3>,
                          TileConfig<Element::kFp64, 64, 32, 16, 16, 2, 2, 4, 4>,
                          TileConfig<Element::kFp64, 32, 64, 16, 16, 2, 2, 4, 3>,
                          TileConfig<Element::kFp64, 32, 32, 16, 16, 2, 2, 4, 5>>;

template <Element kElement>
struct TilesOfElement {
  using Type = HalfTiles<kElement>;
};
template <>
struct TilesOfElement<Element::kTf32> {
  using Type = Tf32Tiles;
};
template <>
struct TilesOfElement<Element::kFp32> {
  using Type = Fp32Tiles;
};
template <>
struct TilesOfElement<Element::kFp64> {
  using Type = Fp64Tiles;
};
template <Element kElement>
using TilesOf = typename TilesOfElement<kElement>::Type;

// Calls body(std::integral_constant<Element, e>{}), and returns what it returns.
template <class Body>
auto with_element(Element e, Body body) {
  switch (e) {
    case Element::kFp16:
      return body(std::integral_constant<Element, Element::kFp16>{});
    case Element::kFp32:
      return body(std::integral_constant<Element, Element::kFp32>{});
    case Element::kTf32:
      return body(std::integral_constant<Element, Element::kTf32>{});
    case Element::kFp64:
      return body(std::integral_constant<Element, Element::kFp64>{});
    default:
      return body(std::integral_constant<Element, Element::kBf16>{});
  }
}

// A tile is known by its place in these lists, where the largest comes first.
inline std::span<const TileFacts> tile_facts(Element e) {
  return with_element(e, [](auto of) { return std::span<const TileFacts>(TilesOf<of.value>::kFacts); });
}
inline std::span<const TileShape> tile_shapes(Element e) {
  return with_element(e, [](auto of) { return std::span<const TileShape>(TilesOf<of.value>::kShapes); });
}

constexpr int kMostTiles = 8;

}  // namespace tpk::sm80

// Index maps of the portable kernel: shared-memory swizzles, fragments, accumulators. Pure functions, tested
// on the CPU by cmake/tests/sm80_layout_test.cpp.
//
// An operand tile is `extent` x 32 elements (extent along M or N, 32 along K), held in 16-byte chunks.
// ldmatrix reads eight chunks at a time; a swizzle puts those eight into different banks.
#pragma once

#include <cstdint>

#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

struct ChunkCoord {
  int outer;  // first element along M or N
  int k;      // first element along K
};

// A warp reads fragments of 16 (M or N) x 16 (K) elements: four registers, each an 8 x 8 block. For A,
// mma.m16n8k16 wants the blocks in the order (outer, k) = (0, 0), (1, 0), (0, 1), (1, 1). For B the fragment
// holds two n8 blocks, and each must be a pair of neighbouring registers: (0, 0), (0, 1), (1, 0), (1, 1).
enum class FragmentOrder { kA, kB };

struct BlockCoord {
  int outer;  // 0 or 1
  int k;
};

// The block whose row address this lane gives to ldmatrix.
TPK_HD BlockCoord fragment_block(FragmentOrder order, int lane) {
  const int low = (lane >> 3) & 1;
  const int high = lane >> 4;
  return order == FragmentOrder::kA ? BlockCoord{low, high} : BlockCoord{high, low};
}

// K-contiguous tile: rows of 4 chunks (64 bytes). The eight rows that ldmatrix reads lie in four lines of
// 128 bytes, two rows a line, so two bits of the row pair's number are enough.
template <int kExtent>
struct KMajorTile {
  static constexpr int kChunksPerRow = 4;
  static constexpr int kChunks = kExtent * kChunksPerRow;

  // Byte offset of elements (outer, 8 * k_chunk ... 8 * k_chunk + 7).
  TPK_HD static uint32_t offset(int outer, int k_chunk) {
    return static_cast<uint32_t>(outer * 64 + ((k_chunk ^ ((outer >> 1) & 3)) << 4));
  }
  // Chunk number `id` in load order: consecutive threads read along K.
  TPK_HD static ChunkCoord chunk(int id) { return {id / kChunksPerRow, id % kChunksPerRow * kChunkElements}; }

  // ldmatrix addresses of a warp whose part of the tile starts at first_outer (a multiple of 16): fragment f
  // (16 x 16 elements) of K step s is at address(order, lane, first_outer, address_index(f, s)) +
  // address_bias(f, s).
  static constexpr int kAddresses = 2;  // one per K step
  TPK_HD static uint32_t address(FragmentOrder order, int lane, int first_outer, int i) {
    const BlockCoord b = fragment_block(order, lane);
    return offset(first_outer + 8 * b.outer + (lane & 7), 2 * i + b.k);
  }
  TPK_HD static constexpr int address_index(int /*fragment*/, int k_step) { return k_step; }
  TPK_HD static constexpr uint32_t address_bias(int fragment, int /*k_step*/) {
    return static_cast<uint32_t>(fragment) * 16 * 64;
  }
  static constexpr bool kTransposed = false;
};

// M- or N-contiguous tile: 32 rows (K) of extent / 8 chunks; ldmatrix.trans reads the same chunk of eight
// rows.
template <int kExtent>
struct OuterMajorTile {
  static constexpr int kChunksPerRow = kExtent / kChunkElements;
  static constexpr int kChunks = 32 * kChunksPerRow;
  static constexpr int kRowBytes = kExtent * kElementBytes;
  static_assert(kChunksPerRow % 8 == 0, "The swizzle permutes groups of eight chunks.");

  // Byte offset of elements (8 * outer_chunk ... 8 * outer_chunk + 7, k).
  TPK_HD static uint32_t offset(int outer_chunk, int k) {
    return static_cast<uint32_t>(k * kRowBytes + ((outer_chunk ^ (k & 7)) << 4));
  }
  TPK_HD static ChunkCoord chunk(int id) { return {id % kChunksPerRow * kChunkElements, id / kChunksPerRow}; }

  // One address per fragment of a warp (at most 4); the K step is 16 rows further on.
  static constexpr int kAddresses = 4;
  TPK_HD static constexpr int address_index(int fragment, int /*k_step*/) { return fragment; }
  TPK_HD static constexpr uint32_t address_bias(int /*fragment*/, int k_step) {
    return static_cast<uint32_t>(k_step) * 16 * kRowBytes;
  }
  TPK_HD static uint32_t address(FragmentOrder order, int lane, int first_outer, int i) {
    const BlockCoord b = fragment_block(order, lane);
    return offset(first_outer / kChunkElements + 2 * i + b.outer, 8 * b.k + (lane & 7));
  }
  static constexpr bool kTransposed = true;
};

// Strided operands are packed K-major.
template <OperandLayout kLayout, int kExtent>
struct OperandTileSelect {
  using Type = KMajorTile<kExtent>;
};
template <int kExtent>
struct OperandTileSelect<OperandLayout::kOuterMajor, kExtent> {
  using Type = OuterMajorTile<kExtent>;
};
template <OperandLayout kLayout, int kExtent>
using OperandTile = typename OperandTileSelect<kLayout, kExtent>::Type;

// Where accumulator register r (0 ... 3) of an m16n8 block lies in the block.
TPK_HD constexpr int accumulator_row(int lane, int r) { return lane / 4 + 8 * (r / 2); }
TPK_HD constexpr int accumulator_col(int lane, int r) { return 2 * (lane % 4) + r % 2; }

// The fp32 output tile in shared memory, in floats: chunks of 4 columns, swizzled so that the fragment-wise
// writes of 8 bytes and the row-wise reads of 16 bytes are both free of bank conflicts.
template <int kBN>
TPK_HD uint32_t output_offset(int row, int col) {
  return static_cast<uint32_t>(row * kBN + (((col >> 2) ^ ((row & 3) << 1)) << 2) + (col & 3));
}

}  // namespace tpk::sm80

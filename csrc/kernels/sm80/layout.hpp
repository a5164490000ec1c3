// Index maps of the portable kernel: shared-memory swizzles, fragments, accumulators. Pure functions, tested
// on the CPU by cmake/tests/sm80_layout_test.cpp.
//
// An operand tile is `extent` elements along M or N by kBK along K, held in 16-byte chunks. The swizzles put
// the chunks that are read together into different banks.
#pragma once

#include <cstdint>

#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

struct ChunkCoord {
  int outer;  // first element along M or N
  int k;      // first element along K
};

// A warp reads fragments of 16 (M or N) elements by one K step. For the tensor cores a lane has four
// registers of a fragment, one of each of its four blocks of 8 (M or N) by half a step. For A mma wants the
// blocks in the order (outer, k) = (0, 0), (1, 0), (0, 1), (1, 1). For B the fragment holds two n8 blocks,
// and each must be a pair of neighbouring registers: (0, 0), (0, 1), (1, 0), (1, 1).
enum class FragmentOrder { kA, kB };

struct BlockCoord {
  int outer;  // 0 or 1
  int k;
};

// The block of register r, and the one whose row address lane 8 r ... 8 r + 7 gives to ldmatrix.
TPK_HD constexpr BlockCoord fragment_block(FragmentOrder order, int r) {
  const int low = r & 1;
  const int high = r >> 1;
  return order == FragmentOrder::kA ? BlockCoord{low, high} : BlockCoord{high, low};
}

// K-contiguous tile: rows of 64 or 128 bytes. Read together are the same chunk of eight rows that start at a
// multiple of eight; of 8-byte elements two chunks of rows 0 ... 3 or 4 ... 7.
template <int kExtent, int kBK, int kElementBytes>
struct KMajorTile {
  static constexpr int kRowBytes = kBK * kElementBytes;
  static constexpr int kChunkElements = chunk_elements(kElementBytes);
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static constexpr int kChunks = kExtent * kChunksPerRow;
  static_assert(kRowBytes == 128 || kElementBytes < 8,
                "Rows of 8-byte elements have the width of all banks.");

  // Byte offset of the k_chunk-th chunk of a row.
  TPK_HD static uint32_t offset(int outer, int k_chunk) {
    const int moved = kElementBytes == 8 ? (outer & 3) << 1 : kRowBytes == 64 ? outer >> 1 & 3 : outer & 7;
    return static_cast<uint32_t>(outer * kRowBytes + ((k_chunk ^ moved) << 4));
  }
  // Chunk number `id` in load order: consecutive threads read along K.
  TPK_HD static ChunkCoord chunk(int id) { return {id / kChunksPerRow, id % kChunksPerRow * kChunkElements}; }
};

// M- or N-contiguous tile: rows of `extent` elements, one for each of K. Read together are the same chunk of
// eight rows by ldmatrix.trans, or two chunks of rows 0 ... 3 or 4 ... 7 of larger elements.
template <int kExtent, int kBK, int kElementBytes>
struct OuterMajorTile {
  static constexpr int kChunkElements = chunk_elements(kElementBytes);
  static constexpr int kChunksPerRow = kExtent / kChunkElements;
  static constexpr int kChunks = kBK * kChunksPerRow;
  static constexpr int kRowBytes = kExtent * kElementBytes;
  static_assert(kChunksPerRow % 8 == 0, "The swizzle permutes groups of eight chunks.");

  // What is xored into the number of a chunk of row k. Linear: of rows i + j without common bits it is the
  // xor.
  TPK_HD static constexpr int swizzle(int k) { return kElementBytes == 2 ? k & 7 : (k & 3) << 1; }
  // Byte offset of elements (outer_chunk * kChunkElements ..., k).
  TPK_HD static uint32_t offset(int outer_chunk, int k) {
    return static_cast<uint32_t>(k * kRowBytes + ((outer_chunk ^ swizzle(k)) << 4));
  }
  TPK_HD static ChunkCoord chunk(int id) { return {id % kChunksPerRow * kChunkElements, id / kChunksPerRow}; }
};

// Strided operands are packed K-major.
template <OperandLayout kLayout, int kExtent, int kBK, int kElementBytes>
using OperandTile =
    std::conditional_t<kLayout == OperandLayout::kOuterMajor, OuterMajorTile<kExtent, kBK, kElementBytes>,
                       KMajorTile<kExtent, kBK, kElementBytes>>;

// Where ldmatrix finds the fragments of a warp whose part of the tile starts at first_outer (a multiple of
// 16): fragment f of K step s is at address(order, lane, first_outer, address_index(f, s)) + address_bias(f,
// s). Its blocks are 8 rows by 16 bytes, whatever the element: in a K-major tile, and for 2-byte elements
// transposed in an outer-major one.
template <class Tile, int kSteps>
struct KMajorAddresses {
  static constexpr bool kTransposed = false;
  static constexpr int kCount = kSteps;  // one per K step
  TPK_HD static uint32_t address(FragmentOrder order, int lane, int first_outer, int i) {
    const BlockCoord b = fragment_block(order, lane >> 3);
    return Tile::offset(first_outer + 8 * b.outer + (lane & 7), 2 * i + b.k);
  }
  TPK_HD static constexpr int address_index(int /*fragment*/, int k_step) { return k_step; }
  TPK_HD static constexpr uint32_t address_bias(int fragment, int /*k_step*/) {
    return static_cast<uint32_t>(fragment) * 16 * Tile::kRowBytes;
  }
};

template <class Tile, int kFragments>
struct OuterMajorAddresses {
  static constexpr bool kTransposed = true;
  static constexpr int kCount = kFragments;  // the K step is 16 rows further on
  TPK_HD static uint32_t address(FragmentOrder order, int lane, int first_outer, int i) {
    const BlockCoord b = fragment_block(order, lane >> 3);
    return Tile::offset(first_outer / Tile::kChunkElements + 2 * i + b.outer, 8 * b.k + (lane & 7));
  }
  TPK_HD static constexpr int address_index(int fragment, int /*k_step*/) { return fragment; }
  TPK_HD static constexpr uint32_t address_bias(int /*fragment*/, int k_step) {
    return static_cast<uint32_t>(k_step) * 16 * Tile::kRowBytes;
  }
};

// Where accumulator register r (0 ... 3) of an m16n8 block lies in the block.
TPK_HD constexpr int accumulator_row(int lane, int r) { return lane / 4 + 8 * (r / 2); }
TPK_HD constexpr int accumulator_col(int lane, int r) { return 2 * (lane % 4) + r % 2; }

// The tile's sums in shared memory, in elements, a row after the other: chunks of 16 bytes, swizzled so that
// the fragment-wise writes of two columns and the row-wise reads of 16 bytes are both free of bank conflicts.
template <int kBN, class Sum>
TPK_HD uint32_t output_offset(int row, int col) {
  constexpr int kPerChunk = kChunkBytes / static_cast<int>(sizeof(Sum));
  const int moved = sizeof(Sum) == 4 ? (row & 3) << 1 : (row & 1) << 2;
  return static_cast<uint32_t>(row * kBN + ((col / kPerChunk ^ moved) * kPerChunk) + col % kPerChunk);
}

// Row of the tile that is row `local` of part `part` of its sums.
template <class Tile>
TPK_HD constexpr int part_row(int part, int local) {
  constexpr int kRows = Tile::kWarpM / Tile::kParts;
  return local / kRows * Tile::kWarpM + part * kRows + local % kRows;
}

}  // namespace tpk::sm80

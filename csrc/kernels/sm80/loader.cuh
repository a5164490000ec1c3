// Loaders: bring one operand's tile of one K iteration from global to shared memory. Elements outside the
// matrix arrive as zeros, whatever lies there in memory.
//
// A loader is started once per segment and then called once per iteration, in order of K.
#pragma once

#include "kernels/sm80/layout.hpp"
#include "kernels/sm80/params.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::sm80 {

// Valid elements of a chunk that starts at `first` where `left` elements are left, in bytes.
TPK_HD int chunk_bytes(int left, int first) {
  const int n = left - first;
  return (n < 0 ? 0 : n > kChunkElements ? kChunkElements : n) * kElementBytes;
}

template <OperandLayout kLayout, int kExtent, int kThreads>
class Loader;

// K contiguous, 16-byte loads: threads walk K first, then rows.
template <int kExtent, int kThreads>
class Loader<OperandLayout::kKMajor, kExtent, kThreads> {
 public:
  using Tile = KMajorTile<kExtent>;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
  static_assert(Tile::kChunks % kThreads == 0, "Every thread loads the same number of chunks.");
  static_assert(kRowsPerPass % 8 == 0, "A pass must not change the swizzle.");

  // offset: bytes from the operand's start to the tile's first element.
  __device__ __forceinline__ void start(const Operand& operand, int64_t offset, int outer_left) {
    const ChunkCoord c = Tile::chunk(threadIdx.x);
    source_ = static_cast<const char*>(operand.data) + offset + c.outer * operand.outer_stride +
              c.k * kElementBytes;
    target_ = Tile::offset(c.outer, c.k / kChunkElements);
    rows_left_ = outer_left - c.outer;
  }

  __device__ __forceinline__ void load(const Operand& operand, uint32_t stage, int k_left) {
    const int bytes = chunk_bytes(k_left, Tile::chunk(threadIdx.x).k);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      cp_async_16(stage + target_ + i * kRowsPerPass * 64,
                  source_ + i * (operand.outer_stride * kRowsPerPass),
                  i * kRowsPerPass < rows_left_ ? bytes : 0);
    }
    source_ += 32 * kElementBytes;
  }

 private:
  const char* source_;
  uint32_t target_;
  int rows_left_;
};

// M or N contiguous, 16-byte loads.
template <int kExtent, int kThreads>
class Loader<OperandLayout::kOuterMajor, kExtent, kThreads> {
 public:
  using Tile = OuterMajorTile<kExtent>;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
  static_assert(Tile::kChunks % kThreads == 0, "Every thread loads the same number of chunks.");
  static_assert(kRowsPerPass % 8 == 0, "A pass must not change the swizzle.");

  __device__ __forceinline__ void start(const Operand& operand, int64_t offset, int outer_left) {
    const ChunkCoord c = Tile::chunk(threadIdx.x);
    source_ =
        static_cast<const char*>(operand.data) + offset + c.k * operand.k_stride + c.outer * kElementBytes;
    target_ = Tile::offset(c.outer / kChunkElements, c.k);
    bytes_ = chunk_bytes(outer_left, c.outer);
  }

  __device__ __forceinline__ void load(const Operand& operand, uint32_t stage, int k_left) {
    const int rows_left = k_left - Tile::chunk(threadIdx.x).k;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      cp_async_16(stage + target_ + i * kRowsPerPass * Tile::kRowBytes,
                  source_ + i * (operand.k_stride * kRowsPerPass), i * kRowsPerPass < rows_left ? bytes_ : 0);
    }
    source_ += operand.k_stride * 32;
  }

 private:
  const char* source_;
  uint32_t target_;
  int bytes_;
};

// Any strides, any alignment: element loads, packed K-major. Threads walk along whichever dimension has the
// smaller stride. Synchronous, and several times slower than the others, but never wrong and never an error.
template <int kExtent, int kThreads>
class Loader<OperandLayout::kStrided, kExtent, kThreads> {
 public:
  using Tile = KMajorTile<kExtent>;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static_assert(Tile::kChunks % kThreads == 0, "Every thread loads the same number of chunks.");

  __device__ __forceinline__ void start(const Operand& operand, int64_t offset, int outer_left) {
    source_ = static_cast<const char*>(operand.data) + offset;
    outer_left_ = outer_left;
    along_k_ = operand.k_stride <= operand.outer_stride;
  }

  __device__ __forceinline__ void load(const Operand& operand, uint32_t stage, int k_left) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      const int id = threadIdx.x + i * kThreads;
      const int outer = along_k_ ? id / Tile::kChunksPerRow : id % kExtent;
      const int k = (along_k_ ? id % Tile::kChunksPerRow : id / kExtent) * kChunkElements;
      const int valid = outer < outer_left_ ? k_left - k : 0;
      const char* element = source_ + outer * operand.outer_stride + k * operand.k_stride;
      uint32_t bits[kChunkElements];
#pragma unroll
      for (int j = 0; j < kChunkElements; ++j) {
        bits[j] = j < valid ? *reinterpret_cast<const unsigned short*>(element + j * operand.k_stride) : 0u;
      }
      store_shared_16(stage + Tile::offset(outer, k / kChunkElements), bits[0] | bits[1] << 16,
                      bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
    }
    source_ += operand.k_stride * 32;
  }

 private:
  const char* source_;
  int outer_left_;
  bool along_k_;
};

}  // namespace tpk::sm80

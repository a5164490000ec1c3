// Loaders: bring one operand's tile of one K iteration from global to shared memory. Elements outside the
// matrix arrive as zeros, whatever lies there in memory.
//
// A loader is started once per segment and then called once per iteration, in order of K.
#pragma once

#include "kernels/sm80/layout.hpp"
#include "kernels/sm80/params.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::sm80 {

// Valid bytes of a chunk that starts at element `first` where `left` elements are left.
template <int kElementBytes>
TPK_HD int chunk_bytes(int left, int first) {
  constexpr int kMost = chunk_elements(kElementBytes);
  const int n = left - first;
  return (n < 0 ? 0 : n > kMost ? kMost : n) * kElementBytes;
}

template <OperandLayout kLayout, int kExtent, int kBK, int kElementBytes, int kThreads>
class Loader;

// K contiguous, 16-byte loads: threads walk K first, then rows.
template <int kExtent, int kBK, int kElementBytes, int kThreads>
class Loader<OperandLayout::kKMajor, kExtent, kBK, kElementBytes, kThreads> {
 public:
  using Tile = KMajorTile<kExtent, kBK, kElementBytes>;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
  static_assert(Tile::kChunks % kThreads == 0, "Every thread loads the same number of chunks.");
  static_assert(kRowsPerPass % 8 == 0, "A pass must not change the swizzle.");

  // offset: bytes from the operand's start to the tile's first element.
  __device__ __forceinline__ void start(const Operand& operand, int64_t offset, int outer_left) {
    const ChunkCoord c = Tile::chunk(threadIdx.x);
    source_ = static_cast<const char*>(operand.data) + offset + c.outer * operand.outer_stride +
              c.k * kElementBytes;
    target_ = Tile::offset(c.outer, c.k / Tile::kChunkElements);
    rows_left_ = outer_left - c.outer;
  }

  __device__ __forceinline__ void load(const Operand& operand, uint32_t stage, int k_left) {
    const int bytes = chunk_bytes<kElementBytes>(k_left, Tile::chunk(threadIdx.x).k);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      cp_async_16(stage + target_ + i * kRowsPerPass * Tile::kRowBytes,
                  source_ + i * (operand.outer_stride * kRowsPerPass),
                  i * kRowsPerPass < rows_left_ ? bytes : 0);
    }
    source_ += kBK * kElementBytes;
  }

 private:
  const char* source_;
  uint32_t target_;
  int rows_left_;
};

// M or N contiguous, 16-byte loads.
template <int kExtent, int kBK, int kElementBytes, int kThreads>
class Loader<OperandLayout::kOuterMajor, kExtent, kBK, kElementBytes, kThreads> {
 public:
  using Tile = OuterMajorTile<kExtent, kBK, kElementBytes>;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
  static_assert(Tile::kChunks % kThreads == 0, "Every thread loads the same number of chunks.");
  static_assert((kRowsPerPass & (kRowsPerPass - 1)) == 0, "Rows of a pass and passes share no bits.");

  __device__ __forceinline__ void start(const Operand& operand, int64_t offset, int outer_left) {
    const ChunkCoord c = Tile::chunk(threadIdx.x);
    source_ =
        static_cast<const char*>(operand.data) + offset + c.k * operand.k_stride + c.outer * kElementBytes;
    target_ = Tile::offset(c.outer / Tile::kChunkElements, c.k);
    bytes_ = chunk_bytes<kElementBytes>(outer_left, c.outer);
  }

  __device__ __forceinline__ void load(const Operand& operand, uint32_t stage, int k_left) {
    const int rows_left = k_left - Tile::chunk(threadIdx.x).k;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t moved = static_cast<uint32_t>(Tile::swizzle(i * kRowsPerPass)) << 4;
      cp_async_16(stage + (target_ ^ moved) + i * kRowsPerPass * Tile::kRowBytes,
                  source_ + i * (operand.k_stride * kRowsPerPass), i * kRowsPerPass < rows_left ? bytes_ : 0);
    }
    source_ += operand.k_stride * kBK;
  }

 private:
  const char* source_;
  uint32_t target_;
  int bytes_;
};

// Any strides, any alignment: element loads, packed K-major. Threads walk along whichever dimension has the
// smaller stride. Synchronous, and several times slower than the others, but never wrong and never an error.
template <int kExtent, int kBK, int kElementBytes, int kThreads>
class Loader<OperandLayout::kStrided, kExtent, kBK, kElementBytes, kThreads> {
 public:
  using Tile = KMajorTile<kExtent, kBK, kElementBytes>;
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
      const int k = (along_k_ ? id % Tile::kChunksPerRow : id / kExtent) * Tile::kChunkElements;
      const int valid = outer < outer_left_ ? k_left - k : 0;
      uint32_t words[4];
      gather(words, source_ + outer * operand.outer_stride + k * operand.k_stride, operand.k_stride, valid);
      store_shared_16(stage + Tile::offset(outer, k / Tile::kChunkElements), words[0], words[1], words[2],
                      words[3]);
    }
    source_ += operand.k_stride * kBK;
  }

 private:
  // A chunk of elements `stride` bytes apart, the first `valid` of them.
  static __device__ __forceinline__ void gather(uint32_t (&words)[4], const char* element, int64_t stride,
                                                int valid) {
    if constexpr (kElementBytes == 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const char* const at = element + 2 * j * stride;
        const uint32_t low = 2 * j < valid ? *reinterpret_cast<const unsigned short*>(at) : 0u;
        const uint32_t high = 2 * j + 1 < valid ? *reinterpret_cast<const unsigned short*>(at + stride) : 0u;
        words[j] = low | high << 16;
      }
    } else if constexpr (kElementBytes == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = j < valid ? *reinterpret_cast<const uint32_t*>(element + j * stride) : 0u;
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 both =
            j < valid ? *reinterpret_cast<const uint2*>(element + j * stride) : make_uint2(0, 0);
        words[2 * j] = both.x;
        words[2 * j + 1] = both.y;
      }
    }
  }

  const char* source_;
  int outer_left_;
  bool along_k_;
};

}  // namespace tpk::sm80

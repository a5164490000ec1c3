// Quantisation to FP8: what is read, made and shared. The kernels are in quantize.cuh, the formula in
// tpkernels/fp8/_quantize.py.
#pragma once

#include <cstdint>

namespace tpk::sm80 {

enum class QuantizeSource : int32_t { kBf16, kFp16, kFp32, kE4m3, kE5m2 };
enum class Fp8Format : int32_t { kE4m3, kE5m2 };
// Which elements have a scale together: all, a row, 128 neighbours of a row, a square of 128.
enum class ScaleSharing : int32_t { kTensor, kRow, kBlocks, kSquares };

constexpr int64_t bytes_of(QuantizeSource s) {
  return s == QuantizeSource::kFp32 ? 4 : s == QuantizeSource::kBf16 || s == QuantizeSource::kFp16 ? 2 : 1;
}

constexpr int kQuantizeBlock = 128;     // elements of a block of scales, and edge of a tile
constexpr int kQuantizeThreads = 256;   // of all kernels but those of long rows
constexpr int kQuantizeUnitBytes = 16;  // that are read at once

// x [rows, columns], and in FP8 what is not null of
//   plain [rows, columns], with a scale for each of x's rows, blocks of a row, or squares
//   turned [columns, rows], the same of x^T.
// Outputs are contiguous. Of FP8 sources only turned is made.
struct QuantizeParams {
  const void* x;
  int64_t rows;
  int64_t columns;
  int64_t stride;        // elements between rows of x
  const float* x_scale;  // FP8: x stands for x * x_scale. Null: bytes are moved as they are.
  int64_t x_scale_row;   // elements between the scales of two rows of x
  int64_t x_scale_block;
  const uint32_t* amax;  // kTensor: bits of the largest absolute value
  uint8_t* plain;
  float* plain_scale;
  uint8_t* turned;
  float* turned_scale;
  uint32_t* column_peaks;  // strips: bits of the largest of each column, of [columns], at first 0
  uint32_t*
      tickets;    // strips: the next task; then for each strip, tiles that are in column_peaks. At first 0.
  int32_t group;  // strips: that are read, and then read again, together
  int32_t row_tiles;
  int32_t column_tiles;
  ScaleSharing sharing;
  bool power_of_2;
  bool in_units;      // x can be read 16 bytes at a time: rows begin at multiples of it
  bool plain_units;   // rows of plain begin at multiples of what 16 bytes of x become
  bool turned_words;  // rows of turned begin at multiples of 4 bytes
};

// Which kernel, its launch, and what it does:
//   tiles    blocks and squares of 128, or kTensor: one pass
//   rows     kRow of plain: one pass; of long rows what does not fit in registers is read again, from L2
//   strips   kRow of turned: x is read twice, the second time from L2
//   largest  amax = max(amax, largest absolute value of x)
enum class QuantizeKernel : int32_t { kTiles, kRows, kStrips, kLargest };

struct QuantizeLaunch {
  const void* function = nullptr;
  int64_t ctas = 0;
  int threads = kQuantizeThreads;
  int most = 0;  // CTAs of a multiprocessor: fewer do the work of all. 0: each has its own.
};

// For cudaLaunchKernel; argument: QuantizeParams (kLargest: with amax to be written). In one source for each
// QuantizeSource.
QuantizeLaunch quantize_bf16(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params);
QuantizeLaunch quantize_fp16(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params);
QuantizeLaunch quantize_fp32(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params);
// kTiles and kStrips of turned; to: the format of x too.
QuantizeLaunch quantize_fp8(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params);

}  // namespace tpk::sm80

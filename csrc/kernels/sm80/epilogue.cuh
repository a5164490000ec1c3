// Epilogue: fp32 tile -> * alpha -> + bias -> pre-activation out -> activation, or * activation of mul ->
// + residual -> + old output -> one rounding -> output.
//
// The tile goes through shared memory, so that each thread holds four neighbouring columns of a row and a
// warp stores whole lines, and so that the arithmetic is one short loop rather than unrolled over
// accumulators.
#pragma once

#include "kernels/sm80/mainloop.cuh"
#include "kernels/sm80/scheduler.cuh"

namespace tpk::sm80 {

__device__ __forceinline__ float activate(Activation kind, float x) {
  switch (kind) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // keeps NaN
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
    case Activation::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
  return x;
}

__device__ __forceinline__ float load_scalar(ScalarKind kind, const void* p) {
  if (kind == ScalarKind::kFp32) return *static_cast<const float*>(p);
  const uint32_t bits = *static_cast<const unsigned short*>(p);
  return kind == ScalarKind::kBf16 ? unpack_bf16(bits) : unpack_fp16(bits);
}

// Four columns from column pointer p on; the first `count` exist.
__device__ __forceinline__ void load_columns(ScalarKind kind, const Output& t, const char* p, int count,
                                             float (&v)[4]) {
  if (t.vector && count == 4) {
    if (kind == ScalarKind::kFp32) {
      const float4 x = *reinterpret_cast<const float4*>(p);
      v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
      return;
    }
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    const uint32_t bits[4] = {x.x & 0xffffu, x.x >> 16, x.y & 0xffffu, x.y >> 16};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      v[j] = kind == ScalarKind::kBf16 ? unpack_bf16(bits[j]) : unpack_fp16(bits[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = j < count ? load_scalar(kind, p + j * t.col_stride) : 0.0f;
}

__device__ __forceinline__ void store_columns(ScalarKind kind, const Output& t, char* p, int count,
                                              const float (&v)[4]) {
  if (kind == ScalarKind::kFp32) {
    if (t.vector && count == 4) {
      *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < count) *reinterpret_cast<float*>(p + j * t.col_stride) = v[j];
    }
    return;
  }
  const bool bf16 = kind == ScalarKind::kBf16;
  const uint32_t lo = bf16 ? pack_bf16(v[0], v[1]) : pack_fp16(v[0], v[1]);
  const uint32_t hi = bf16 ? pack_bf16(v[2], v[3]) : pack_fp16(v[2], v[3]);
  if (t.vector && count == 4) {
    *reinterpret_cast<uint2*>(p) = make_uint2(lo, hi);
    return;
  }
  const uint32_t bits[4] = {lo & 0xffffu, lo >> 16, hi & 0xffffu, hi >> 16};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < count)
      *reinterpret_cast<unsigned short*>(p + j * t.col_stride) = static_cast<unsigned short>(bits[j]);
  }
}

// v += four columns of a row of t.
__device__ __forceinline__ void add_columns(ScalarKind kind, const Output& t, const char* p, int count,
                                            float (&v)[4]) {
  float x[4];
  load_columns(kind, t, p, count, x);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] += x[j];
}

// Accumulators of all warps to the fp32 tile in shared memory.
template <class Tile>
__device__ __forceinline__ void stage_tile(const Accumulators<Tile>& acc, float* staged, int lane, int warp_m,
                                           int warp_n) {
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) {
      const int col = warp_n * Tile::kWarpN + j * 8 + accumulator_col(lane, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m * Tile::kWarpM + i * 16 + accumulator_row(lane, 2 * half);
        *reinterpret_cast<float2*>(staged + output_offset<Tile::kBN>(row, col)) =
            make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
      }
    }
  }
}

// Staged tile to global memory.
template <class Tile>
__device__ __forceinline__ void store_tile(const GemmParams& p, const WorkItem& item, const float* staged) {
  constexpr int kColumns = 4;
  constexpr int kThreadsPerRow = Tile::kBN / kColumns;
  constexpr int kRowsPerPass = Tile::kThreads / kThreadsPerRow;
  static_assert(Tile::kThreads % kThreadsPerRow == 0, "A thread keeps its columns from pass to pass.");

  const int col = static_cast<int>(threadIdx.x) % kThreadsPerRow * kColumns;
  const int first_row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const int64_t n = item.n + col;
  const int count = static_cast<int>(min64(kColumns, p.problem.n - n));
  if (count <= 0) return;
  const int rows = static_cast<int>(min64(Tile::kBM, p.problem.m - item.m));

  float bias[kColumns] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (p.bias != nullptr) {
    const char* from = static_cast<const char*>(p.bias) + n * p.bias_stride;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < count) bias[j] = load_scalar(p.bias_kind, from + j * p.bias_stride);
    }
  }

  auto start = [&](const Output& t) {
    return static_cast<char*>(t.data) + item.batch * t.batch_stride + (item.m + first_row) * t.row_stride +
           n * t.col_stride;
  };
  char* out = start(p.out);
  char* preact = start(p.preact);
  const char* residual = start(p.residual);
  const char* mul = start(p.mul);
  const bool has_preact = p.preact.data != nullptr;

#pragma unroll 1
  for (int row = first_row; row < rows; row += kRowsPerPass) {
    const float4 x = *reinterpret_cast<const float4*>(staged + output_offset<Tile::kBN>(row, col));
    float v[kColumns] = {p.alpha * x.x + bias[0], p.alpha * x.y + bias[1], p.alpha * x.z + bias[2],
                         p.alpha * x.w + bias[3]};
    if (has_preact) {
      store_columns(p.out_kind, p.preact, preact, count, v);
      preact += p.preact.row_stride * kRowsPerPass;
    }
    if (p.mul.data != nullptr) {
      float gate[kColumns];
      load_columns(ScalarKind::kFp32, p.mul, mul, count, gate);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] *= activate(p.activation, gate[j]);
      mul += p.mul.row_stride * kRowsPerPass;
    } else if (p.activation != Activation::kNone) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = activate(p.activation, v[j]);
    }
    if (p.residual.data != nullptr) {
      add_columns(p.residual_kind, p.residual, residual, count, v);
      residual += p.residual.row_stride * kRowsPerPass;
    }
    if (p.accumulate) add_columns(p.out_kind, p.out, out, count, v);
    store_columns(p.out_kind, p.out, out, count, v);
    out += p.out.row_stride * kRowsPerPass;
  }
}

}  // namespace tpk::sm80

// Arithmetic of the epilogue on a slab: alpha, peers' buffers, bias, activation, gate, residual. All in fp32,
// on the fragments as wgmma leaves them: thread `lane` of a warp holds, of each block of 8 columns, columns
// 2 * (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8.
#pragma once

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

constexpr int kSlabColumns = 32;
constexpr int kSlabValues = kSlabColumns / 2;  // of a thread, in a slab of 16 rows

struct SlabPlace {
  int row;  // first row and column of the slab in the output
  int col;
  int batch;
  int rows;  // of the output
  int cols;
};

// exp and division by the special-function unit: relative errors of about 2^-22.
__device__ __forceinline__ float sigmoid_times(float x, float u) { return __fdividef(x, 1.0f + __expf(-u)); }

// 0.5 * x * (1 + erf(x / sqrt 2)) as x * Phi(x): Phi(-z) = poly(t) * exp(-z^2 / 2), Abramowitz and
// Stegun 7.1.26, |error of erf| <= 1.5e-7.
__device__ __forceinline__ float gelu(float x) {
  const float z = fabsf(x) * 0.70710678f;
  const float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
  float poly = fmaf(1.061405429f, t, -1.453152027f);
  poly = fmaf(poly, t, 1.421413741f);
  poly = fmaf(poly, t, -0.284496736f);
  poly = fmaf(poly, t, 0.254829592f);
  const float tail = 0.5f * poly * t * __expf(-z * z);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

__device__ __forceinline__ void activate_slab(Activation kind, float (&v)[kSlabValues]) {
  switch (kind) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (float& x : v) x = x < 0.0f ? 0.0f : x;  // keeps NaN
      break;
    case Activation::kSilu:
#pragma unroll
      for (float& x : v) x = sigmoid_times(x, x);
      break;
    case Activation::kGelu:
#pragma unroll
      for (float& x : v) x = gelu(x);
      break;
    case Activation::kGeluTanh:
      // 0.5 * (1 + tanh(u)) is the sigmoid of 2 u.
#pragma unroll
      for (float& x : v) x = sigmoid_times(x, x * fmaf(0.07135481283f, x * x, 1.59576912161f));
      break;
  }
}

__device__ __forceinline__ float load_scalar(ScalarKind kind, const char* p) {
  if (kind == ScalarKind::kFp32) return *reinterpret_cast<const float*>(p);
  return unpack_low(kind, *reinterpret_cast<const unsigned short*>(p));
}

// Columns col and col + 1 of a row, zero where they do not exist.
__device__ __forceinline__ float2 load_pair(const Addend& t, bool paired, const char* row, int col,
                                            int cols) {
  float2 x = make_float2(0.0f, 0.0f);
  if (col >= cols) return x;
  const char* from = row + col * t.col_stride;
  if (paired && col + 1 < cols) {
    if (t.kind == ScalarKind::kFp32) return *reinterpret_cast<const float2*>(from);
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(from);
    return make_float2(unpack_low(t.kind, bits), unpack_high(t.kind, bits));
  }
  x.x = load_scalar(t.kind, from);
  if (col + 1 < cols) x.y = load_scalar(t.kind, from + t.col_stride);
  return x;
}

// Whether a pair of columns that starts at an even one can be loaded at once.
__device__ __forceinline__ bool is_paired(const Addend& t) {
  const int64_t bytes = t.kind == ScalarKind::kFp32 ? 4 : 2;
  const int64_t all = reinterpret_cast<int64_t>(t.data) | t.batch_stride | t.row_stride;
  return t.col_stride == bytes && (all & (2 * bytes - 1)) == 0;
}

// v += t for the slab.
__device__ __forceinline__ void add_slab(const Addend& t, const SlabPlace& at, float (&v)[kSlabValues],
                                         int lane) {
  const bool paired = is_paired(t);
  const char* start = static_cast<const char*>(t.data) + at.batch * t.batch_stride;
  const int row = at.row + lane / 4;
  const int col = at.col + 2 * (lane & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= at.rows) break;
    const char* in_row = start + (row + 8 * half) * t.row_stride;
#pragma unroll
    for (int j = 0; j < kSlabValues / 4; ++j) {
      const float2 x = load_pair(t, paired, in_row, col + 8 * j, at.cols);
      v[4 * j + 2 * half] += x.x;
      v[4 * j + 2 * half + 1] += x.y;
    }
  }
}

__device__ __forceinline__ void store_scalar(ScalarKind kind, char* to, float x) {
  if (kind == ScalarKind::kFp32) {
    *reinterpret_cast<float*>(to) = x;
  } else {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(pack(kind, x, 0.0f));
  }
}

// Slab v to `to`, element by element, through any strides.
__device__ __forceinline__ void store_slab_direct(ScalarKind kind, const Output& to, const SlabPlace& at,
                                                  const float (&v)[kSlabValues], int lane) {
  char* start = static_cast<char*>(to.data) + at.batch * to.batch_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.row + lane / 4 + 8 * half;
    if (row >= at.rows) continue;
    char* in_row = start + row * to.row_stride;
#pragma unroll
    for (int j = 0; j < kSlabValues / 4; ++j) {
      const int64_t col = at.col + 8 * j + 2 * (lane & 3);
      const float* x = &v[4 * j + 2 * half];
      if (col < at.cols) store_scalar(kind, in_row + col * to.col_stride, x[0]);
      if (col + 1 < at.cols) store_scalar(kind, in_row + (col + 1) * to.col_stride, x[1]);
    }
  }
}

// Waits for the 16 rows of a warp in every addend. Called once per block of rows.
__device__ __forceinline__ void wait_for_addends(const GemmParams& p, int row, int lane) {
  const AddendHook& h = p.hooks.sum;
  const int rows = static_cast<int>(p.problem.m);
  const int end = row + 16 < rows ? row + 16 : rows;
  for (int i = lane; i < h.count; i += 32) {
    const Addend& t = h.addends[i];
    if (t.flags == nullptr) continue;
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(t.epoch);
    for (int f = row / t.flag_rows; f * t.flag_rows < end; ++f) {
      wait_or_fail<comm::Scope::kSys>(t.flags + f, epoch, p.timeout_ns, p.fault, FaultKind::kAddend, i, row);
    }
  }
  __syncwarp();
}

// v += bias, which holds the slab's columns.
__device__ __forceinline__ void add_bias(const float* bias, float (&v)[kSlabValues], int lane) {
  const uint32_t from = shared_address(bias) + (lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < kSlabValues / 4; ++j) {
    float x;
    float y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from + 32 * j) : "memory");
    v[4 * j] += x;
    v[4 * j + 1] += y;
    v[4 * j + 2] += x;
    v[4 * j + 3] += y;
  }
}

// The bias of kColumns columns from `col` on to shared memory, by the 128 threads of a warpgroup, before the
// main loop: its latency is hidden there.
template <int kColumns>
__device__ __forceinline__ void load_bias(const GemmParams& p, int col, float* to, int barrier) {
  named_sync(barrier, kWarpgroup);  // all have read what was there
  for (int i = thread_number() % kWarpgroup; i < kColumns; i += kWarpgroup) {
    const char* from = static_cast<const char*>(p.bias) + static_cast<int64_t>(col + i) * p.bias_stride;
    to[i] = col + i < p.problem.n ? load_scalar(p.bias_kind, from) : 0.0f;
  }
  named_sync(barrier, kWarpgroup);
}

}  // namespace tpk::sm90a

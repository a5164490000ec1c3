// Arithmetic of the epilogue on a unit: activations and bias. All in fp32, on the fragments as wgmma leaves
// them: thread `lane` of a warp holds, of each block of 8 columns, columns 2 * (lane % 4) and the next, of
// rows lane / 4 and lane / 4 + 8.
#pragma once

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

// A unit: 16 rows of a warp, and as many columns as 2 * kValues, where a thread has kValues of them. Where it
// lies:
struct UnitPlace {
  int row;  // first row and column of the unit in the output
  int col;
  int batch;
  int rows;  // of the output
  int cols;
};

__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// min and max that keep NaN.
__device__ __forceinline__ float min_nan(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
__device__ __forceinline__ float max_nan(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

// The special-function unit gives exp2 and reciprocals to relative errors of about 2^-22; two of them a value
// are what an activation costs, so the rest is kept to few instructions.
constexpr float kLog2E = 1.44269504f;

// x / (1 + exp(-u)).
__device__ __forceinline__ float sigmoid_times(float x, float u) {
  return x * reciprocal_approx(1.0f + exp2_approx(-kLog2E * u));
}

// x * Phi(x) = max(x, 0) - z * Phi(-z) with z = |x|, and Phi(-z) = exp2(poly(z)), a fit for 0 <= z <= 5.5:
// the relative error of Phi(-z) is at most 6e-4 there, the absolute one of the result 3e-7. Beyond, where
// gelu has less than 1.1e-7 to give, it gives that.
__device__ __forceinline__ float gelu(float x) {
  const float z = min_nan(fabsf(x), 5.5f);
  float poly = 3.31440642e-05f;
  poly = fmaf(poly, z, -0.000761123316f);
  poly = fmaf(poly, z, 0.00801812671f);
  poly = fmaf(poly, z, -0.0532446131f);
  poly = fmaf(poly, z, -0.458961576f);
  poly = fmaf(poly, z, -1.15111399f);
  poly = fmaf(poly, z, -1.00000489f);
  return fmaf(-z, exp2_approx(poly), max_nan(x, 0.0f));
}

template <Activation kKind>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == Activation::kRelu) return max_nan(x, 0.0f);
  if constexpr (kKind == Activation::kSilu) return sigmoid_times(x, x);
  if constexpr (kKind == Activation::kGelu) return gelu(x);
  // 0.5 * (1 + tanh(u)) is the sigmoid of 2 u.
  if constexpr (kKind == Activation::kGeluTanh)
    return sigmoid_times(x, x * fmaf(0.07135481283f, x * x, 1.59576912161f));
  return x;
}

template <Activation kKind, int kValues>
__device__ __forceinline__ void activate(float (&v)[kValues]) {
#pragma unroll
  for (float& x : v) x = activate<kKind>(x);
}

template <int kValues>
__device__ __forceinline__ void activate(Activation kind, float (&v)[kValues]) {
  switch (kind) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return activate<Activation::kRelu>(v);
    case Activation::kSilu:
      return activate<Activation::kSilu>(v);
    case Activation::kGelu:
      return activate<Activation::kGelu>(v);
    case Activation::kGeluTanh:
      return activate<Activation::kGeluTanh>(v);
  }
}

__device__ __forceinline__ float load_scalar(ScalarKind kind, const char* p) {
  if (kind == ScalarKind::kFp32) return *reinterpret_cast<const float*>(p);
  return unpack_low(kind, *reinterpret_cast<const unsigned short*>(p));
}

__device__ __forceinline__ void store_scalar(ScalarKind kind, char* to, float x) {
  if (kind == ScalarKind::kFp32) {
    *reinterpret_cast<float*>(to) = x;
  } else {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(pack(kind, x, 0.0f));
  }
}

// v += bias, which holds the unit's columns.
template <int kValues>
__device__ __forceinline__ void add_bias(const float* bias, float (&v)[kValues], int lane) {
  const uint32_t from = shared_address(bias) + (lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
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
__device__ __forceinline__ void load_bias(const GemmParams& p, int batch, int col, float* to, int barrier) {
  const char* bias = static_cast<const char*>(p.bias) + batch * p.bias_batch_stride;
  named_sync(barrier, kWarpgroup);  // all have read what was there
  for (int i = thread_number() % kWarpgroup; i < kColumns; i += kWarpgroup) {
    const char* from = bias + static_cast<int64_t>(col + i) * p.bias_stride;
    to[i] = col + i < p.problem.n ? load_scalar(p.bias_kind, from) : 0.0f;
  }
  named_sync(barrier, kWarpgroup);
}

}  // namespace tpk::sm90a

// out = pieces[0] + pieces[1] + ... + bias + residual, in this order in fp32 (fp64 for fp64), rounded once:
// the bits of ops/_collectives.py, which is several passes over memory where this is one.
//
// It is as fast as memory if enough loads are under way: some 40 KiB of a multiprocessor. So a thread loads
// from up to kBatch ranks, and the residual, before it adds.
#include "kernels/sm80/sum_ranks.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace tpk::sm80 {
namespace {

constexpr int kBatch = 4;

__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widened(__half x) { return __half2float(x); }
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }

template <class T, class Wide>
__device__ __forceinline__ T rounded(Wide x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// Elements that are loaded and stored at once, in registers as they come.
template <size_t kBytes>
using Words = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;
template <class T, int kCount>
using Unit = std::conditional_t<kCount == 1, T, Words<sizeof(T) * kCount>>;
template <int kCount, class T>
__device__ __forceinline__ Unit<T, kCount> load(const T* from) {
  static_assert(sizeof(Unit<T, kCount>) == kCount * sizeof(T), "A unit is one element, or 4, 8 or 16 bytes.");
  return *reinterpret_cast<const Unit<T, kCount>*>(from);
}

template <class T, int kCount, class Wide>
__device__ __forceinline__ void add(Wide* sum, const Unit<T, kCount>& data) {
  const T* const from = reinterpret_cast<const T*>(&data);
#pragma unroll
  for (int j = 0; j < kCount; ++j) sum[j] += static_cast<Wide>(widened(from[j]));
}

template <int kCount, class Wide, class B>
__device__ __forceinline__ void add_bias(Wide* sum, const B* bias, int64_t column, int64_t n, bool in_units) {
  if (in_units) {
    constexpr int kMost = kUnitBytes / static_cast<int>(sizeof(B));
    constexpr int kPart = kCount < kMost ? kCount : kMost;
#pragma unroll
    for (int j = 0; j < kCount; j += kPart) add<B, kPart>(sum + j, load<kPart>(bias + column + j));
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      sum[j] += static_cast<Wide>(widened(bias[column]));
      column = column + 1 < n ? column + 1 : 0;
    }
  }
}

template <class T, int kCount>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    sum_ranks_kernel(const __grid_constant__ SumParams p) {
  using Wide = decltype(widened(T{}));
  const auto* const pieces = static_cast<const T*>(p.pieces);
  const auto* const residual = static_cast<const T*>(p.residual);
  const auto piece = [&](int rank) {
    return rank == p.own_rank ? static_cast<const T*>(p.own) : pieces + rank * p.elements;
  };
  const int64_t step = int64_t{gridDim.x} * kSumThreads * kCount;
  int64_t i = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kCount;
  int64_t column = (p.first_column + i) % p.n;
  const int64_t columns = step % p.n;
#pragma unroll 1
  for (; i < p.elements; i += step) {
    Unit<T, kCount> last{};
    if (residual != nullptr) last = load<kCount>(residual + i);
    Wide sum[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = -0.0f;  // which leaves every addend as it is
#pragma unroll 1
    for (int first = 0; first < p.world; first += kBatch) {
      Unit<T, kCount> data[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < p.world) data[b] = load<kCount>(piece(first + b) + i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < p.world) add<T, kCount>(sum, data[b]);
      }
    }
    if (p.bias != nullptr) {
      const auto with = [&](auto* bias) { add_bias<kCount>(sum, bias, column, p.n, p.bias_in_units); };
      if (p.bias_kind == SumKind::kBf16) {
        with(static_cast<const __nv_bfloat16*>(p.bias));
      } else if (p.bias_kind == SumKind::kFp16) {
        with(static_cast<const __half*>(p.bias));
      } else if (p.bias_kind == SumKind::kFp32) {
        with(static_cast<const float*>(p.bias));
      } else if constexpr (std::is_same_v<Wide, double>) {
        with(static_cast<const double*>(p.bias));
      }
      column += columns;
      if (column >= p.n) column -= p.n;
    }
    if (residual != nullptr) add<T, kCount>(sum, last);
    Unit<T, kCount> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) reinterpret_cast<T*>(&result)[j] = rounded<T>(sum[j]);
    *reinterpret_cast<Unit<T, kCount>*>(static_cast<T*>(p.out) + i) = result;
  }
}

template <class T>
const void* function_of(bool in_units) {
  constexpr int kCount = kUnitBytes / static_cast<int>(sizeof(T));
  return in_units ? reinterpret_cast<const void*>(&sum_ranks_kernel<T, kCount>)
                  : reinterpret_cast<const void*>(&sum_ranks_kernel<T, 1>);
}

}  // namespace

const void* sum_ranks_function(const SumParams& p) {
  if (p.kind == SumKind::kFp64) return function_of<double>(p.in_units);
  if (p.kind == SumKind::kFp32) return function_of<float>(p.in_units);
  return p.kind == SumKind::kFp16 ? function_of<__half>(p.in_units) : function_of<__nv_bfloat16>(p.in_units);
}

}  // namespace tpk::sm80

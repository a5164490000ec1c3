// How the kernels of quantize.cuh read their sources, and how they make scales and FP8.
//
// Largest absolute values are found as integers: without its sign, a float of any width is ordered as its
// bits are, NaN above infinity. Of 16 bits, two at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "kernels/sm80/quantize.hpp"

namespace tpk::sm80 {

constexpr uint32_t kInfinityBits = 0x7f800000u;

__device__ __forceinline__ uint32_t word_of(const uint4& u, int i) {
  return i == 0 ? u.x : i == 1 ? u.y : i == 2 ? u.z : u.w;
}

struct Exact {
  static constexpr bool kToBf16 = false;
};
struct ToBf16 {
  static constexpr bool kToBf16 = true;
};

// A source has, for 16 bytes ("a unit"):
//   Element, kCount    elements
//   kPeaks, peak       absolute values, in kPeaks words
//   larger, bits       of such words; the bits of element j as a float
//   value              of element j
// The scale, and the rounding, are FP8's.
template <class T>
struct PairSource {
  using Element = T;
  static constexpr int kCount = 8;
  static constexpr int kPeaks = 4;
  static constexpr bool kScaled = false;
  template <class Rounding>
  static __device__ __forceinline__ uint32_t peak(const uint4& u, int i, float, Rounding) {
    return word_of(u, i) & 0x7fff7fffu;
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ __forceinline__ uint32_t bits(const uint32_t* peaks, int j) {
    return __float_as_uint(widened(peaks[j / 2], j % 2));
  }
  // Of the elements in one word.
  static __device__ __forceinline__ uint32_t all_bits(uint32_t peak) {
    return max(bits(&peak, 0), bits(&peak, 1));
  }
  template <class Rounding>
  static __device__ __forceinline__ float value(const uint4& u, int j, float, Rounding) {
    return widened(word_of(u, j / 2), j % 2);
  }

 private:
  static __device__ __forceinline__ float widened(uint32_t pair, int high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair)));
    }
  }
};

struct Fp32Source {
  using Element = float;
  static constexpr int kCount = 4;
  static constexpr int kPeaks = 4;
  static constexpr bool kScaled = false;
  template <class Rounding>
  static __device__ __forceinline__ uint32_t peak(const uint4& u, int i, float, Rounding) {
    return word_of(u, i) & 0x7fffffffu;
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return max(a, b); }
  static __device__ __forceinline__ uint32_t bits(const uint32_t* peaks, int j) { return peaks[j]; }
  static __device__ __forceinline__ uint32_t all_bits(uint32_t peak) { return peak; }
  template <class Rounding>
  static __device__ __forceinline__ float value(const uint4& u, int j, float, Rounding) {
    return __uint_as_float(word_of(u, j));
  }
};

// FP8 values times their scale, as they are or as bfloat16.
template <Fp8Format kFrom>
struct Fp8Source {
  using Element = uint8_t;
  static constexpr int kCount = 16;
  static constexpr int kPeaks = 16;
  static constexpr bool kScaled = true;
  template <class Rounding>
  static __device__ __forceinline__ uint32_t peak(const uint4& u, int i, float scale, Rounding rounding) {
    return __float_as_uint(value(u, i, scale, rounding)) & 0x7fffffffu;
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return max(a, b); }
  static __device__ __forceinline__ uint32_t bits(const uint32_t* peaks, int j) { return peaks[j]; }
  static __device__ __forceinline__ uint32_t all_bits(uint32_t peak) { return peak; }
  template <class Rounding>
  static __device__ __forceinline__ float value(const uint4& u, int j, float scale, Rounding) {
    const float product = __fmul_rn(decoded(u, j), scale);
    return Rounding::kToBf16 ? __bfloat162float(__float2bfloat16_rn(product)) : product;
  }

 private:
  // In pairs, as the instruction has them: the compiler makes each once.
  static __device__ __forceinline__ float decoded(const uint4& u, int j) {
    constexpr auto kKind = kFrom == Fp8Format::kE4m3 ? __NV_E4M3 : __NV_E5M2;
    const uint32_t word = word_of(u, j / 4);
    const auto pair = static_cast<__nv_fp8x2_storage_t>(j % 4 < 2 ? word : word >> 16);
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, kKind);
    return __half2float(__ushort_as_half(j % 2 == 0 ? halves.x : halves.y));
  }
};

// The formula of tpkernels/fp8/_quantize.py, for a largest absolute value given by its bits.
template <Fp8Format kTo>
__device__ __forceinline__ float scale_of(uint32_t amax, bool power_of_2) {
  constexpr auto kLargestReciprocal = static_cast<float>(1.0 / (kTo == Fp8Format::kE4m3 ? 448.0 : 57344.0));
  constexpr float kSmallestScale = 0x1p-126f;
  if ((amax & 0x7fffffffu) == 0) return 1.0f;
  if ((amax & 0x7fffffffu) >= kInfinityBits) return __uint_as_float(0x7fc00000u);
  const float scale = fmaxf(__fmul_rn(__uint_as_float(amax), kLargestReciprocal), kSmallestScale);
  // A carry out of the mantissa raises the exponent.
  return power_of_2 ? __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & kInfinityBits) : scale;
}

__device__ __forceinline__ float reciprocal(float scale) { return __frcp_rn(scale); }

// Rounded to nearest even, clamped; the first in the lowest byte.
template <Fp8Format kTo>
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  constexpr auto kKind = kTo == Fp8Format::kE4m3 ? __NV_E4M3 : __NV_E5M2;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kKind);
  return low | high << 16;
}

// Elements of a row from `column` on, 0 behind its end.
template <class S>
__device__ __forceinline__ uint4 load_unit(const QuantizeParams& p, int64_t row, int64_t column) {
  using T = typename S::Element;
  const T* const from = static_cast<const T*>(p.x) + row * p.stride + column;
  uint4 unit{};
  if (p.in_units && column + S::kCount <= p.columns) {
    unit = *reinterpret_cast<const uint4*>(from);
  } else {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    uint32_t words[4] = {};
#pragma unroll
    for (int j = 0; j < S::kCount; ++j) {
      if (column + j >= p.columns) continue;
      uint32_t element;
      if constexpr (sizeof(T) == 4) {
        element = reinterpret_cast<const uint32_t*>(from)[j];
      } else if constexpr (sizeof(T) == 2) {
        element = reinterpret_cast<const uint16_t*>(from)[j];
      } else {
        element = from[j];
      }
      words[j / kPerWord] |= element << (32 / kPerWord * (j % kPerWord));
    }
    unit = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return unit;
}

// What a unit becomes: kCount bytes of row `row` of plain.
template <class S, Fp8Format kTo>
__device__ __forceinline__ void store_unit(const QuantizeParams& p, const uint4& unit, int64_t row,
                                           int64_t column, float factor) {
  uint32_t words[S::kCount / 4];
#pragma unroll
  for (int w = 0; w < S::kCount / 4; ++w) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fmul_rn(S::value(unit, 4 * w + j, 1.0f, Exact()), factor);
    words[w] = packed<kTo>(v[0], v[1], v[2], v[3]);
  }
  uint8_t* const to = p.plain + row * p.columns + column;
  if (p.plain_units) {
    if constexpr (S::kCount == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < S::kCount; ++j) {
    if (column + j < p.columns) to[j] = static_cast<uint8_t>(words[j / 4] >> (8 * (j % 4)));
  }
}

}  // namespace tpk::sm80

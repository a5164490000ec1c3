// bfloat16 and float16 as storage: conversions to and from float, without torch. Rounding is to nearest,
// ties to even; NaN stays NaN, what is too large becomes infinite, denormals are kept.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace tpk::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  // A denormal is a whole number of 2^-24: no float denormal is touched, which the CPU may flush to zero.
  const float denormal = static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f;
  const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
  const uint32_t normal = biased << 23 | mantissa << 13;
  return std::bit_cast<float>(sign | (exponent == 0 ? std::bit_cast<uint32_t>(denormal) : normal));
}

inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

inline Float16 to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and up round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: in units of 2^-24, which is the last place of 0.5
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// A double rounded to odd: rounding the result once more, to fewer bits, is then as good as rounding once.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (x != x || static_cast<double>(nearest) == x) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --bits;  // towards zero
  return std::bit_cast<float>(bits | 1u);
}

// convert<To>(from) for every pair of element and accumulator types.
template <typename To, typename From>
inline To convert(From x) {
  constexpr bool kIsHalf = sizeof(From) == 2;
  if constexpr (kIsHalf) {
    return convert<To>(to_float(x));
  } else if constexpr (sizeof(To) == 2 && sizeof(From) == 8) {
    return convert<To>(round_to_odd(x));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(x);
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_float16(x);
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace tpk::cpu

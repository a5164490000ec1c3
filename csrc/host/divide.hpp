// Division of non-negative 64-bit integers, on the device without a function call: there the compiler's own
// is a subroutine, and ptxas serialises wgmma in kernels that call one.
#pragma once

#include <cstdint>

#include "host/macros.hpp"

namespace tpk {

struct Division {
  int64_t quotient;
  int64_t remainder;
};

// a >= 0, b >= 1.
TPK_HD constexpr Division divide(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  if (((a | b) >> 32) == 0) {
    const auto x = static_cast<uint32_t>(a);
    const auto y = static_cast<uint32_t>(b);
    const uint32_t q = x / y;
    return {static_cast<int64_t>(q), static_cast<int64_t>(x - q * y)};
  }
  uint64_t quotient = 0;
  uint64_t remainder = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    remainder = remainder << 1 | (static_cast<uint64_t>(a) >> bit & 1);
    if (remainder >= static_cast<uint64_t>(b)) {
      remainder -= static_cast<uint64_t>(b);
      quotient |= uint64_t{1} << bit;
    }
  }
  return {static_cast<int64_t>(quotient), static_cast<int64_t>(remainder)};
#else
  return {a / b, a % b};
#endif
}

}  // namespace tpk

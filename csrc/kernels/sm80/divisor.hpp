// Division by numbers that the launcher knows: a multiplication, where the device's own is a long run of
// code.
#pragma once

#include <cstdint>

#include "host/macros.hpp"

namespace tpk::sm80 {

// The upper half of a product.
TPK_HD uint32_t high_product(uint32_t x, uint32_t y) {
  return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32);
}
TPK_HD uint64_t high_product(uint64_t x, uint64_t y) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(x, y);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(x) * y >> 64);
#endif
}

// Unsigned: uint32_t or uint64_t. Divides what is below half of its range, by 1 and more.
template <class Unsigned>
struct Divisor {
  struct Result {
    Unsigned quotient;
    Unsigned remainder;
  };

  Unsigned by = 1;
  Unsigned inverse = ~Unsigned{0};  // (2^bits - 1) / by

  Divisor() = default;
  explicit Divisor(Unsigned divisor) : by(divisor), inverse(~Unsigned{0} / divisor) {}

  // The product with the inverse, which is rounded down, is the quotient or one less.
  TPK_HD Result divide(Unsigned x) const {
    Unsigned quotient = high_product(x, inverse);
    Unsigned remainder = x - quotient * by;
    if (remainder >= by) {
      ++quotient;
      remainder -= by;
    }
    return {quotient, remainder};
  }
};

}  // namespace tpk::sm80

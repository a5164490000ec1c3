// bfloat16 and float16: every value, every midpoint between two neighbours, and both sides of it.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "check.hpp"
#include "kernels/cpu/half.hpp"

namespace {

using namespace tpk::cpu;

// The value that 16 bits stand for, from the definition of the format.
double value(uint32_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double mantissa = std::ldexp(bits & ((1u << mantissa_bits) - 1), -mantissa_bits);
  const double sign = bits & 0x8000u ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias)
                       : sign * std::ldexp(1 + mantissa, exponent - bias);
}

template <typename Half>
long long check_format(int exponent_bits) {
  long long cases = 0;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << (15 - exponent_bits);
  for (uint32_t bits = 0; bits < 0x10000u; ++bits, ++cases) {
    const std::string context = "bits " + std::to_string(bits);
    const double exact = value(bits, exponent_bits);
    const float read = to_float(Half{static_cast<uint16_t>(bits)});
    if (std::isnan(exact)) {
      TPK_CHECK(std::isnan(read), context);
      TPK_CHECK(std::isnan(to_float(convert<Half>(read))), context);
      continue;
    }
    TPK_CHECK(read == exact && std::signbit(read) == std::signbit(exact), context);
    TPK_CHECK(convert<Half>(read).bits == bits, context);
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= infinity) continue;
    // Halfway to the next value away from zero: ties to the even one; a hair to either side decides. Beyond
    // the largest value, the next one is what it would be with one more exponent.
    const double largest_step = exact - value(bits - 1, exponent_bits);
    const double next = magnitude + 1 == infinity ? exact + largest_step : value(bits + 1, exponent_bits);
    const double middle = (exact + next) / 2;
    const uint16_t even = static_cast<uint16_t>(bits & 1 ? bits + 1 : bits);
    TPK_CHECK(convert<Half>(static_cast<float>(middle)).bits == even, context);
    TPK_CHECK(convert<Half>(middle).bits == even, context);
    TPK_CHECK(convert<Half>(std::nextafter(middle, exact)).bits == bits, context);
    TPK_CHECK(convert<Half>(std::nextafter(middle, next)).bits == bits + 1, context);
    TPK_CHECK(
        convert<Half>(std::nextafter(static_cast<float>(middle), static_cast<float>(exact))).bits == bits,
        context);
    TPK_CHECK(convert<Half>(std::nextafter(static_cast<float>(middle), static_cast<float>(2 * next))).bits ==
                  bits + 1,
              context);
  }
  const double infinite = std::numeric_limits<double>::infinity();
  TPK_CHECK(convert<Half>(1e300).bits == infinity, "1e300");
  TPK_CHECK(convert<Half>(-infinite).bits == (infinity | 0x8000u), "-infinity");
  TPK_CHECK(convert<Half>(1e-300).bits == 0, "1e-300");
  TPK_CHECK(std::isnan(to_float(convert<Half>(std::numeric_limits<double>::quiet_NaN()))), "NaN");
  // A NaN whose payload lies in the bits that are cut off must not become infinite.
  TPK_CHECK(std::isnan(to_float(convert<Half>(std::bit_cast<float>(0x7f800001u)))), "NaN with a low payload");
  return cases;
}

}  // namespace

int main() {
  long long cases = check_format<Float16>(5);
  cases += check_format<BFloat16>(8);
  return tpk::test::result("half", cases);
}

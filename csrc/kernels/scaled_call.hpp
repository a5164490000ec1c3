// Operands of 8 bits and their scales, as a GemmCall and the kernel have them. Pure C++.
//
//   out = (sum over k of  a * scale_a * b * scale_b) + bias
#pragma once

#include <cstdint>

namespace tpk {

// float8_e4m3fn and float8_e5m2: the first has more precision, the second more range.
enum class Fp8 : int32_t { kE4m3, kE5m2 };

constexpr int kScaleBlock = 128;  // elements of K, and of N where blocks are square, that share a scale

// fp32, in device memory. Element k of row i of A, or of column i of B, is multiplied by
//   data[(i >> outer_shift) * outer_stride + k / kScaleBlock * k_stride].
struct Scales {
  const float* data = nullptr;
  int64_t outer_stride = 0;  // in elements; 0: one for all
  int64_t k_stride = 0;      // 0: one for all of K
  int32_t outer_shift = 0;   // 7 where kScaleBlock columns share one
};

struct ScaledOperands {
  Fp8 a = Fp8::kE4m3;
  Fp8 b = Fp8::kE4m3;
  Scales scale_a;
  Scales scale_b;
  bool blocks = false;  // some scale changes along K: the main loop applies them, else the epilogue
  bool fast = false;    // sums stay in the tensor cores' accumulators, of some 14 bits; never with blocks
};

}  // namespace tpk

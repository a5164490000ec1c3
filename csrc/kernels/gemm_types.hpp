// Element types and activations that every GEMM kernel of ours knows. Pure C++.
#pragma once

#include <cstdint>

namespace tpk {

// Type of the operands; the accumulator is always fp32.
enum class Element : int32_t { kBf16, kFp16 };

// Type of everything that is touched once per tile: bias, residual, output, pre-activation. Chosen at run
// time.
enum class ScalarKind : int32_t { kBf16, kFp16, kFp32 };

enum class Activation : int32_t { kNone, kRelu, kSilu, kGelu, kGeluTanh };

constexpr int64_t bytes_of(ScalarKind kind) { return kind == ScalarKind::kFp32 ? 4 : 2; }

}  // namespace tpk

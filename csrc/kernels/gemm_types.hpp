// Element types and activations that every GEMM kernel of ours knows. Pure C++.
#pragma once

#include <cstdint>

namespace tpk {

// Operands, and how they are multiplied. Sums are fp32, of fp64 operands fp64. kTf32 is fp32 in memory, whose
// factors are rounded to tf32 for the tensor cores. kFp8: each operand of its own kind,
// kernels/scaled_call.hpp.
enum class Element : int32_t { kBf16, kFp16, kFp32, kTf32, kFp64, kFp8 };

// Type of everything that is touched once per tile: bias, residual, output, pre-activation. Chosen at run
// time.
enum class ScalarKind : int32_t { kBf16, kFp16, kFp32, kFp64 };

enum class Activation : int32_t { kNone, kRelu, kSilu, kGelu, kGeluTanh };

constexpr int bytes_of(ScalarKind kind) {
  return kind == ScalarKind::kFp64 ? 8 : kind == ScalarKind::kFp32 ? 4 : 2;
}
constexpr int bytes_of(Element e) {
  return e == Element::kFp64 ? 8 : e == Element::kFp32 || e == Element::kTf32 ? 4 : 2;
}

// [batch, rows, cols] in device memory; strides in elements, not negative. data is null if there is none.
struct Matrix {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  ScalarKind kind = ScalarKind::kBf16;  // of operands too: the element
};

}  // namespace tpk

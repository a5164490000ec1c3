// One iteration of one tile: acc += a b, from strided operands of any element type.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm.hpp"
#include "kernels/cpu/micro_kernel.hpp"

namespace tpk::cpu {

// A strided matrix of the operands' element type.
struct Operand {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

// acc[rows][ld] += a[rows, depth] * b[depth, columns]. acc and the two packing buffers have room for whole
// panels: rows and columns rounded up to kPanelRows and kPanelColumns.
template <typename Acc>
using Multiply = void (*)(Acc* acc, int64_t ld, const Operand& a, const Operand& b, int64_t rows,
                          int64_t columns, int64_t depth, Acc* a_panels, Acc* b_panels);

// The best for this CPU. Acc is double if and only if in is kFloat64.
template <typename Acc>
Multiply<Acc> select_multiply(DType in);

// The instruction set that select_multiply takes: "avx512", "avx2" or "baseline".
const char* instruction_set();

}  // namespace tpk::cpu

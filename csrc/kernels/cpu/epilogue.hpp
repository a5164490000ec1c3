// What happens to the sums of a finished tile. Once per tile, by its finisher.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm.hpp"

namespace tpk::cpu {

// The part of the output that a tile covers.
struct TileBounds {
  int64_t batch;
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;
};

// In order: * alpha, + bias, store of the pre-activation, activation, + residual, + old output, one rounding,
// store of the output. mul, if it has data, is alpha * (a * gate) for the whole output, of type Acc: the
// activation applies to it instead, and the product is multiplied by the result. acc[rows][ld] is scratch
// afterwards.
template <typename Acc>
void epilogue(const GemmArgs& args, const MatrixView& mul, const TileBounds& tile, Acc* acc, int64_t ld);

}  // namespace tpk::cpu

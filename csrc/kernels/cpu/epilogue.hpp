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

// In order: + bias, store of the pre-activation, activation, + old output, one rounding, store of the output.
// acc[rows][ld] is scratch afterwards.
template <typename Acc>
void epilogue(const GemmArgs& args, const TileBounds& tile, Acc* acc, int64_t ld);

}  // namespace tpk::cpu

// Which kernels exist. Each (element, layouts) pair is instantiated in a source file of its own, for all of
// the element's tiles, so that they compile in parallel.
#pragma once

#include <cstddef>

#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

struct KernelInfo {
  const void* function;  // for cudaLaunchKernel; its argument is one GemmParams
  int threads;
  size_t shared_bytes;  // dynamic
};

// Defined in kernel.cuh, instantiated in gemm_*.cu: each element, with each of A and B K-major or
// outer-major, or both strided. tile: its place in TilesOf<kElement>.
template <Element kElement, OperandLayout kLayoutA, OperandLayout kLayoutB>
KernelInfo kernel_info(int tile);

}  // namespace tpk::sm80

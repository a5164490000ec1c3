// Which kernels exist. Each (tile, element, layouts) is instantiated in a source file of its own or with few
// others, so that they compile in parallel.
#pragma once

#include <cstddef>

#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

struct KernelInfo {
  const void* function;  // for cudaLaunchKernelExC; its argument is one GemmParams
  size_t shared_bytes;   // dynamic
  int threads;           // of a CTA
};

// Defined in kernel.cuh, instantiated in gemm_*.cu.
template <class Tile, Element kElement>
KernelInfo kernel_info(Major a, Major b);

// Of one_tile.cuh, whose argument is one OneTileParams; a: rows of wgmma, b: its columns. kKernel: of
// kOneTileKernels. shared_bytes: the most.
template <Element kElement, int kKernel>
KernelInfo one_tile_kernel_info(Major a, Major b);

// Of 8-bit operands, K contiguous in both.
template <class Tile>
KernelInfo scaled_kernel_info();

}  // namespace tpk::sm90a

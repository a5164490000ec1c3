// fp8 operands with scales, tiles of 128x256.
#include "kernels/sm90a/scaled.cuh"

// Behind what it calls.
#include "kernels/sm90a/kernel.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::scaled_kernel_info<tpk::sm90a::ScaledTile128x256>();

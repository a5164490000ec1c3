// bf16 operands, tiles of 192x192, every layout.
#include "kernels/sm90a/kernel.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::kernel_info<tpk::sm90a::Tile192x192, tpk::Element::kBf16>(
    tpk::sm90a::Major, tpk::sm90a::Major);

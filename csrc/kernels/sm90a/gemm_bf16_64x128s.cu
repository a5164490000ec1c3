// bf16 operands, swapped tiles of 64x128, weights in both layouts.
#include "kernels/sm90a/few_rows.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::kernel_info<tpk::sm90a::Tile64x128s, tpk::Element::kBf16>(
    tpk::sm90a::Major, tpk::sm90a::Major);

// bf16 operands, 64 rows of wgmma and 16 to 128 columns, all layouts.
#include "kernels/sm90a/one_tile.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::one_tile_kernel_info<tpk::Element::kBf16, 0>(tpk::sm90a::Major,
                                                                                         tpk::sm90a::Major);

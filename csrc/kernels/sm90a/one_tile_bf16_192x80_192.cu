// bf16 operands, 192 rows of wgmma and 80 to 192 columns, all layouts.
#include "kernels/sm90a/one_tile.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::one_tile_kernel_info<tpk::Element::kBf16, 4>(tpk::sm90a::Major,
                                                                                         tpk::sm90a::Major);

// bf16 operands, tiles 64 columns wide, all layouts.
#include "kernels/sm90a/one_tile.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::one_tile_kernel_info<tpk::Element::kBf16, 64>(tpk::sm90a::Major,
                                                                                          tpk::sm90a::Major);

// fp16 operands, tiles 128 columns wide, all layouts.
#include "kernels/sm90a/one_tile.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::one_tile_kernel_info<tpk::Element::kFp16, 128>(tpk::sm90a::Major,
                                                                                           tpk::sm90a::Major);

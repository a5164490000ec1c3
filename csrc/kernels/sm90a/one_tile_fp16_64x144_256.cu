// fp16 operands, 64 rows of wgmma and 144 to 256 columns, all layouts.
#include "kernels/sm90a/one_tile.cuh"

template tpk::sm90a::KernelInfo tpk::sm90a::one_tile_kernel_info<tpk::Element::kFp16, 1>(tpk::sm90a::Major,
                                                                                         tpk::sm90a::Major);

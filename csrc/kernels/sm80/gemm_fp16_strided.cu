// fp16 operands; A strided, B strided.
#include "kernels/sm80/kernel.cuh"

template tpk::sm80::KernelInfo tpk::sm80::kernel_info<
    tpk::sm80::Element::kFp16, tpk::sm80::OperandLayout::kStrided, tpk::sm80::OperandLayout::kStrided>(int);

// fp16 operands; A K-major, B outer-major.
#include "kernels/sm80/kernel.cuh"

template tpk::sm80::KernelInfo tpk::sm80::kernel_info<
    tpk::sm80::Element::kFp16, tpk::sm80::OperandLayout::kKMajor, tpk::sm80::OperandLayout::kOuterMajor>(int);

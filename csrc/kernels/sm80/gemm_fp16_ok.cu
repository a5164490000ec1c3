// fp16 operands; A outer-major, B K-major.
#include "kernels/sm80/kernel.cuh"

template tpk::sm80::KernelInfo tpk::sm80::kernel_info<
    tpk::sm80::Element::kFp16, tpk::sm80::OperandLayout::kOuterMajor, tpk::sm80::OperandLayout::kKMajor>(int);

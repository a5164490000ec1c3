// fp32 operands; A K-major, B K-major.
#include "kernels/sm80/kernel.cuh"

template tpk::sm80::KernelInfo tpk::sm80::kernel_info<
    tpk::sm80::Element::kFp32, tpk::sm80::OperandLayout::kKMajor, tpk::sm80::OperandLayout::kKMajor>(int);

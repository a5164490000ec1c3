// fp32, multiplied as tf32 operands; A outer-major, B outer-major.
#include "kernels/sm80/kernel.cuh"

template tpk::sm80::KernelInfo
tpk::sm80::kernel_info<tpk::sm80::Element::kTf32, tpk::sm80::OperandLayout::kOuterMajor,
                       tpk::sm80::OperandLayout::kOuterMajor>(int);

// Zeroes the words through which the CTAs of one launch talk, in front of it. A kernel rather than a memset:
// it and the product can both be launched while what comes before still runs.
#include "kernels/sm80/clear.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::sm80 {
namespace {

constexpr int kClearThreads = 32;  // few enough to fit beside a product on its multiprocessor

__global__ void __launch_bounds__(kClearThreads) clear_words_kernel(uint4* words, int count) {
  allow_later_kernels();
  wait_for_earlier_kernels();  // which may still use this memory
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kClearThreads)
    words[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace

KernelInfo clear_kernel() { return {reinterpret_cast<const void*>(&clear_words_kernel), kClearThreads, 0}; }

}  // namespace tpk::sm80

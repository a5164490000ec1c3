// Zeroes the words through which the clusters of one launch talk, in front of it. A kernel rather than a
// memset: it and the product can both be launched while what comes before still runs.
#include "kernels/sm90a/clear.hpp"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

__global__ void __launch_bounds__(kClearThreads) clear_words_kernel(uint4* words, int count) {
  allow_later_kernels();
  wait_for_earlier_kernels();  // which may still use this memory
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kClearThreads)
    words[i] = make_uint4(0, 0, 0, 0);
}

const void* clear_function() { return reinterpret_cast<const void*>(&clear_words_kernel); }

}  // namespace tpk::sm90a

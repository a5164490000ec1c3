// See clear.cu.
#pragma once

namespace tpk::sm90a {

// One warp of few registers fits beside a product that has all the rest of its multiprocessor.
constexpr int kClearThreads = 32;

// For cudaLaunchKernelExC, one CTA; arguments: uint4* words, int count.
const void* clear_function();

}  // namespace tpk::sm90a

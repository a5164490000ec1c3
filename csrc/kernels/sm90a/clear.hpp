// See clear.cu.
#pragma once

namespace tpk::sm90a {

constexpr int kClearThreads = 256;

// For cudaLaunchKernelExC, one CTA; arguments: uint4* words, int count.
const void* clear_function();

}  // namespace tpk::sm90a

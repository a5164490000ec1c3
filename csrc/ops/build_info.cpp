// torch.ops.tpkernels.build_info: how this library was built, as JSON.
#include <torch/csrc/stable/library.h>

#include <string>

#include "kernels/cpu/multiply.hpp"

#if !defined(TPK_VERSION)
#define TPK_VERSION "unknown"
#endif
#if !defined(TPK_BUILD_TORCH)
#define TPK_BUILD_TORCH "unknown"
#endif

namespace {

// The oldest torch that this library can be loaded by: TORCH_TARGET_VERSION is 0xMMmmpp followed by zeros.
std::string target_torch() {
#if defined(TORCH_TARGET_VERSION)
  constexpr uint64_t kTarget = TORCH_TARGET_VERSION;
  return std::to_string(kTarget >> 56) + "." + std::to_string(kTarget >> 48 & 0xff) + "." +
         std::to_string(kTarget >> 40 & 0xff);
#else
  return TPK_BUILD_TORCH;
#endif
}

std::string build_info() {
  using namespace std::string_literals;
  return "{\"version\": \""s + TPK_VERSION + "\", \"target_torch\": \"" + target_torch() +
         "\", \"build_torch\": \"" + TPK_BUILD_TORCH + "\", \"compiler\": \"" + __VERSION__ +
         "\", \"cxx_standard\": " + std::to_string(__cplusplus) + ", \"cpu\": \"" +
         tpk::cpu::instruction_set() + "\", \"extensions\": [\"_C\"]}";
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}

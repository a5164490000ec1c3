// torch.ops.tpkernels.sm90a_entry: where the Hopper kernels are entered. Python hands the address to
// attach_sm90a once both libraries are loaded, so that neither links to the other.
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "kernels/sm90a/entry.hpp"

namespace {

int64_t sm90a_entry() {
  const tpk::GemmEntry entry = &tpk::sm90a::run_gemm;
  return reinterpret_cast<int64_t>(entry);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("sm90a_entry", TORCH_BOX(&sm90a_entry));
}

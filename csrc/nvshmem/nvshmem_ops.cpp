// torch.ops.tpkernels.nvshmem_*: how Python starts the transport and hands it to _C_sm90a (attach_transport).
#include <torch/csrc/stable/library.h>

#include <vector>

#include "nvshmem/push.hpp"
#include "ops/sentence.hpp"

namespace {

// Of the headers, then of the library in this process: major, minor, patch.
std::vector<int64_t> nvshmem_versions() {
  const tpk::nvshmem::Version a = tpk::nvshmem::compiled_version();
  const tpk::nvshmem::Version b = tpk::nvshmem::loaded_version();
  return {a.major, a.minor, a.patch, b.major, b.minor, b.patch};
}

int64_t nvshmem_transport() { return reinterpret_cast<int64_t>(&tpk::nvshmem::transport()); }

void nvshmem_map(const std::vector<int64_t>& addresses, const std::vector<int64_t>& pes, int64_t rank,
                 int64_t bytes) {
  constexpr const char* kOp = "tpkernels::nvshmem_map";
  TPK_REQUIRE(addresses.size() == pes.size(), kOp, ": pes must name as many ranks as addresses, ",
              addresses.size(), ", but it names ", pes.size(), ".");
  TPK_REQUIRE(rank >= 0 && rank < static_cast<int64_t>(pes.size()) && bytes > 0, kOp,
              ": rank must lie in [0, ", pes.size(), ") and bytes be above 0, but they are ", rank, " and ",
              bytes, ".");
  tpk::nvshmem::map({addresses.begin(), addresses.end()}, {pes.begin(), pes.end()}, static_cast<int>(rank),
                    static_cast<size_t>(bytes));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("nvshmem_versions", TORCH_BOX(&nvshmem_versions));
  m.impl("nvshmem_transport", TORCH_BOX(&nvshmem_transport));
  m.impl("nvshmem_map", TORCH_BOX(&nvshmem_map));
}

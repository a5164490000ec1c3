// torch.ops.tpkernels.attach_transport: another way to peers than the copy engine, from another library.
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "comm/transport.hpp"
#include "ops/sentence.hpp"

namespace {

void attach_transport(int64_t address) {
  const auto* transport = reinterpret_cast<const tpk::comm::Transport*>(address);
  TPK_REQUIRE(
      transport == nullptr || transport->bytes == sizeof(tpk::comm::Transport),
      "tpkernels::attach_transport: _C_sm90a and the transport are of different builds: build both again.");
  tpk::comm::set_transport(transport);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("attach_transport", TORCH_BOX(&attach_transport));
}

// torch.ops.tpkernels.sm80_set_cost: as set_plan_cost, for the plans of this library's launches.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "host/cost_text.hpp"
#include "kernels/sm80/cost_in_use.hpp"
#include "ops/sentence.hpp"

namespace {

void sm80_set_cost(const std::string& device, const std::string& text) {
  using tpk::sm80::Generation;
  TPK_REQUIRE(device == "sm80" || device == "sm90-portable",
              "sm80_set_cost: device must be 'sm80' or 'sm90-portable', but it is '", device, "'.");
  const auto generation = device == "sm80" ? Generation::kAmpere : Generation::kHopper;
  try {
    tpk::use_cost(tpk::sm80::cost_in_use(generation), tpk::sm80::usual_cost(generation), text);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(tpk::ops::sentence("sm80_set_cost: ", error.what()));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("sm80_set_cost", TORCH_BOX(&sm80_set_cost));
}

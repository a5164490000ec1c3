// torch.ops.tpkernels.sm90a_set_cost: as set_plan_cost("sm90", text), for the plans of this library's
// launches.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "host/cost_text.hpp"
#include "kernels/sm90a/cost_names.hpp"
#include "ops/sentence.hpp"

namespace {

void sm90a_set_cost(const std::string& text) {
  try {
    tpk::use_cost(tpk::sm90a::hopper_cost, tpk::sm90a::kCostHopper, text);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(tpk::ops::sentence("sm90a_set_cost: ", error.what()));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("sm90a_set_cost", TORCH_BOX(&sm90a_set_cost));
}

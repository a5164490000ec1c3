// torch.ops.tpkernels.plan_cost and set_plan_cost: constants of the cost models that plans are made with.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "host/cost_text.hpp"
#include "kernels/sm80/cost_in_use.hpp"
#include "kernels/sm90a/cost_names.hpp"
#include "ops/sentence.hpp"

namespace {

using tpk::sm80::Generation;

// Calls use(constants in use, those that the library came with) for the cost model of a device.
template <class Use>
auto with_cost(const char* op, const std::string& device, const Use& use) {
  TPK_REQUIRE(device == "cpu" || device == "sm80" || device == "sm90" || device == "sm90-portable", op,
              ": device must be 'cpu', 'sm80', 'sm90' or 'sm90-portable', but it is '", device, "'.");
  if (device == "cpu") return use(tpk::cpu_cost, tpk::kCostCpu);
  if (device == "sm90") return use(tpk::sm90a::hopper_cost, tpk::sm90a::kCostHopper);
  const auto generation = device == "sm80" ? Generation::kAmpere : Generation::kHopper;
  return use(tpk::sm80::cost_in_use(generation), tpk::sm80::usual_cost(generation));
}

std::string plan_cost(const std::string& device) {
  return with_cost("plan_cost", device,
                   [](auto& in_use, const auto& /*usual*/) { return tpk::cost_text(in_use.get()); });
}

void set_plan_cost(const std::string& device, const std::string& text) {
  with_cost("set_plan_cost", device, [&](auto& in_use, const auto& usual) {
    try {
      tpk::use_cost(in_use, usual, text);
    } catch (const std::invalid_argument& error) {
      throw std::runtime_error(tpk::ops::sentence("set_plan_cost: ", error.what()));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("plan_cost", TORCH_BOX(&plan_cost));
  m.impl("set_plan_cost", TORCH_BOX(&set_plan_cost));
}

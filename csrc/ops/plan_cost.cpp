// torch.ops.tpkernels.plan_cost and set_plan_cost: constants of the cost models that plans are made with.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "host/cost_text.hpp"
#include "kernels/sm90a/cost_names.hpp"
#include "ops/sentence.hpp"

namespace {

void check_device(const char* op, const std::string& device) {
  TPK_REQUIRE(device == "cpu" || device == "sm90", op, ": device must be 'cpu' or 'sm90', but it is '",
              device, "'.");
}

std::string plan_cost(const std::string& device) {
  check_device("plan_cost", device);
  return device == "cpu" ? tpk::cost_text(tpk::cpu_cost.get())
                         : tpk::cost_text(tpk::sm90a::hopper_cost.get());
}

void set_plan_cost(const std::string& device, const std::string& text) {
  check_device("set_plan_cost", device);
  try {
    if (device == "cpu") {
      tpk::use_cost(tpk::cpu_cost, tpk::kCostCpu, text);
    } else {
      tpk::use_cost(tpk::sm90a::hopper_cost, tpk::sm90a::kCostHopper, text);
    }
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(tpk::ops::sentence("set_plan_cost: ", error.what()));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("plan_cost", TORCH_BOX(&plan_cost));
  m.impl("set_plan_cost", TORCH_BOX(&set_plan_cost));
}

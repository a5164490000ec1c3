// Plans of the portable CUDA kernel, and their times with other constants.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "kernels/sm80/plan.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {
namespace {

using Constants = std::map<std::string, double>;

sm80::Generation generation_of(const std::string& device) {
  detail::require(device == "sm80" || device == "sm90-portable",
                  [&] { return "device must be sm80 or sm90-portable, but it is '" + device + "'."; });
  return device == "sm80" ? sm80::Generation::kAmpere : sm80::Generation::kHopper;
}

Element element_of(const std::string& dtype) {
  if (dtype == "bfloat16" || dtype == "float16") return Element::kBf16;
  for (const auto& known : sm80::kCostElements) {
    if (dtype == known.name) return known.element;
  }
  throw std::invalid_argument("dtype must be bfloat16, float16, float32, tf32 or float64, but it is '" +
                              dtype + "'.");
}

sm80::PortableCost to_cost(const Constants& constants) {
  sm80::PortableCost cost{};
  size_t used = 0;
  sm80::visit_constants(cost, [&](const std::string& name, double& value) {
    const auto found = constants.find(name);
    detail::require(found != constants.end(),
                    [&] { return "cost must have '" + name + "', but it has not."; });
    value = found->second;
    ++used;
  });
  detail::require(used == constants.size(), "cost must have the names of portable_cost and no others.");
  return cost;
}

// A plan, and what its time depends on.
struct PortablePlan {
  sm80::GemmPlan plan;
  Problem problem;
  Element element = Element::kBf16;
  int64_t multiprocessors = 0;
};

PortablePlan make(int64_t m, int64_t n, int64_t k, const std::string& device, const std::string& dtype,
                  const std::string& schedule, int64_t splits, const std::string& tile,
                  int64_t multiprocessors) {
  detail::check_count("multiprocessors", multiprocessors);
  const Element element = element_of(dtype);
  const Problem problem{m, n, k, 1};
  return {sm80::plan_gemm(problem, element, generation_of(device), multiprocessors, schedule, 0, splits, tile,
                          sm80::full_residency(element)),
          problem, element, multiprocessors};
}

double predict(const PortablePlan& p, const sm80::PortableCost& cost) {
  const int tile = p.plan.tile;
  return sm80::predict_us(p.problem, p.element, tile, p.plan.plan.schedule, cost, p.multiprocessors,
                          sm80::full_residency(p.element).of_tile[static_cast<size_t>(tile)]);
}

}  // namespace

void bind_portable(py::module_& m) {
  m.def(
      "portable_cost",
      [](const std::string& device) {
        Constants found;
        const sm80::PortableCost cost = sm80::usual_cost(generation_of(device));
        sm80::visit_constants(cost, [&](const std::string& name, double value) { found[name] = value; });
        return found;
      },
      py::arg("device"));
  py::class_<sm80::PortableCost>(m, "PortableCost").def(py::init(&to_cost), py::arg("constants"));
  py::class_<PortablePlan>(m, "PortablePlan").def_property_readonly("plan", [](const PortablePlan& p) {
    return p.plan.plan;
  });
  m.def("portable_plan", &make, py::arg("m"), py::arg("n"), py::arg("k"), py::kw_only(), py::arg("device"),
        py::arg("dtype") = "bfloat16", py::arg("schedule") = "auto", py::arg("splits") = 1,
        py::arg("tile") = "", py::arg("multiprocessors"));
  m.def("portable_predict_us", &predict, py::arg("plan"), py::arg("cost"));
}

}  // namespace tpk::python

// Plans of the Hopper kernel. Constants travel as a dict of numbers, so that a fit can walk over all of them.
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "kernels/sm90a/cost_names.hpp"
#include "kernels/sm90a/plan.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {
namespace {

using Constants = std::map<std::string, double>;

Constants to_constants(const sm90a::HopperCost& cost) {
  Constants found;
  sm90a::visit_constants(cost, [&](const std::string& name, double value) { found[name] = value; });
  return found;
}

sm90a::HopperCost to_cost(const Constants& constants) {
  sm90a::HopperCost cost = sm90a::kCostHopper;
  size_t used = 0;
  sm90a::visit_constants(cost, [&](const std::string& name, double& value) {
    const auto found = constants.find(name);
    detail::require(found != constants.end(),
                    [&] { return "cost must have '" + name + "', but it has not."; });
    value = found->second;
    ++used;
  });
  detail::require(used == constants.size(), "cost must have the names of HOPPER_COST and no others.");
  return cost;
}

std::vector<sm90a::GemmPlan> find(int64_t m, int64_t n, int64_t k, int64_t batch, const std::string& schedule,
                                  int64_t workers, int64_t splits, const std::string& tile, bool gated,
                                  bool finishes, bool outer_major, int64_t multiprocessors) {
  detail::check_extent("k", k, 0);
  detail::check_count("multiprocessors", multiprocessors);
  return sm90a::candidates({m, n, k, batch}, schedule, workers, splits, tile, {gated, finishes, outer_major},
                           sm90a::full_residency(multiprocessors));
}

double predict(int64_t m, int64_t n, int64_t k, int64_t batch, const sm90a::GemmPlan& plan, bool finishes,
               bool outer_major, int64_t multiprocessors, const sm90a::HopperCost& cost) {
  detail::check_count("multiprocessors", multiprocessors);
  const int64_t resident = sm90a::clusters_that_fit(multiprocessors, plan.cluster.size());
  const Schedule& s = plan.plan.schedule;
  if (is_one_tile(plan.tile)) {
    const bool gated = plan.plan.tile.bn < cluster_tile(plan.tile, plan.cluster).bn;
    return sm90a::one_tile_us({m, n, k, batch}, plan.tile, plan.cluster, gated, !finishes, false, resident,
                              cost.whole);
  }
  return sm90a::predict_us({m, n, k, batch}, s, plan.tile, plan.cluster,
                           std::min(max64(1, resident), s.workers), {false, finishes, outer_major}, cost);
}

double predict_with(int64_t m, int64_t n, int64_t k, int64_t batch, const sm90a::GemmPlan& plan,
                    bool finishes, bool outer_major, int64_t multiprocessors, const Constants& constants) {
  return predict(m, n, k, batch, plan, finishes, outer_major, multiprocessors, to_cost(constants));
}

}  // namespace

void bind_hopper(py::module_& m) {
  std::vector<std::string> tiles;
  for (int t = 0; t < sm90a::kNumTiles; ++t) {
    for (const sm90a::ClusterShape c : sm90a::kClusterShapes) {
      const auto tile = static_cast<sm90a::TileId>(t);
      if (takes_cluster(tile, c)) tiles.push_back(name(tile, c));
    }
  }
  m.attr("HOPPER_TILES") = py::tuple(py::cast(tiles));
  m.def("hopper_cost", [] { return to_constants(sm90a::kCostHopper); });
  m.def("is_hopper_tile", [](const std::string& text) { return sm90a::is_tile_name(text); }, py::arg("text"));

  py::class_<sm90a::GemmPlan>(m, "HopperPlan")
      .def_property_readonly("tile", [](const sm90a::GemmPlan& g) { return sm90a::name(g.tile, g.cluster); })
      .def_property_readonly(
          "cluster",
          [](const sm90a::GemmPlan& g) { return py::make_tuple(g.cluster.m, g.cluster.n, g.cluster.k); })
      .def_readonly("plan", &sm90a::GemmPlan::plan);
  m.def("hopper_plans", &find, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("batch") = 1, py::kw_only(),
        py::arg("schedule") = "auto", py::arg("workers") = 0, py::arg("splits") = 1, py::arg("tile") = "",
        py::arg("gated") = false, py::arg("finishes") = false, py::arg("outer_major") = false,
        py::arg("multiprocessors") = 132);
  // A fit asks often, so that reading a dict each time would take longest.
  py::class_<sm90a::HopperCost>(m, "HopperCost").def(py::init(&to_cost), py::arg("constants"));
  const auto def_predict = [&](auto* function) {
    m.def("hopper_predict_us", function, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("batch") = 1,
          py::kw_only(), py::arg("plan"), py::arg("finishes") = false, py::arg("outer_major") = false,
          py::arg("multiprocessors") = 132, py::arg("cost"));
  };
  def_predict(&predict);
  def_predict(&predict_with);
}

}  // namespace tpk::python

#include <pybind11/stl.h>

#include "host/plan.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {

void bind_plan(py::module_& m) {
  py::class_<CostConstants>(m, "CostConstants")
      .def(py::init<>())
      .def_readwrite("launch_us", &CostConstants::launch_us)
      .def_readwrite("mac_us", &CostConstants::mac_us)
      .def_readwrite("load_us", &CostConstants::load_us)
      .def_readwrite("iter_us", &CostConstants::iter_us)
      .def_readwrite("epilogue_us", &CostConstants::epilogue_us)
      .def_readwrite("epilogue_elem_us", &CostConstants::epilogue_elem_us)
      .def_readwrite("partial_us", &CostConstants::partial_us)
      .def_readwrite("partial_elem_us", &CostConstants::partial_elem_us);
  m.def("cost_constants", [](const std::string& arch) { return cost_constants(arch); }, py::arg("arch"));

  py::class_<WorkCounts>(m, "WorkCounts")
      .def_readonly("iterations", &WorkCounts::iterations)
      .def_readonly("epilogues", &WorkCounts::epilogues)
      .def_readonly("partials_written", &WorkCounts::partials_written)
      .def_readonly("partials_added", &WorkCounts::partials_added);
  m.def(
      "count_work",
      [](const Schedule& s, int64_t worker) {
        detail::check_ticket(s, worker);
        return count_work(s, worker);
      },
      py::arg("schedule"), py::arg("worker"));
  m.def(
      "predict_us",
      [](const Schedule& s, const TileShape& t, const CostConstants& c, int64_t multiprocessors) {
        detail::check_extent("multiprocessors", multiprocessors, 1);
        return predict_us(s, t, c, multiprocessors);
      },
      py::arg("schedule"), py::arg("tile"), py::arg("cost"), py::arg("multiprocessors"));

  py::class_<Plan>(m, "Plan")
      .def_readonly("tile", &Plan::tile)
      .def_property_readonly("kind", [](const Plan& p) { return name(p.kind); })
      .def_readonly("splits", &Plan::splits)
      .def_readonly("schedule", &Plan::schedule)
      .def_readonly("order", &Plan::order)
      .def_readonly("predicted_us", &Plan::predicted_us);
  m.def(
      "make_plan",
      [](int64_t mm, int64_t n, int64_t k, int64_t batch, const TileShape& tile, const std::string& kind,
         const CostConstants& cost, int64_t workers, int64_t min_iters, int64_t splits) {
        ScheduleOptions o;
        o.workers = workers;
        o.min_iters = min_iters;
        o.splits = splits;
        return make_plan({mm, n, k, batch}, tile, parse_schedule_kind(kind), o, cost);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("batch"), py::kw_only(), py::arg("tile"),
      py::arg("kind"), py::arg("cost"), py::arg("workers"), py::arg("min_iters") = 4, py::arg("splits") = 1);
  m.def(
      "choose_plan",
      [](int64_t mm, int64_t n, int64_t k, int64_t batch, const CostConstants& cost, int64_t multiprocessors,
         const std::vector<TileShape>& candidates) {
        return choose_plan({mm, n, k, batch}, {multiprocessors, cost}, candidates);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("batch"), py::kw_only(), py::arg("cost"),
      py::arg("multiprocessors"), py::arg("candidates"));
}

}  // namespace tpk::python

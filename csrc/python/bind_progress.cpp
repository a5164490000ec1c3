#include <pybind11/stl.h>

#include "host/progress.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {
namespace {

OwnerWaits parse_owner_waits(const std::string& text) {
  if (text == "none") return OwnerWaits::kNone;
  if (text == "tile") return OwnerWaits::kTile;
  if (text == "shard") return OwnerWaits::kShard;
  throw std::invalid_argument("owner_waits must be none, tile or shard, but it is '" + text + "'.");
}

}  // namespace

void bind_progress(py::module_& m) {
  py::class_<RankProgram>(m, "RankProgram")
      .def(py::init(&make_rank_program), py::arg("schedule"), py::arg("order"))
      .def(py::init([](std::vector<std::vector<Segment>> workers, const TileOrder& order, int64_t num_slots) {
             return RankProgram{std::move(workers), order, num_slots};
           }),
           py::arg("workers"), py::arg("order"), py::arg("num_slots"));

  py::class_<ProgressReport>(m, "ProgressReport")
      .def_readonly("finished", &ProgressReport::finished)
      .def_readonly("steps", &ProgressReport::steps)
      .def_readonly("blocked", &ProgressReport::blocked);

  m.def("tiles_apart", &tiles_apart, py::arg("schedule"), py::arg("position"));
  m.def(
      "start_turn",
      [](const Schedule& s, int64_t position) {
        if (!tiles_apart(s, position)) {
          throw std::invalid_argument("position must not lie inside a streamed piece, but " +
                                      std::to_string(position) + " does.");
        }
        if (s.num_pieces == kMaxPieces) {
          throw std::invalid_argument("schedule has " + std::to_string(kMaxPieces) + " pieces already.");
        }
        return start_turn(s, position);
      },
      py::arg("schedule"), py::arg("position"));
  m.def(
      "simulate_progress",
      [](const std::vector<RankProgram>& programs, const TileShape& tile, const std::vector<int64_t>& sizes,
         int64_t resident, int64_t comm_workers, const std::string& owner_waits, bool defer_straddlers) {
        ProgressOptions o;
        o.tile = tile;
        if (!sizes.empty()) o.shards = make_shard_map(sizes);
        o.resident = resident;
        o.comm_workers = comm_workers;
        o.owner_waits = parse_owner_waits(owner_waits);
        o.defer_straddlers = defer_straddlers;
        return simulate_progress(programs, o);
      },
      py::arg("programs"), py::kw_only(), py::arg("tile"), py::arg("shard_sizes") = std::vector<int64_t>{},
      py::arg("resident") = 1, py::arg("comm_workers") = 0, py::arg("owner_waits") = "none",
      py::arg("defer_straddlers") = true);
}

}  // namespace tpk::python

#include <pybind11/stl.h>

#include "host/progress.hpp"
#include "host/schedule_builder.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {
namespace {

std::string repr(const Segment& s) {
  return "Segment(position=" + std::to_string(s.position) + ", k_begin=" + std::to_string(s.k_begin) +
         ", k_end=" + std::to_string(s.k_end) + ", piece=" + std::to_string(s.piece) +
         ", slot=" + std::to_string(s.slot) + ", first_slot=" + std::to_string(s.first_slot) +
         ", end_slot=" + std::to_string(s.end_slot) + ")";
}

const char* kind_name(const Piece& p) { return p.kind == PieceKind::kWaves ? "waves" : "streamed"; }

std::string repr(const Piece& p) {
  return std::string("Piece(kind='") + kind_name(p) + "', first_tile=" + std::to_string(p.first_tile) +
         ", num_tiles=" + std::to_string(p.num_tiles) + ", first_worker=" + std::to_string(p.first_worker) +
         ", workers=" + std::to_string(p.workers) + ", handicapped=" + std::to_string(p.handicapped) +
         ", handicap=" + std::to_string(p.handicap) + ", granules=" + std::to_string(p.granules) + ")";
}

std::vector<Piece> pieces(const Schedule& s) { return {s.pieces, s.pieces + s.num_pieces}; }

// At most limit segments: a worker of a very large problem has more than fit into memory.
std::vector<Segment> segments(const Schedule& s, int64_t worker, int64_t limit) {
  detail::check_ticket(s, worker);
  std::vector<Segment> out;
  SegmentCursor cursor(s, worker);
  for (Segment segment; (limit < 0 || static_cast<int64_t>(out.size()) < limit) && cursor.next(&segment);) {
    out.push_back(segment);
  }
  return out;
}

std::vector<int64_t> share_bounds(const Schedule& s, int64_t piece) {
  if (piece < 0 || piece >= s.num_pieces || s.pieces[piece].kind != PieceKind::kStreamed) {
    throw std::invalid_argument("piece must be the index of a streamed piece, but it is " +
                                std::to_string(piece) + ".");
  }
  std::vector<int64_t> bounds;
  for (int64_t i = 0; i <= s.pieces[piece].workers; ++i) bounds.push_back(share_begin(s, s.pieces[piece], i));
  return bounds;
}

void check_iters(int64_t k_iters, int64_t min_iters) {
  detail::check_extent("k_iters", k_iters, 1);
  detail::check_count("min_iters", min_iters);
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::class_<Segment>(m, "Segment")
      .def(py::init([](int64_t position, int64_t k_begin, int64_t k_end, int64_t piece, int64_t slot,
                       int64_t first_slot, int64_t end_slot) {
             return Segment{position, k_begin, k_end, piece, slot, first_slot, end_slot};
           }),
           py::arg("position"), py::arg("k_begin"), py::arg("k_end"), py::arg("piece") = 0,
           py::arg("slot") = -1, py::arg("first_slot") = -1, py::arg("end_slot") = -1)
      .def_readonly("position", &Segment::position)
      .def_readonly("k_begin", &Segment::k_begin)
      .def_readonly("k_end", &Segment::k_end)
      .def_readonly("piece", &Segment::piece)
      .def_readonly("slot", &Segment::slot)
      .def_readonly("first_slot", &Segment::first_slot)
      .def_readonly("end_slot", &Segment::end_slot)
      .def_property_readonly("finishes", &Segment::finishes)
      .def_property_readonly("is_split", &Segment::is_split)
      .def("__repr__", [](const Segment& s) { return repr(s); });

  py::class_<Piece>(m, "Piece")
      .def_property_readonly("kind", &kind_name)
      .def_readonly("first_tile", &Piece::first_tile)
      .def_readonly("num_tiles", &Piece::num_tiles)
      .def_readonly("first_worker", &Piece::first_worker)
      .def_readonly("workers", &Piece::workers)
      .def_readonly("handicapped", &Piece::handicapped)
      .def_readonly("handicap", &Piece::handicap)
      .def_readonly("granules", &Piece::granules)
      .def_readonly("turn", &Piece::turn)
      .def("__repr__", [](const Piece& p) { return repr(p); });

  py::class_<Schedule>(m, "Schedule")
      .def_readonly("k_iters", &Schedule::k_iters)
      .def_readonly("workers", &Schedule::workers)
      .def_property_readonly("tickets", &Schedule::tickets)
      .def_readonly("min_iters", &Schedule::min_iters)
      .def_readonly("num_slots", &Schedule::num_slots)
      .def_property_readonly("divided_shares", &divided_shares)
      .def_property_readonly("pieces", &pieces)
      .def("segments", &segments, py::arg("worker"), py::arg("limit") = -1)
      .def("share_bounds", &share_bounds, py::arg("piece"))
      .def("__repr__", [](const Schedule& s) {
        std::string text =
            "Schedule(k_iters=" + std::to_string(s.k_iters) + ", workers=" + std::to_string(s.workers) +
            ", min_iters=" + std::to_string(s.min_iters) + ", num_slots=" + std::to_string(s.num_slots) +
            ", turns=" + std::to_string(s.turns) + ", pieces=[";
        for (int64_t i = 0; i < s.num_pieces; ++i) text += (i > 0 ? ", " : "") + repr(s.pieces[i]);
        return text + "])";
      });

  m.def(
      "snap_cut",
      [](int64_t cut, int64_t k_iters, int64_t min_iters) {
        detail::check_extent("cut", cut, 0);
        check_iters(k_iters, min_iters);
        return snap_cut(cut, k_iters, min_iters);
      },
      py::arg("cut"), py::arg("k_iters"), py::arg("min_iters"));
  m.def(
      "snap_slack",
      [](int64_t k_iters, int64_t min_iters) {
        check_iters(k_iters, min_iters);
        return snap_slack(k_iters, min_iters);
      },
      py::arg("k_iters"), py::arg("min_iters"));
  m.def(
      "least_share",
      [](int64_t k_iters, int64_t min_iters) {
        check_iters(k_iters, min_iters);
        return least_share(k_iters, min_iters);
      },
      py::arg("k_iters"), py::arg("min_iters"));
  std::vector<std::string> kinds;
  for (int i = 0; i < kNumScheduleKinds; ++i) kinds.emplace_back(name(static_cast<ScheduleKind>(i)));
  m.attr("SCHEDULE_KINDS") = py::tuple(py::cast(kinds));
  m.attr("MAX_PIECES") = kMaxPieces;
  m.def(
      "make_schedule",
      [](const std::string& kind, int64_t tiles, int64_t k_iters, int64_t workers, int64_t min_iters,
         int64_t splits, int64_t comm_workers, int64_t comm_iters, std::vector<int64_t> shard_tiles) {
        return make_schedule(parse_schedule_kind(kind), tiles, k_iters,
                             {workers, min_iters, splits, comm_workers, comm_iters, std::move(shard_tiles)});
      },
      py::arg("kind"), py::arg("tiles"), py::arg("k_iters"), py::kw_only(), py::arg("workers"),
      py::arg("min_iters") = 4, py::arg("splits") = 1, py::arg("comm_workers") = 0, py::arg("comm_iters") = 0,
      py::arg("shard_tiles") = std::vector<int64_t>{});
}

}  // namespace tpk::python

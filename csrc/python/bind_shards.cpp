#include <pybind11/stl.h>

#include "host/shards.hpp"
#include "python/host.hpp"

namespace py = pybind11;

namespace tpk::python {
namespace {

using Pair = std::pair<int64_t, int64_t>;

Pair pair(const Range& r) { return {r.begin, r.end}; }

TileOrder tile_order(int64_t m, int64_t n, int64_t batch, const TileShape& t, int64_t group_m) {
  return make_tile_order({m, n, 0, batch}, t, group_m);
}

using MakeOrder = ShardedOrder (*)(const Problem&, const TileShape&, const ShardMap&, int64_t, int64_t);

template <MakeOrder kMake>
std::pair<TileOrder, std::vector<int64_t>> sharded_order(const std::vector<int64_t>& sizes, int64_t rank,
                                                         int64_t n, int64_t batch, const TileShape& t,
                                                         int64_t group_m) {
  const ShardMap map = make_shard_map(sizes);
  ShardedOrder out = kMake({map.rows(), n, 0, batch}, t, map, rank, group_m);
  return {out.order, std::move(out.shard_tiles)};
}

void check_tile_row(const ShardMap& map, int64_t tile_row, int64_t bm) {
  if (bm < 1 || tile_row < 0 || tile_row >= ceil_div(map.rows(), bm)) {
    throw std::invalid_argument("tile_row must be a row of tiles that holds rows, but it is " +
                                std::to_string(tile_row) + ".");
  }
}

void check_world(int64_t world) {
  if (world < 1 || world > kMaxWorld) {
    throw std::invalid_argument("world must lie between 1 and " + std::to_string(kMaxWorld) + ", but it is " +
                                std::to_string(world) + ".");
  }
}

template <int64_t (*kClass)(int64_t, int64_t, int64_t)>
int64_t shard_class(int64_t shard, int64_t rank, int64_t world) {
  check_world(world);
  if (shard < 0 || shard >= world || rank < 0 || rank >= world) {
    throw std::invalid_argument("shard and rank must lie in [0, " + std::to_string(world) +
                                "), but they are " + std::to_string(shard) + " and " + std::to_string(rank) +
                                ".");
  }
  return kClass(shard, rank, world);
}

Pair checked_slabs_of_iters(const Chunks& c, int64_t k_begin, int64_t k_end, int64_t bk) {
  detail::check_count("bk", bk);
  const int64_t k_iters = max64(1, ceil_div(c.k, bk));
  if (k_begin < 0 || k_end < k_begin || k_end > k_iters) {
    throw std::invalid_argument(
        "k_begin and k_end must be iterations, 0 <= k_begin <= k_end <= " + std::to_string(k_iters) +
        ", but they are " + std::to_string(k_begin) + " and " + std::to_string(k_end) + ".");
  }
  return pair(slabs_of_iters(c, k_begin, k_end, bk));
}

}  // namespace

void bind_shards(py::module_& m) {
  py::class_<TileShape>(m, "TileShape")
      .def(py::init([](int64_t bm, int64_t bn, int64_t bk) {
             if (bm < 1 || bn < 1 || bk < 1) {
               throw std::invalid_argument("bm, bn and bk must be at least 1, but they are " +
                                           std::to_string(bm) + ", " + std::to_string(bn) + " and " +
                                           std::to_string(bk) + ".");
             }
             return TileShape{bm, bn, bk};
           }),
           py::arg("bm"), py::arg("bn"), py::arg("bk"))
      .def_readonly("bm", &TileShape::bm)
      .def_readonly("bn", &TileShape::bn)
      .def_readonly("bk", &TileShape::bk)
      .def("__repr__", [](const TileShape& t) {
        return "TileShape(" + std::to_string(t.bm) + ", " + std::to_string(t.bn) + ", " +
               std::to_string(t.bk) + ")";
      });

  py::class_<TileOrder>(m, "TileOrder")
      .def_readonly("tiles_m", &TileOrder::tiles_m)
      .def_readonly("tiles_n", &TileOrder::tiles_n)
      .def_readonly("batch", &TileOrder::batch)
      .def_readonly("group_m", &TileOrder::group_m)
      .def_readonly("start_m", &TileOrder::start_m)
      .def_property_readonly(
          "band_end",
          [](const TileOrder& o) { return std::vector<int64_t>(o.band_end, o.band_end + o.num_bands); })
      .def("__len__", &TileOrder::size)
      .def(
          "at",
          [](const TileOrder& o, int64_t position) {
            if (position < 0 || position >= o.size()) {
              throw py::index_error("position must lie in [0, " + std::to_string(o.size()) + "), but it is " +
                                    std::to_string(position) + ".");
            }
            const TileCoord c = o.at(position);
            return std::tuple(c.batch, c.m, c.n);
          },
          py::arg("position"));

  m.attr("MAX_WORLD") = kMaxWorld;
  m.def("make_tile_order", &tile_order, py::arg("m"), py::arg("n"), py::arg("batch"), py::arg("tile"),
        py::arg("group_m") = 8);
  m.def("make_arrival_order", &sharded_order<make_arrival_order>, py::arg("shard_sizes"), py::arg("rank"),
        py::arg("n"), py::arg("batch"), py::arg("tile"), py::arg("group_m") = 8);
  m.def("make_departure_order", &sharded_order<make_departure_order>, py::arg("shard_sizes"), py::arg("rank"),
        py::arg("n"), py::arg("batch"), py::arg("tile"), py::arg("group_m") = 8);
  m.def(
      "even_shards",
      [](int64_t total, int64_t world) {
        detail::check_extent("total", total, 0);
        check_world(world);
        return even_shards(total, world);
      },
      py::arg("total"), py::arg("world"));
  m.def("arrival_class", &shard_class<arrival_class>, py::arg("shard"), py::arg("rank"), py::arg("world"));
  m.def("departure_class", &shard_class<departure_class>, py::arg("shard"), py::arg("rank"),
        py::arg("world"));
  m.def(
      "shards_of_tile_row",
      [](const std::vector<int64_t>& sizes, int64_t tile_row, int64_t bm) {
        const ShardMap map = make_shard_map(sizes);
        check_tile_row(map, tile_row, bm);
        return pair(shards_of_tile_row(map, tile_row, bm));
      },
      py::arg("shard_sizes"), py::arg("tile_row"), py::arg("bm"));

  py::class_<Chunks>(m, "Chunks")
      .def(py::init([](const std::vector<int64_t>& sizes, int64_t k, int64_t chunk_rows, int64_t slab_k) {
             return make_chunks(make_shard_map(sizes), k, chunk_rows, slab_k);
           }),
           py::arg("shard_sizes"), py::arg("k"), py::arg("chunk_rows"), py::arg("slab_k"))
      .def("__len__", &Chunks::size)
      .def_property_readonly("slabs", &Chunks::slabs)
      .def(
          "rows_of_tile_row",
          [](const Chunks& c, int64_t tile_row, int64_t bm) {
            check_tile_row(c.shards, tile_row, bm);
            return pair(row_chunks_of_tile_row(c, tile_row, bm));
          },
          py::arg("tile_row"), py::arg("bm"))
      .def("slabs_of_iters", &checked_slabs_of_iters, py::arg("k_begin"), py::arg("k_end"), py::arg("bk"));
}

}  // namespace tpk::python

// Shards of the rows of M over the ranks of a group: which chunks a tile reads on arrival, which ranks own
// the rows that it writes on departure, and the tile orders that follow from them.
//
// Classes are times: class c of an arrival is the shard that lands c-th (0: the own one, 1: that of
// rank + 1, ...); class c of a departure leaves c-th (0: that of rank + 1, world - 1: the own one).
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/check.hpp"
#include "host/tile_order.hpp"

namespace tpk {

// Shard s is rows [begin[s], begin[s + 1]); shards may be empty.
struct ShardMap {
  int64_t world = 1;
  int64_t begin[kMaxWorld + 1] = {};

  TPK_HD int64_t rows() const { return begin[world]; }

  // The shard that holds a row, 0 <= row < rows(). Never an empty one.
  TPK_HD int64_t shard_of(int64_t row) const {
    int64_t low = 0;
    int64_t high = world - 1;
    while (low < high) {  // the last shard that begins at or before the row
      const int64_t middle = (low + high + 1) / 2;
      if (begin[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

inline ShardMap make_shard_map(const std::vector<int64_t>& sizes) {
  if (sizes.empty() || static_cast<int64_t>(sizes.size()) > kMaxWorld) {
    throw std::invalid_argument("shard_sizes must name 1 to " + std::to_string(kMaxWorld) +
                                " shards, but it names " + std::to_string(sizes.size()) + ".");
  }
  ShardMap map;
  map.world = static_cast<int64_t>(sizes.size());
  for (int64_t s = 0; s < map.world; ++s) {
    if (sizes[s] < 0) {
      throw std::invalid_argument("shard_sizes must not be negative, but shard " + std::to_string(s) +
                                  " has " + std::to_string(sizes[s]) + " rows.");
    }
    if (sizes[s] > std::numeric_limits<int64_t>::max() - map.begin[s]) {
      throw std::invalid_argument("shard_sizes must add up to less than 2^63 rows, but shards 0 to " +
                                  std::to_string(s) + " have more.");
    }
    map.begin[s + 1] = map.begin[s] + sizes[s];
  }
  return map;
}

// Ceil-split, like torch.chunk: the last shards may be shorter or empty.
inline std::vector<int64_t> even_shards(int64_t total, int64_t world) {
  std::vector<int64_t> sizes(world);
  const int64_t each = ceil_div(total, world);
  for (int64_t& size : sizes) {
    size = min64(each, total);
    total -= size;
  }
  return sizes;
}

TPK_HD constexpr int64_t arrival_class(int64_t shard, int64_t rank, int64_t world) {
  return (shard - rank + world) % world;
}
TPK_HD constexpr int64_t departure_class(int64_t shard, int64_t rank, int64_t world) {
  return (shard - rank - 1 + world) % world;
}

// A half-open range of shards, chunks or slabs.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// Shards that a row of tiles touches: those whose rows an arrival must wait for, or the owners that a
// departure writes to. Empty shards inside the range own no row: skip them.
TPK_HD Range shards_of_tile_row(const ShardMap& map, int64_t tile_row, int64_t bm) {
  const int64_t first = tile_row * bm;
  const int64_t last = first + min64(bm, map.rows() - first) - 1;
  return {map.shard_of(first), map.shard_of(last) + 1};
}

// An arrival comes in chunks: chunk_rows rows of one shard, or a slab of slab_k of K of them, whichever a
// transport chooses. Row chunks are numbered shard after shard; flag = row chunk * slabs + slab.
struct Chunks {
  ShardMap shards;
  int64_t k = 0;
  int64_t chunk_rows = 1;  // a chunk never reaches into the next shard
  int64_t slab_k = 1;
  int64_t first_chunk[kMaxWorld + 1] = {};

  TPK_HD int64_t slabs() const { return max64(1, ceil_div(k, slab_k)); }
  TPK_HD int64_t size() const { return first_chunk[shards.world] * slabs(); }
  TPK_HD int64_t row_chunk(int64_t row) const {
    const int64_t s = shards.shard_of(row);
    return first_chunk[s] + (row - shards.begin[s]) / chunk_rows;
  }
};

inline Chunks make_chunks(const ShardMap& shards, int64_t k, int64_t chunk_rows, int64_t slab_k) {
  if (chunk_rows < 1 || slab_k < 1) {
    throw std::invalid_argument("chunk_rows and slab_k must be at least 1, but they are " +
                                std::to_string(chunk_rows) + " and " + std::to_string(slab_k) + ".");
  }
  constexpr int64_t kMost = int64_t{1} << 62;  // leaves room for k_end * bk beyond k
  detail::require(k >= 0 && k <= kMost,
                  "k must lie between 0 and 2^62, but it is " + std::to_string(k) + ".");
  Chunks c;
  c.shards = shards;
  c.k = k;
  c.chunk_rows = chunk_rows;
  c.slab_k = slab_k;
  for (int64_t s = 0; s < shards.world; ++s) {
    c.first_chunk[s + 1] = c.first_chunk[s] + ceil_div(shards.begin[s + 1] - shards.begin[s], chunk_rows);
  }
  const int64_t row_chunks = c.first_chunk[shards.world];
  detail::require(row_chunks <= kMost / c.slabs(), "row chunks * slabs must stay below 2^62, but it is " +
                                                       std::to_string(row_chunks) + " * " +
                                                       std::to_string(c.slabs()) + ": use larger chunks.");
  return c;
}

// Row chunks that a row of tiles reads.
TPK_HD Range row_chunks_of_tile_row(const Chunks& c, int64_t tile_row, int64_t bm) {
  const int64_t first = tile_row * bm;
  const int64_t last = first + min64(bm, c.shards.rows() - first) - 1;
  return {c.row_chunk(first), c.row_chunk(last) + 1};
}

// Slabs of K that iterations [k_begin, k_end) read. None if K is 0.
TPK_HD Range slabs_of_iters(const Chunks& c, int64_t k_begin, int64_t k_end, int64_t bk) {
  const int64_t end = min64(k_end * bk, c.k);
  const int64_t begin = min64(k_begin * bk, end);
  return begin == end ? Range{0, 0} : Range{begin / c.slab_k, (end - 1) / c.slab_k + 1};
}

// A tile order and the number of tiles in each of its bands (ScheduleOptions::shard_tiles).
struct ShardedOrder {
  TileOrder order;
  std::vector<int64_t> shard_tiles;
};

namespace detail {

// rows[c]: rows of tiles of class c. Classes without any share no band, but keep their (zero) shard_tiles.
inline ShardedOrder finish_order(TileOrder order, const std::vector<int64_t>& rows) {
  ShardedOrder out{order, {}};
  int64_t end = 0;
  for (const int64_t n : rows) {
    out.shard_tiles.push_back(n * order.batch * order.tiles_n);
    end += n;
    if (n > 0) out.order.band_end[out.order.num_bands++] = end;
  }
  return out;
}

inline void check_shards(const Problem& p, const ShardMap& map, int64_t rank) {
  if (map.rows() != p.m) {
    throw std::invalid_argument("shard_sizes must add up to m (" + std::to_string(p.m) +
                                "), but they add up to " + std::to_string(map.rows()) + ".");
  }
  if (rank < 0 || rank >= map.world) {
    throw std::invalid_argument("rank must lie in [0, " + std::to_string(map.world) + "), but it is " +
                                std::to_string(rank) + ".");
  }
}

}  // namespace detail

// Tiles of the own shard first, then in the order in which shards land. A tile is of the class of the last
// shard that it waits for.
inline ShardedOrder make_arrival_order(const Problem& p, const TileShape& t, const ShardMap& map,
                                       int64_t rank, int64_t group_m = 8) {
  detail::check_shards(p, map, rank);
  TileOrder order = make_tile_order(p, t, group_m);
  const int64_t own = map.begin[rank];
  order.start_m = arrival_start(own, order.tiles_m, t);
  // Rows of tiles that end in shard s belong to it ...
  std::vector<int64_t> rows(map.world, 0);
  const auto ends_before = [&](int64_t row) { return row == p.m ? order.tiles_m : row / t.bm; };
  for (int64_t s = 0; s < map.world; ++s) {
    rows[arrival_class(s, rank, map.world)] = ends_before(map.begin[s + 1]) - ends_before(map.begin[s]);
  }
  // ... but the one that straddles the own shard's first row also waits for the shard before, which is last.
  if (own < p.m && own % t.bm != 0) {
    const int64_t straddler_last = own + min64(t.bm - own % t.bm, p.m - own) - 1;
    --rows[arrival_class(map.shard_of(straddler_last), rank, map.world)];
    ++rows[arrival_class(map.shard_of(own - 1), rank, map.world)];
  }
  return detail::finish_order(order, rows);
}

// Tiles of rank + 1 first, own tiles last. A tile is of the class of the first shard that needs it, so that
// a shard can leave as soon as its class is done.
inline ShardedOrder make_departure_order(const Problem& p, const TileShape& t, const ShardMap& map,
                                         int64_t rank, int64_t group_m = 8) {
  detail::check_shards(p, map, rank);
  TileOrder order = make_tile_order(p, t, group_m);
  const int64_t next = map.begin[rank + 1] == p.m ? 0 : map.begin[rank + 1];
  order.start_m = departure_start(next, order.tiles_m, t);
  // Rows of tiles that begin in shard s belong to it ...
  std::vector<int64_t> rows(map.world, 0);
  for (int64_t s = 0; s < map.world; ++s) {
    rows[departure_class(s, rank, map.world)] =
        ceil_div(map.begin[s + 1], t.bm) - ceil_div(map.begin[s], t.bm);
  }
  // ... but the one that straddles the next shard's first row is needed first of all.
  if (next % t.bm != 0) {
    --rows[departure_class(map.shard_of(next / t.bm * t.bm), rank, map.world)];
    ++rows[departure_class(map.shard_of(next), rank, map.world)];
  }
  return detail::finish_order(order, rows);
}

}  // namespace tpk

// Where the tiles of a product lie in M, and in which order they are taken, if its rows belong to ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/shards.hpp"
#include "kernels/gemm_hooks.hpp"

namespace tpk::sm90a {

// Rows of tiles that begin anew with every rank's rows: block b holds rows of tiles [first_tile[b],
// first_tile[b + 1]) and rows of M [row_begin[b], row_begin[b + 1]). 0 blocks: row of tiles t begins at t *
// bm.
struct RowBlocks {
  int32_t count = 0;
  int32_t first_tile[kMaxRanks + 1] = {};
  int32_t row_begin[kMaxRanks + 1] = {};
};

enum class Direction : int32_t { kNone, kArrival, kDeparture };

// Ranks that rows of A come from, or that rows of the result go to.
struct Ranks {
  Direction direction = Direction::kNone;
  RankRows rows;
  int32_t together = 0;  // see DepartureHook
  // Arrival: blocks of rows that land together, [chunk_end[c - 1], chunk_end[c]). None: all rows are there.
  int32_t num_chunks = 0;
  int32_t chunk_end[kMaxChunks] = {};

  // Equal for equal values.
  std::string key() const {
    std::string text(1, static_cast<char>('0' + static_cast<int>(direction)));
    if (direction == Direction::kNone) return text;
    text += std::to_string(rows.rank) + "/" + std::to_string(together);
    for (int32_t r = 0; r < rows.world; ++r) text += "," + std::to_string(rows.row_end[r]);
    text += "/";
    text.append(reinterpret_cast<const char*>(chunk_end), num_chunks * sizeof chunk_end[0]);
    return text;
  }
};

inline Ranks ranks_of(const GemmHooks* hooks) {
  if (hooks == nullptr) return {};
  if (hooks->departure.ranks.world > 0)
    return {Direction::kDeparture, hooks->departure.ranks, hooks->departure.together};
  const ArrivalHook& arrival = hooks->arrival;
  if (arrival.ranks.world == 0 || arrival.landed) return {};
  Ranks ranks{Direction::kArrival, arrival.ranks};
  ranks.num_chunks = arrival.num_chunks;
  std::copy(arrival.row_end, arrival.row_end + arrival.num_chunks, ranks.chunk_end);
  return ranks;
}

struct Placement {
  TileOrder order;
  std::vector<int64_t> shard_tiles;  // see ScheduleOptions
  RowBlocks blocks;
  int64_t first_own = 0;  // departure: position of the first own tile
};

inline Placement place_tiles(const Problem& p, const TileShape& tile, const Ranks& ranks) {
  Placement out;
  if (ranks.direction == Direction::kNone) {
    out.order = make_tile_order(p, tile);
    return out;
  }
  std::vector<int64_t> sizes;
  for (int32_t r = 0; r < ranks.rows.world; ++r) sizes.push_back(ranks.rows.row_end[r] - ranks.rows.begin(r));
  if (ranks.direction == Direction::kArrival) {
    const ShardedOrder sharded = make_arrival_order(p, tile, make_shard_map(sizes), ranks.rows.rank);
    out.order = sharded.order;
    out.shard_tiles = sharded.shard_tiles;
    return out;
  }
  // No tile may have rows of two ranks: the order is that of a product in which every rank's rows are whole
  // tiles.
  out.blocks.count = ranks.rows.world;
  for (int32_t r = 0; r < ranks.rows.world; ++r) {
    const int64_t rows_of_tiles = ceil_div(sizes[r], tile.bm);
    out.blocks.row_begin[r + 1] = ranks.rows.row_end[r];
    out.blocks.first_tile[r + 1] = out.blocks.first_tile[r] + static_cast<int32_t>(rows_of_tiles);
    sizes[r] = rows_of_tiles * tile.bm;
  }
  Problem whole = p;
  whole.m = int64_t{out.blocks.first_tile[ranks.rows.world]} * tile.bm;
  // Groups no higher than what leaves together, so that it is complete before the next begins.
  constexpr int64_t kMostGroup = 8;
  const int64_t group =
      ranks.together > 0 ? max64(1, min64(kMostGroup, ranks.together / tile.bm)) : kMostGroup;
  const ShardedOrder sharded =
      make_departure_order(whole, tile, make_shard_map(sizes), ranks.rows.rank, group);
  out.order = sharded.order;
  out.shard_tiles = sharded.shard_tiles;
  out.first_own = out.order.size() - out.shard_tiles.back();
  return out;
}

}  // namespace tpk::sm90a

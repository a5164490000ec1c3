// Where the tiles of a product lie in M, and in which order they are taken, if its rows belong to ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/shards.hpp"
#include "kernels/gemm_hooks.hpp"
#include "kernels/grouped_rows.hpp"

namespace tpk::sm90a {

// Rows of tiles that begin anew with every block of rows, in the order in which they are taken: block b has
// rows of tiles [first_tile[b], first_tile[b + 1]). 0 blocks: row of tiles t begins at t * bm.
struct RowBlocks {
  int32_t count = 0;
  int32_t first_tile[kMaxChunks + 1] = {};
  RowSpan rows[kMaxChunks] = {};
  int32_t matrix[kMaxChunks] = {};  // of B, for a grouped product
};

enum class Direction : int32_t { kNone, kArrival, kDeparture };

// Ranks that rows of A come from, or that rows of the result go to.
struct Ranks {
  Direction direction = Direction::kNone;
  RankRows rows;
  // Arrival: blocks of rows that land together, [chunk_end[c - 1], chunk_end[c]). None: all rows are there.
  int32_t num_chunks = 0;
  int32_t chunk_end[kMaxChunks] = {};
  // Departure: see DepartureHook.
  int32_t num_blocks = 0;
  RowSpan blocks[kMaxChunks] = {};
  bool by_columns = false;  // see BlockArrival

  // Equal for equal values.
  std::string key() const {
    std::string text(1, static_cast<char>('0' + static_cast<int>(direction) + (by_columns ? 8 : 0)));
    if (direction == Direction::kNone) return text;
    text += std::to_string(rows.rank);
    for (int32_t r = 0; r < rows.world; ++r) text += "," + std::to_string(rows.row_end[r]);
    text += "/";
    text.append(reinterpret_cast<const char*>(chunk_end), num_chunks * sizeof chunk_end[0]);
    text.append(reinterpret_cast<const char*>(blocks), num_blocks * sizeof blocks[0]);
    return text;
  }
};

inline Ranks ranks_of(const GemmHooks* hooks) {
  if (hooks == nullptr) return {};
  if (const DepartureHook& h = hooks->departure; h.ranks.world > 0) {
    Ranks ranks{Direction::kDeparture, h.ranks};
    ranks.num_blocks = h.num_blocks;
    std::copy(h.blocks, h.blocks + h.num_blocks, ranks.blocks);
    return ranks;
  }
  if (hooks->blocks.flags != nullptr) {
    Ranks ranks;
    ranks.by_columns = hooks->blocks.by_columns;
    return ranks;
  }
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
  std::vector<int64_t> turns;  // departure: positions where a run of own tiles begins behind others
  int64_t own_tiles = 0;       // departure
};

// Tiles that begin anew with every block of rows; block after block.
inline Placement place_blocks(const Problem& p, const TileShape& tile, const RowSpan* spans, int32_t count) {
  Placement out;
  RowBlocks& blocks = out.blocks;
  blocks.count = count;
  int64_t highest = 1;
  for (int32_t b = 0; b < blocks.count; ++b) {
    const int64_t rows = ceil_div(spans[b].end - spans[b].begin, tile.bm);
    blocks.rows[b] = spans[b];
    blocks.first_tile[b + 1] = blocks.first_tile[b] + static_cast<int32_t>(rows);
    highest = max64(highest, rows);
  }
  Problem whole = p;
  whole.m = int64_t{blocks.first_tile[blocks.count]} * tile.bm;
  constexpr int64_t kMostGroup = 8;
  out.order = make_tile_order(whole, tile, min64(kMostGroup, highest));
  for (int32_t b = 0; b < blocks.count; ++b)
    out.order.band_end[out.order.num_bands++] = blocks.first_tile[b + 1];
  return out;
}

// No shards: schedules cut the tiles of all groups as one list.
inline Placement place_grouped(const Problem& p, const TileShape& tile, const GroupedRows& groups) {
  Placement out = place_blocks(p, tile, groups.rows, groups.count);
  std::copy(groups.matrix, groups.matrix + groups.count, out.blocks.matrix);
  return out;
}

inline Placement place_departure(const Problem& p, const TileShape& tile, const Ranks& ranks) {
  Placement out = place_blocks(p, tile, ranks.blocks, ranks.num_blocks);
  const RowBlocks& blocks = out.blocks;
  const int64_t first_own = ranks.rows.begin(ranks.rows.rank);
  const int64_t end_own = ranks.rows.row_end[ranks.rows.rank];
  bool was_own = true;
  for (int32_t b = 0; b < blocks.count; ++b) {
    const bool is_own = blocks.rows[b].begin >= first_own && blocks.rows[b].begin < end_own;
    if (is_own && !was_own) out.turns.push_back(blocks.first_tile[b] * out.order.tiles_n);
    was_own = is_own;
    if (is_own) out.own_tiles += (blocks.first_tile[b + 1] - blocks.first_tile[b]) * out.order.tiles_n;
    out.shard_tiles.push_back((blocks.first_tile[b + 1] - blocks.first_tile[b]) * out.order.tiles_n);
  }
  return out;
}

inline Placement place_tiles(const Problem& p, const TileShape& tile, const Ranks& ranks) {
  if (ranks.direction == Direction::kDeparture) return place_departure(p, tile, ranks);
  Placement out;
  if (ranks.direction == Direction::kNone) {
    constexpr int64_t kGroup = 8;
    out.order = make_tile_order(p, tile, ranks.by_columns ? max64(1, tiles_m(p, tile)) : kGroup);
    return out;
  }
  std::vector<int64_t> sizes;
  for (int32_t r = 0; r < ranks.rows.world; ++r) sizes.push_back(ranks.rows.row_end[r] - ranks.rows.begin(r));
  const ShardedOrder sharded = make_arrival_order(p, tile, make_shard_map(sizes), ranks.rows.rank);
  out.order = sharded.order;
  out.shard_tiles = sharded.shard_tiles;
  return out;
}

}  // namespace tpk::sm90a

// Tile order: a permutation of the output tiles, in closed form, so that a kernel computes it from a
// few words. Positions are the time order of the schedule; tiles are where the result lies.
//
// Shards are consecutive blocks of rows of M, one per rank, of any size (0 too), not necessarily
// multiples of the tile. Rotating the rows of tiles is enough for both directions:
//   arrival    starts at the first tile that lies wholly at or after the own shard's first row. A tile
//              that straddles shards s and s + 1 then stands with s + 1, which lands later; the tile
//              that straddles rank - 1 and rank stands last, as its first rows land last.
//   departure  starts at the tile that holds the first row of rank + 1. A tile that straddles s and
//              s + 1 then stands with s, which leaves earlier; own tiles stand last.
// The rotation is additive: any world size works.
//
// Rows of tiles are walked in groups, column by column, so that the operands of a wave stay in L2. A group
// that reached from one shard into the next would start tiles of the later shard too early, so groups end
// where a band ends. A band is a run of rows (in rotated order) of one class: tiles that land, or leave,
// together. All batches of a band come before the next band. host/shards.hpp fills the bands.
#pragma once

#include <stdexcept>
#include <string>

#include "host/check.hpp"
#include "host/problem.hpp"

namespace tpk {

constexpr int64_t kMaxWorld = 64;  // ranks whose shards a kernel can tell apart

struct TileCoord {
  int64_t batch;
  int64_t m;  // tile row
  int64_t n;  // tile column
};

struct TileOrder {
  int64_t tiles_m = 0;
  int64_t tiles_n = 0;
  int64_t batch = 1;
  int64_t group_m = 8;  // rows of tiles that are walked together, column by column, for L2 reuse
  int64_t start_m = 0;  // first row of tiles (rotation)
  // Band i is rows [band_end[i - 1], band_end[i]) of the rotated order; 0 bands: all rows are one band.
  int64_t num_bands = 0;
  int64_t band_end[kMaxWorld] = {};

  TPK_HD int64_t size() const { return batch * tiles_m * tiles_n; }

  // Tile at a position, 0 <= position < size().
  TPK_HD TileCoord at(int64_t position) const {
    const int64_t row_tiles = batch * tiles_n;  // tiles in one row of tiles, over all batches
    int64_t band = 0;                           // the first that ends behind the position
    for (int64_t high = num_bands - 1; band < high;) {
      const int64_t middle = (band + high) / 2;
      if (position < band_end[middle] * row_tiles) {
        high = middle;
      } else {
        band = middle + 1;
      }
    }
    const int64_t begin = band > 0 ? band_end[band - 1] : 0;
    const int64_t end = num_bands > 0 ? band_end[band] : tiles_m;
    const int64_t in_band = position - begin * row_tiles;
    const int64_t per_batch = (end - begin) * tiles_n;
    const Division batch_of = divide(in_band, per_batch);
    const Division group = divide(batch_of.remainder, group_m * tiles_n);
    const int64_t first_row = group.quotient * group_m;
    const int64_t rows = min64(group_m, end - begin - first_row);
    const Division column = divide(group.remainder, rows);
    const int64_t row = begin + first_row + column.remainder + start_m;
    return {batch_of.quotient, row >= tiles_m ? row - tiles_m : row, column.quotient};
  }
};

// Throws std::invalid_argument with a sentence where an argument makes no sense, or where there are more
// tiles than positions.
inline TileOrder make_tile_order(const Problem& p, const TileShape& t, int64_t group_m = 8) {
  detail::check_extent("m", p.m, 0);
  detail::check_extent("n", p.n, 0);
  detail::check_extent("batch", p.batch, 0);
  detail::check_extent("bm", t.bm, 1);
  detail::check_extent("bn", t.bn, 1);
  detail::check_extent("group_m", group_m, 1);
  TileOrder order;
  order.tiles_m = tiles_m(p, t);
  order.tiles_n = tiles_n(p, t);
  order.batch = p.batch;
  order.group_m =
      min64(group_m, max64(1, order.tiles_m));  // the same walk, and group_m * tiles_n cannot wrap
  constexpr int64_t kMost = int64_t{1} << 61;
  const int64_t row_tiles = max64(1, order.tiles_n);
  if (order.tiles_m > kMost / row_tiles || order.tiles_m * row_tiles > kMost / max64(1, p.batch)) {
    throw std::invalid_argument("batch * tiles of M * tiles of N must stay below 2^61, but it is " +
                                std::to_string(p.batch) + " * " + std::to_string(order.tiles_m) + " * " +
                                std::to_string(order.tiles_n) + ": use larger tiles.");
  }
  return order;
}

// Row of tiles at which an arrival's order starts; own_begin is the own shard's first row.
TPK_HD constexpr int64_t arrival_start(int64_t own_begin, int64_t tiles_m, const TileShape& t) {
  const int64_t row = ceil_div(own_begin, t.bm);
  return row >= tiles_m ? 0 : row;
}

// Row of tiles at which a departure's order starts; next_begin is the first row that belongs to a rank after
// this one (0 when there is none: this is the last rank, or those after it have no rows).
TPK_HD constexpr int64_t departure_start(int64_t next_begin, int64_t tiles_m, const TileShape& t) {
  const int64_t row = next_begin / t.bm;
  return row >= tiles_m ? 0 : row;
}

}  // namespace tpk

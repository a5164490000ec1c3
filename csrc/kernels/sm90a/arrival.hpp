// When the rows of an arrival are there: chunk by chunk, hence tile by tile. Guesses, for plans only: the
// kernel waits for flags.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/shards.hpp"
#include "kernels/sm90a/cost.hpp"
#include "kernels/sm90a/placement.hpp"

namespace tpk::sm90a {

// Since the pushes began, us. They go peer after peer, chunk after chunk (host/pushes.hpp), on all ranks at
// once: a sender whose shard lands as the c-th has sent it c - 1 times before. Own chunks: 0.
inline std::vector<double> chunk_arrivals(const Ranks& ranks, int64_t k, const LinkCost& link) {
  const RankRows& rows = ranks.rows;
  const double row_us = static_cast<double>(k) * kElementBytes / link.rate(rows.world);
  std::vector<double> at(static_cast<size_t>(ranks.num_chunks), 0.0);
  int32_t chunk = 0;
  for (int32_t r = 0; r < rows.world; ++r) {
    const int32_t first = chunk;
    int32_t begin = rows.begin(r);
    double shard_us = 0;
    for (; chunk < ranks.num_chunks && ranks.chunk_end[chunk] <= rows.row_end[r]; ++chunk) {
      shard_us += link.copy_us + (ranks.chunk_end[chunk] - begin) * row_us;
      at[chunk] = shard_us;
      begin = ranks.chunk_end[chunk];
    }
    const int64_t turn = arrival_class(r, rows.rank, rows.world);
    for (int32_t c = first; c < chunk; ++c) at[c] = turn == 0 ? 0 : at[c] + (turn - 1) * shard_us;
  }
  return at;
}

// Of every row of tiles: when the last of its rows is there.
inline std::vector<double> row_arrivals(const Ranks& ranks, const std::vector<double>& chunk_at,
                                        int64_t tiles_m, int64_t bm) {
  std::vector<double> at(static_cast<size_t>(tiles_m), 0.0);
  int64_t begin = 0;
  for (int32_t c = 0; c < ranks.num_chunks; ++c) {
    const int64_t end = ranks.chunk_end[c];
    for (int64_t row = begin / bm; begin < end && row < tiles_m && row * bm < end; ++row)
      at[row] = std::max(at[row], chunk_at[c]);
    begin = end;
  }
  return at;
}

// Of every tile, by position. Empty, with last 0: all are there.
struct TileArrivals {
  std::vector<double> at;
  double last = 0;

  double of(int64_t position) const { return at.empty() ? 0 : at[static_cast<size_t>(position)]; }
};

inline TileArrivals tile_arrivals(const TileOrder& order, const std::vector<double>& row_at) {
  // So many tiles take so long that what the first of them wait for is nothing.
  constexpr int64_t kMost = int64_t{1} << 16;
  TileArrivals out;
  if (order.size() > kMost) return out;
  for (const double at : row_at) out.last = std::max(out.last, at);
  if (out.last == 0) return out;
  out.at.reserve(static_cast<size_t>(order.size()));
  for (int64_t i = 0; i < order.size(); ++i) out.at.push_back(row_at[static_cast<size_t>(order.at(i).m)]);
  return out;
}

// Rows of tiles, in the order in which they are taken, that are there at the same time.
struct Band {
  int64_t rows = 0;
  double at = 0;
};

inline std::vector<Band> arrival_bands(const TileOrder& order, const std::vector<double>& row_at) {
  constexpr size_t kMost = 16;
  std::vector<Band> bands;
  for (int64_t i = 0; i < order.tiles_m; ++i) {
    const int64_t row = i + order.start_m;
    const double at = row_at[static_cast<size_t>(row >= order.tiles_m ? row - order.tiles_m : row)];
    if (bands.empty() || bands.back().at != at) bands.push_back({0, at});
    ++bands.back().rows;
  }
  if (bands.size() <= kMost) return bands;
  std::vector<Band> merged(kMost);
  for (size_t i = 0; i < bands.size(); ++i) {
    Band& to = merged[i * kMost / bands.size()];
    to = {to.rows + bands[i].rows, std::max(to.at, bands[i].at)};
  }
  return merged;
}

// The same tiles, where groups of rows of tiles are taken one after the other.
inline Placement place_groups(const Placement& placement, const std::vector<int64_t>& rows) {
  Placement out = placement;
  out.shard_tiles.clear();
  out.order.num_bands = 0;
  int64_t end = 0;
  for (const int64_t n : rows) {
    out.order.band_end[out.order.num_bands++] = end += n;
    out.shard_tiles.push_back(n * out.order.batch * out.order.tiles_n);
  }
  return out;
}

}  // namespace tpk::sm90a

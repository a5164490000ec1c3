// How a CTA finds its work: a plan's schedule and tile order, boiled down by the launcher to a few words and
// to divisions by multiplication. One thread works the first segment out before anything can be loaded,
// through code and parameters that no cache holds yet, so that both must be short. tpk::SegmentCursor and
// tpk::TileOrder say what is meant; cmake/tests/sm80_walk_test.cpp holds this against them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/schedule.hpp"
#include "host/tile_order.hpp"
#include "kernels/sm80/divisor.hpp"

namespace tpk::sm80 {

// A position in the iterations of a piece.
struct Cut {
  int32_t tile;  // of the piece
  int64_t k;     // iteration of the tile
};

// Tiles dealt out whole, or cut into equal shares.
struct WalkPiece {
  int32_t first_tile = 0;
  int32_t num_tiles = 0;
  int32_t shares = 0;  // 0: whole tiles
  int32_t first_slot = 0;
  // Share i begins at unit i * each + i * rest / shares. A tile has as many units as iterations, or as
  // granules.
  int64_t each = 0;
  int64_t rest = 0;
  Divisor<uint64_t> of_shares;
  Divisor<uint64_t> of_tile;  // units of one
  bool has_granules = false;
};

constexpr int kMostWalkPieces = 3;

struct Walk {
  int64_t k_iters = 1;
  int64_t min_iters = 1;
  int32_t workers = 1;  // CTAs of the grid
  int32_t num_pieces = 0;
  WalkPiece pieces[kMostWalkPieces];
  // The tile order.
  int32_t group_m = 1;     // rows of tiles of a group
  int32_t last_group = 0;  // of a matrix, which may have fewer rows
  Divisor<uint32_t> of_matrix;
  Divisor<uint32_t> of_group;
  Divisor<uint32_t> of_rows;
  Divisor<uint32_t> of_last_rows;

  TPK_HD TileCoord tile_at(int32_t position) const {
    const auto matrix = of_matrix.divide(static_cast<uint32_t>(position));
    const auto group = of_group.divide(matrix.remainder);
    const bool last = static_cast<int32_t>(group.quotient) == last_group;
    const auto column = (last ? of_last_rows : of_rows).divide(group.remainder);
    return {matrix.quotient, static_cast<int64_t>(group.quotient) * group_m + column.remainder,
            column.quotient};
  }

  // See tpk::share_begin and tpk::snap_cut.
  TPK_HD Cut share_begin(const WalkPiece& p, int32_t share) const {
    if (share >= p.shares) return {p.num_tiles, 0};
    const uint64_t spread = p.of_shares.divide(static_cast<uint64_t>(share * p.rest)).quotient;
    const auto at = p.of_tile.divide(static_cast<uint64_t>(share * p.each) + spread);
    auto k = static_cast<int64_t>(at.remainder);
    if (p.has_granules) {
      k = static_cast<int64_t>(p.of_tile.divide(static_cast<uint64_t>(k * k_iters)).quotient);
    } else if (k < min_iters || k_iters < 2 * min_iters) {
      k = 0;
    } else if (k_iters - k < min_iters) {
      k = k_iters - min_iters;
    }
    return {static_cast<int32_t>(at.quotient), k};
  }
};

// One run of iterations of one tile. Slots: see tpk::Segment.
struct Step {
  int32_t position = 0;
  int32_t slot = -1;
  int32_t first_slot = -1;
  int32_t end_slot = -1;
  int64_t k_begin = 0;
  int64_t k_end = 0;
};

// Walks the steps of one worker in time order.
class Walker {
 public:
  TPK_HD explicit Walker(int32_t worker) : worker_(worker) {}

  // The next one, or false when there is none.
  TPK_HD bool next(const Walk& w, Step* out) {
    while (piece_ < w.num_pieces) {
      const WalkPiece& p = w.pieces[piece_];
      if (p.shares == 0) {
        if (next_whole(w, p, out)) return true;
      } else {
        if (next_part(w, p, out)) return true;
      }
      ++piece_;
      is_inside_ = false;
    }
    return false;
  }

 private:
  TPK_HD bool next_whole(const Walk& w, const WalkPiece& p, Step* out) {
    const int64_t tile = is_inside_ ? int64_t{end_.tile} + w.workers : worker_;
    if (tile >= p.num_tiles) return false;
    is_inside_ = true;
    end_.tile = static_cast<int32_t>(tile);
    *out = Step{p.first_tile + end_.tile, -1, -1, -1, 0, w.k_iters};
    return true;
  }

  TPK_HD bool next_part(const Walk& w, const WalkPiece& p, Step* out) {
    if (!is_inside_) {
      if (worker_ >= p.shares) return false;
      is_inside_ = true;
      TPK_ONE_COPY
      for (int i = 0; i < 2; ++i) {
        begin_ = end_;
        end_ = w.share_begin(p, worker_ + i);
      }
    }
    if (end_.tile == begin_.tile && end_.k == begin_.k) return false;
    // Backwards: see tpk::Schedule.
    const int32_t tile = end_.k == 0 ? end_.tile - 1 : end_.tile;
    const int64_t k_begin = tile == begin_.tile ? begin_.k : 0;
    const int64_t k_end = end_.k == 0 ? w.k_iters : end_.k;
    *out = Step{p.first_tile + tile, -1, -1, -1, k_begin, k_end};
    if (k_end < w.k_iters) {
      out->slot = p.first_slot + worker_;
    } else if (k_begin > 0) {
      int32_t first = worker_;
      Cut at;
      do {
        at = w.share_begin(p, --first);
      } while (at.tile == tile && at.k > 0);
      out->first_slot = p.first_slot + first;
      out->end_slot = p.first_slot + worker_;
    }
    end_ = {tile, k_begin};
    return true;
  }

  int32_t worker_;
  int32_t piece_ = 0;
  bool is_inside_ = false;  // of the piece
  Cut begin_{0, 0};         // of the share
  Cut end_{0, 0};           // of what is left of it; whole tiles: the last one
};

// Throws std::runtime_error with a sentence where there are more tiles or workers than the kernel counts.
inline Walk make_walk(const Schedule& s, const TileOrder& order) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (order.size() > kMost || s.workers > kMost) {
    throw std::runtime_error("the portable kernel counts tiles and workers to 2^31 - 1, but there are " +
                             std::to_string(order.size()) + " and " + std::to_string(s.workers) +
                             ": take fewer matrices in a batch, or larger tiles.");
  }
  if (s.num_pieces > kMostWalkPieces || s.turns != 1 || order.num_bands > 0 || order.start_m > 0)
    throw std::runtime_error("the portable kernel has no schedules for communication.");
  Walk w;
  w.k_iters = s.k_iters;
  w.min_iters = s.min_iters;
  w.workers = static_cast<int32_t>(s.workers);
  w.num_pieces = static_cast<int32_t>(s.num_pieces);
  int64_t first_slot = 0;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& from = s.pieces[i];
    WalkPiece& p = w.pieces[i];
    p.first_tile = static_cast<int32_t>(from.first_tile);
    p.num_tiles = static_cast<int32_t>(from.num_tiles);
    if (from.kind == PieceKind::kWaves) continue;
    p.shares = static_cast<int32_t>(from.workers);
    p.first_slot = static_cast<int32_t>(first_slot);
    first_slot += from.workers;
    p.has_granules = from.granules > 0;
    const int64_t of_tile = p.has_granules ? from.granules : s.k_iters;
    const int64_t total = from.num_tiles * of_tile;
    p.each = p.has_granules ? 0 : total / from.workers;
    p.rest = total - p.each * from.workers;
    p.of_shares = Divisor<uint64_t>(static_cast<uint64_t>(from.workers));
    p.of_tile = Divisor<uint64_t>(static_cast<uint64_t>(of_tile));
  }
  if (order.size() == 0) return w;
  const auto divisor = [](int64_t x) { return Divisor<uint32_t>(static_cast<uint32_t>(x)); };
  w.group_m = static_cast<int32_t>(order.group_m);
  w.last_group = static_cast<int32_t>((order.tiles_m - 1) / order.group_m);
  w.of_matrix = divisor(order.tiles_m * order.tiles_n);
  w.of_group = divisor(std::min(order.group_m * order.tiles_n, order.tiles_m * order.tiles_n));
  w.of_rows = divisor(order.group_m);
  w.of_last_rows = divisor(order.tiles_m - w.last_group * order.group_m);
  return w;
}

}  // namespace tpk::sm80

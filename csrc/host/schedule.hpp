// Schedules: who computes which iterations of which tile, in which order of time.
//
// A schedule is a short list of pieces in time order. A piece is either
//   waves     tiles dealt out whole, worker w takes first_tile + i * workers + w (data-parallel), or
//   streamed  its tiles' iterations laid end to end and cut into equal shares (Stream-K).
// Every known decomposition is a value of this structure: data-parallel (one waves piece), textbook
// Stream-K (one streamed piece), split-K (one streamed piece with tiles * splits workers), the paper's
// two-tile hybrid (streamed, then waves), the same cut at few depths of K, and the orders that let
// communication hide (remainder last, own shard first, every shard in turn). Kernels follow the data; they do
// not know the names.
//
// A worker is one CTA (or one cluster). Workers are tickets: whoever starts next takes the next number,
// so worker w never starts before worker w - 1. Two rules make a plan finish on any number of resident
// workers, even one:
//   - the finisher of a split tile is the worker with the last K, which is the highest ticket among the
//     tile's workers: workers wait for lower tickets only;
//   - inside a streamed piece a worker walks its share from the last tile to the first, so the partial
//     that a higher ticket will wait for is written first, and its own wait comes last.
// Pieces may be dealt out in turns, one after the other, each with tickets of its own (start_turn): who draws
// a ticket of a turn has done its work of all turns before, and all work of those has been drawn.
#pragma once

#include "host/problem.hpp"

namespace tpk {

enum class PieceKind : int32_t { kWaves = 0, kStreamed = 1 };

struct Piece {
  PieceKind kind = PieceKind::kWaves;
  int64_t first_tile = 0;  // position in the tile order
  int64_t num_tiles = 0;
  // Streamed only. Workers first_worker ... first_worker + workers - 1 share the piece; the first
  // handicapped of them get handicap iterations fewer than the others.
  int64_t first_worker = 0;
  int64_t workers = 0;
  int64_t handicapped = 0;
  int64_t handicap = 0;
  // Streamed only. Above 0: tiles are cut at multiples of K / granules and nowhere else, so that at any time
  // the workers stand at few different depths of K, and those at the same one share operands in L2. No
  // handicaps.
  int64_t granules = 0;
  int64_t turn = 0;  // never less than that of the piece before
};

// One contiguous run of iterations of one tile, done by one worker.
struct Segment {
  int64_t position = 0;  // of the tile in the tile order
  int64_t k_begin = 0;   // in iterations
  int64_t k_end = 0;
  int64_t piece = 0;
  int64_t slot = -1;        // where this worker's partial goes if the segment does not finish the tile
  int64_t first_slot = -1;  // slots [first_slot, end_slot) hold the partials to add, in K order, if it does
  int64_t end_slot = -1;

  TPK_HD bool finishes() const { return slot < 0; }
  TPK_HD bool is_split() const { return slot >= 0 || first_slot >= 0; }
};

constexpr int64_t kMaxPieces = 35;  // every shard in turn, streamed + waves, for 16 ranks, a tail, a cut

struct Schedule {
  int64_t k_iters = 1;  // iterations per tile
  int64_t workers = 1;
  int64_t min_iters = 1;  // no split leaves a run of iterations shorter than this
  int64_t num_pieces = 0;
  int64_t turns = 1;      // turn t has tickets [t * workers, (t + 1) * workers)
  int64_t num_slots = 0;  // fp32 partial tiles and fix-up flags to allocate
  Piece pieces[kMaxPieces];

  TPK_HD int64_t tickets() const { return turns * workers; }
};

// A cut that would leave fewer than min_iters on either side moves down: to the tile's start, or so
// that exactly min_iters remain. Moving one way only keeps shares within one such run of each other.
// Tiles too short for two runs are not cut.
TPK_HD int64_t snap_cut(int64_t cut, int64_t k_iters, int64_t min_iters) {
  const int64_t r = divide(cut, k_iters).remainder;
  if (r == 0) return cut;
  if (k_iters < 2 * min_iters || r < min_iters) return cut - r;
  return k_iters - r < min_iters ? cut - (min_iters - (k_iters - r)) : cut;
}

// First iteration (counted over the piece) of share i, 0 <= i <= piece.workers. Every share is the quotient,
// less the handicap where there is one, and the remainder is spread evenly (one more iteration for every
// workers / remainder-th share). Spread so, shares of tiles * splits workers begin exactly at tile bounds:
// split-K is no special case.
TPK_HD int64_t share_begin(const Schedule& s, const Piece& p, int64_t i) {
  const int64_t total = p.num_tiles * s.k_iters;
  if (i >= p.workers) return total;
  if (p.granules > 0) {
    const int64_t granule = divide(i * p.num_tiles * p.granules, p.workers).quotient;
    const Division at = divide(granule, p.granules);
    return at.quotient * s.k_iters + divide(at.remainder * s.k_iters, p.granules).quotient;
  }
  const int64_t charged = total + p.handicapped * p.handicap;
  const Division each = divide(charged, p.workers);
  const int64_t extra = divide(i * each.remainder, p.workers).quotient;
  return snap_cut(i * each.quotient + extra - min64(i, p.handicapped) * p.handicap, s.k_iters, s.min_iters);
}

// Shares of every split tile, where all of its workers may finish it together: one streamed piece, the last,
// in which each worker has one run of one tile. 0 elsewhere, and beyond kMostShares.
constexpr int64_t kMostShares = 32;
inline int64_t divided_shares(const Schedule& s) {
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& p = s.pieces[i];
    if (p.kind != PieceKind::kStreamed) continue;
    const bool whole = p.granules > 1 && p.granules <= kMostShares && p.workers == p.num_tiles * p.granules;
    return whole && i == s.num_pieces - 1 && p.first_worker == 0 ? p.granules : 0;
  }
  return 0;
}

// Walks the segments of one ticket in time order. Divisions are long where they are inlined, so there are few
// places that call share_begin.
class SegmentCursor {
 public:
  TPK_HD SegmentCursor(const Schedule& s, int64_t ticket) : s_(s), worker_(ticket) {
    if (s.turns == 1) return;
    const Division of_turn = divide(ticket, s.workers);
    turn_ = of_turn.quotient;
    worker_ = of_turn.remainder;
  }

  // The next segment, or false when there is none.
  TPK_HD bool next(Segment* out) {
    while (piece_ < s_.num_pieces) {
      const Piece& p = s_.pieces[piece_];
      if (p.turn == turn_) {
        if (!is_inside_) enter(p);
        if (p.kind == PieceKind::kWaves ? next_wave(p, out) : next_streamed(p, out)) return true;
      }
      if (p.kind == PieceKind::kStreamed) slot_base_ += p.workers;
      ++piece_;
      is_inside_ = false;
    }
    return false;
  }

 private:
  TPK_HD void enter(const Piece& p) {
    is_inside_ = true;
    share_ = worker_ - p.first_worker;
    begin_ = end_ = 0;
    if (p.kind == PieceKind::kWaves) {
      begin_ = worker_;
    } else if (share_ >= 0 && share_ < p.workers) {
      TPK_ONE_COPY
      for (int64_t i = 0; i < 2; ++i) {
        begin_ = end_;
        end_ = share_begin(s_, p, share_ + i);
      }
    }
  }

  TPK_HD bool next_wave(const Piece& p, Segment* out) {
    if (begin_ >= p.num_tiles) return false;
    *out = Segment{p.first_tile + begin_, 0, s_.k_iters, piece_, -1, -1, -1};
    begin_ += s_.workers;
    return true;
  }

  TPK_HD bool next_streamed(const Piece& p, Segment* out) {
    if (begin_ >= end_) return false;
    const int64_t tile = divide(end_ - 1, s_.k_iters).quotient;  // walk backwards: see the top of this file
    const int64_t tile_begin = tile * s_.k_iters;
    const int64_t k_begin = max64(begin_, tile_begin) - tile_begin;
    const int64_t k_end = end_ - tile_begin;
    *out = Segment{p.first_tile + tile, k_begin, k_end, piece_, -1, -1, -1};
    if (k_end < s_.k_iters) {
      out->slot = slot_base_ + share_;
    } else if (k_begin > 0) {
      int64_t first = share_ - 1;
      while (share_begin(s_, p, first) > tile_begin) --first;
      out->first_slot = slot_base_ + first;
      out->end_slot = slot_base_ + share_;
    }
    end_ = tile_begin + k_begin;
    return true;
  }

  const Schedule& s_;
  int64_t worker_;
  int64_t turn_ = 0;
  int64_t piece_ = 0;
  bool is_inside_ = false;  // of the piece
  int64_t slot_base_ = 0;
  int64_t share_ = 0;
  int64_t begin_ = 0;  // waves: next tile of the piece; streamed: the share's first iteration
  int64_t end_ = 0;    // streamed: end of what is left of the share
};

}  // namespace tpk

// Does a set of plans finish, whatever the number of workers that run at once? A simulator of waits, not of
// time: workers step through their segments, each wait either holds or not, and what is left when nobody can
// step is a deadlock. Waits only ever become true, so the answer does not depend on the order of steps.
//
// Rules of a worker, the same as a kernel's:
//   - tickets are taken in order, at most `resident` of them unfinished at once on every rank;
//   - an arrival by workers: ticket t < comm_workers sends its part of the own shard before anything else,
//   and
//     a segment waits until every shard that its tile reads was sent by all comm_workers of that rank. (A
//     copy engine needs no worker, hence nothing to simulate.);
//   - a segment that does not finish its tile raises its slot; one that does waits for its slots;
//   - a departure in which the owner's epilogue is the reduction: the tile is first published to the other
//     owners, and then, if it is all mine, waits for the same tile (or the whole shard) from all other ranks;
//   - a tile with only some rows of mine must not wait there: straddlers stand early in the order, and two
//     ranks could wait for each other. They are reduced when the worker has done all its segments.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/check.hpp"
#include "host/schedule.hpp"
#include "host/shards.hpp"

namespace tpk {

// All segments of one ticket, in time order.
inline std::vector<Segment> worker_segments(const Schedule& s, int64_t ticket) {
  std::vector<Segment> segments;
  SegmentCursor cursor(s, ticket);
  for (Segment segment; cursor.next(&segment);) segments.push_back(segment);
  return segments;
}

// True if no worker can meet a tile at `position` or later before one in front of it. Shares are walked
// backwards, hence no streamed piece may hold both.
inline bool tiles_apart(const Schedule& s, int64_t position) {
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& p = s.pieces[i];
    if (p.kind == PieceKind::kStreamed && p.first_tile < position && position < p.first_tile + p.num_tiles) {
      return false;
    }
  }
  return true;
}

// The same work, tiles from `position` on in another turn than those in front of it. Waiting there for other
// ranks keeps nobody waiting, on any number of resident workers, if they wait for tiles that stand in front
// alone: those are done, or drawn by a worker that runs. Takes what tiles_apart accepts, and less than
// kMaxPieces pieces; positions in ascending order.
inline Schedule start_turn(Schedule s, int64_t position) {
  int64_t i = 0;
  while (i < s.num_pieces && s.pieces[i].first_tile + s.pieces[i].num_tiles <= position) ++i;
  if (i == s.num_pieces) return s;
  const int64_t before = position - s.pieces[i].first_tile;
  if (before > 0) {  // waves: cut in two
    for (int64_t j = s.num_pieces++; j > i; --j) s.pieces[j] = s.pieces[j - 1];
    s.pieces[i].num_tiles = before;
    s.pieces[++i].first_tile = position;
    s.pieces[i].num_tiles -= before;
  }
  if (i == 0) return s;  // nothing stands in front
  for (int64_t j = i; j < s.num_pieces; ++j) s.pieces[j].turn = s.turns;
  ++s.turns;
  return s;
}

enum class OwnerWaits : int32_t { kNone, kTile, kShard };

struct ProgressOptions {
  TileShape tile;
  ShardMap shards;
  int64_t resident = 1;
  int64_t comm_workers = 0;  // > 0: an arrival by workers
  OwnerWaits owner_waits = OwnerWaits::kNone;
  bool defer_straddlers = true;
};

// What every ticket of one rank stands for.
struct RankProgram {
  std::vector<std::vector<Segment>> workers;
  TileOrder order;
  int64_t num_slots = 0;
};

inline RankProgram make_rank_program(const Schedule& s, const TileOrder& order) {
  RankProgram program{{}, order, s.num_slots};
  for (int64_t t = 0; t < s.tickets(); ++t) program.workers.push_back(worker_segments(s, t));
  return program;
}

struct ProgressReport {
  bool finished = false;
  int64_t steps = 0;
  std::vector<std::string> blocked;  // one sentence for every worker that waits in vain
};

namespace detail {

class ProgressSimulator {
 public:
  ProgressSimulator(const std::vector<RankProgram>& programs, const ProgressOptions& o) : o_(o) {
    for (const RankProgram& p : programs) {
      Rank r;
      r.program = &p;
      r.slots.assign(p.num_slots, false);
      r.published.assign(p.order.size(), false);
      r.unpublished.assign(o.shards.world, 0);
      if (o.owner_waits == OwnerWaits::kShard) {
        for (int64_t row = 0; row < p.order.tiles_m; ++row) {
          const Range owners = shards_of_tile_row(o.shards, row, o.tile.bm);
          for (int64_t s = owners.begin; s < owners.end; ++s)
            r.unpublished[s] += p.order.batch * p.order.tiles_n;
        }
      }
      ranks_.push_back(r);
    }
  }

  ProgressReport run() {
    ProgressReport report;
    for (bool stepped = true; stepped;) {
      stepped = false;
      for (int64_t r = 0; r < world(); ++r) stepped |= step_rank(r, &report.steps);
    }
    report.finished = true;
    for (int64_t r = 0; r < world(); ++r) {
      const Rank& rank = ranks_[r];
      for (const Active& a : rank.active) report.blocked.push_back(describe(r, a));
      report.finished &= rank.active.empty() && rank.next_ticket == num_workers(rank);
    }
    return report;
  }

 private:
  struct Active {
    int64_t worker = 0;
    size_t segment = 0;
    bool published = false;         // of the current segment's tile
    std::vector<int64_t> deferred;  // positions of straddlers still to be reduced
    std::string wait;
  };

  struct Rank {
    const RankProgram* program = nullptr;
    std::vector<bool> slots;
    std::vector<bool> published;       // by tile, rows of tiles within batches
    std::vector<int64_t> unpublished;  // tiles still missing, by owner
    std::vector<Active> active;
    int64_t next_ticket = 0;
    int64_t comm_done = 0;
  };

  int64_t world() const { return static_cast<int64_t>(ranks_.size()); }
  static int64_t num_workers(const Rank& r) { return static_cast<int64_t>(r.program->workers.size()); }

  static std::string describe(int64_t r, const Active& a) {
    return "rank " + std::to_string(r) + " worker " + std::to_string(a.worker) + " waits for " + a.wait;
  }

  bool step_rank(int64_t r, int64_t* steps) {
    Rank& rank = ranks_[r];
    bool stepped = false;
    while (static_cast<int64_t>(rank.active.size()) < o_.resident && rank.next_ticket < num_workers(rank)) {
      if (rank.next_ticket < o_.comm_workers) ++rank.comm_done;
      Active a;
      a.worker = rank.next_ticket++;
      rank.active.push_back(a);
      stepped = true;
    }
    for (size_t i = 0; i < rank.active.size();) {
      Active& a = rank.active[i];
      while (step_worker(r, a)) {
        ++*steps;
        stepped = true;
      }
      if (a.wait.empty()) {
        rank.active.erase(rank.active.begin() + i);
        stepped = true;
      } else {
        ++i;
      }
    }
    return stepped;
  }

  // One segment further. False: the worker is done (no wait left) or blocked (a.wait says on what).
  bool step_worker(int64_t r, Active& a) {
    Rank& rank = ranks_[r];
    a.wait.clear();
    const std::vector<Segment>& segments = rank.program->workers[a.worker];
    if (a.segment == segments.size()) {
      while (!a.deferred.empty()) {
        if (!remote_ready(r, a.deferred.back(), &a.wait)) return false;
        a.deferred.pop_back();
      }
      return false;
    }
    const Segment& s = segments[a.segment];
    if (!arrived(r, s, &a.wait)) return false;
    if (s.slot >= 0) {
      rank.slots[s.slot] = true;
    } else {
      for (int64_t slot = s.first_slot; slot < s.end_slot; ++slot) {
        if (!rank.slots[slot]) {
          a.wait = "partial slot " + std::to_string(slot) + " of position " + std::to_string(s.position);
          return false;
        }
      }
      if (!finish_tile(r, s, a)) return false;
    }
    ++a.segment;
    a.published = false;
    return true;
  }

  bool arrived(int64_t r, const Segment& s, std::string* wait) const {
    if (o_.comm_workers == 0) return true;
    const TileCoord c = ranks_[r].program->order.at(s.position);
    const Range shards = shards_of_tile_row(o_.shards, c.m, o_.tile.bm);
    for (int64_t shard = shards.begin; shard < shards.end; ++shard) {
      const bool empty = o_.shards.begin[shard] == o_.shards.begin[shard + 1];
      if (shard == r || empty ||
          ranks_[shard].comm_done >= min64(o_.comm_workers, num_workers(ranks_[shard]))) {
        continue;
      }
      *wait = "the shard of rank " + std::to_string(shard);
      return false;
    }
    return true;
  }

  bool finish_tile(int64_t r, const Segment& s, Active& a) {
    if (o_.owner_waits == OwnerWaits::kNone) return true;
    Rank& rank = ranks_[r];
    const TileCoord c = rank.program->order.at(s.position);
    const Range owners = shards_of_tile_row(o_.shards, c.m, o_.tile.bm);
    if (!a.published) {
      a.published = true;
      rank.published[tile_id(rank, c)] = true;
      for (int64_t owner = owners.begin; owner < owners.end; ++owner) --rank.unpublished[owner];
    }
    const bool mine = owners.begin <= r && r < owners.end && o_.shards.begin[r] < o_.shards.begin[r + 1];
    if (!mine) return true;
    if (owners.end - owners.begin > 1 && o_.defer_straddlers) {
      a.deferred.push_back(s.position);
      return true;
    }
    return remote_ready(r, s.position, &a.wait);
  }

  bool remote_ready(int64_t r, int64_t position, std::string* wait) const {
    const TileCoord c = ranks_[r].program->order.at(position);
    for (int64_t peer = 0; peer < world(); ++peer) {
      const Rank& p = ranks_[peer];
      const bool ready =
          o_.owner_waits == OwnerWaits::kTile ? p.published[tile_id(p, c)] : p.unpublished[r] == 0;
      if (peer == r || ready) continue;
      *wait = "the partial of rank " + std::to_string(peer) + " for position " + std::to_string(position);
      return false;
    }
    return true;
  }

  static int64_t tile_id(const Rank& r, const TileCoord& c) {
    return (c.batch * r.program->order.tiles_m + c.m) * r.program->order.tiles_n + c.n;
  }

  const ProgressOptions& o_;
  std::vector<Rank> ranks_;
};

// Programs may be written by hand: what they name must exist.
inline void check_program(const RankProgram& p) {
  require(p.num_slots >= 0, "num_slots must not be negative, but it is " + std::to_string(p.num_slots) + ".");
  for (const std::vector<Segment>& segments : p.workers) {
    for (const Segment& s : segments) {
      require(s.position >= 0 && s.position < p.order.size(), [&] {
        return "positions must lie in [0, " + std::to_string(p.order.size()) + "), but one is " +
               std::to_string(s.position) + ".";
      });
      const bool waits = s.first_slot != -1 || s.end_slot != -1;
      require(s.slot >= -1 && s.slot < p.num_slots &&
                  (!waits || (s.first_slot >= 0 && s.first_slot <= s.end_slot && s.end_slot <= p.num_slots)),
              [&] {
                return "slots must lie in [0, " + std::to_string(p.num_slots) + "), but position " +
                       std::to_string(s.position) + " has slot " + std::to_string(s.slot) +
                       " and waits for [" + std::to_string(s.first_slot) + ", " + std::to_string(s.end_slot) +
                       ").";
              });
    }
  }
}

}  // namespace detail

// Runs the programs of all ranks together; programs.size() is the world.
inline ProgressReport simulate_progress(const std::vector<RankProgram>& programs, const ProgressOptions& o) {
  const bool remote = o.comm_workers > 0 || o.owner_waits != OwnerWaits::kNone;
  if (remote && static_cast<int64_t>(programs.size()) != o.shards.world) {
    throw std::invalid_argument("shards must name one shard for each of the " +
                                std::to_string(programs.size()) + " ranks, but it names " +
                                std::to_string(o.shards.world) + ".");
  }
  if (o.resident < 1) {
    throw std::invalid_argument("resident must be at least 1, but it is " + std::to_string(o.resident) + ".");
  }
  for (const RankProgram& p : programs) {
    detail::check_program(p);
    const TileOrder& first = programs[0].order;
    const bool alike =
        p.order.tiles_m == first.tiles_m && p.order.tiles_n == first.tiles_n && p.order.batch == first.batch;
    detail::require(!remote || alike, "programs must have orders of the same tiles, but they differ.");
  }
  return detail::ProgressSimulator(programs, o).run();
}

}  // namespace tpk

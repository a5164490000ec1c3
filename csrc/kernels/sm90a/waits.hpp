// What a schedule loses by waiting for rows: its workers, walked along their segments with the times of
// cost.hpp. A segment begins when its worker is free and the rows of its tile are there; who finishes a tile
// also waits for the partials of the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "kernels/sm90a/arrival.hpp"

namespace tpk::sm90a {

struct StepCost {
  double iter[kMaxPieces] = {};  // us, by piece
  double epilogue = 0;
  double publish = 0;   // writing a partial
  double add = 0;       // adding one
  double exchange = 0;  // divided fix-up: writing a partial and adding and storing a share of all
};

inline StepCost step_cost(const Problem& p, const Schedule& s, TileId tile, ClusterShape cluster,
                          int64_t running, const Demands& demands, const HopperCost& c) {
  const auto [iter, epilogue, part] = work_cost(p, tile, cluster, demands, c);
  const bool starves = !fits_l2(p, c, element_bytes(tile));
  StepCost out;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const bool streamed = s.pieces[i].kind == PieceKind::kStreamed;
    out.iter[i] = iter + (streamed && starves ? starved_iter_us(s.pieces[i], tile, cluster, iter, c) : 0);
  }
  const int64_t shares = s.workers <= running ? divided_shares(s) : 0;
  out.epilogue = epilogue;
  out.publish = c.publish_us * part;
  out.add = c.add_us * part;
  out.exchange = shares > 0 ? c.exchange_us * part + epilogue / static_cast<double>(shares) : 0;
  return out;
}

class WorkerWalk {
 public:
  WorkerWalk(const Schedule& s, const StepCost& cost, const TileArrivals& arrivals, int64_t running)
      : s_(s),
        cost_(cost),
        arrivals_(arrivals),
        running_(running),
        shares_(s.workers <= running ? divided_shares(s) : 0),
        written_(static_cast<size_t>(s.num_slots)),
        begins_(static_cast<size_t>(s.num_slots)) {}

  // Tickets in order: who waits for a partial waits for a lower one, which has been walked.
  double run() {
    std::priority_queue<double, std::vector<double>, std::greater<>> ends;
    double last = 0;
    for (int64_t w = 0; w < s_.workers; ++w) {
      now_ = 0;
      if (w >= running_) {  // in the place of the first that is done
        now_ = ends.top();
        ends.pop();
      }
      walk(w);
      last = std::max(last, now_);
      if (s_.workers > running_) ends.push(now_);
    }
    return std::max(last, end_of_divided());
  }

 private:
  void walk(int64_t worker) {
    int64_t slots = 0;
    for (int64_t i = 0; i < s_.num_pieces; ++i) {
      const Piece& p = s_.pieces[i];
      if (p.kind == PieceKind::kWaves) {
        waves(p, worker, cost_.iter[i]);
        continue;
      }
      const int64_t share = worker - p.first_worker;
      if (share >= 0 && share < p.workers) streamed(p, i, share, slots);
      slots += p.workers;
    }
  }

  void waves(const Piece& p, int64_t worker, double iter) {
    const double tile = static_cast<double>(s_.k_iters) * iter + cost_.epilogue;
    for (int64_t i = worker; i < p.num_tiles; i += s_.workers) {
      if (now_ >= arrivals_.last) {  // no more waits
        now_ += static_cast<double>((p.num_tiles - 1 - i) / s_.workers + 1) * tile;
        return;
      }
      now_ = std::max(now_, arrivals_.of(p.first_tile + i)) + tile;
    }
  }

  void streamed(const Piece& p, int64_t piece, int64_t share, int64_t slots) {
    const int64_t begin = next_begin_[piece];
    int64_t at = next_begin_[piece] = share_begin(s_, p, share + 1);
    begins_[slots + share] = begin;
    while (at > begin) {
      const int64_t tile = (at - 1) / s_.k_iters;
      const int64_t tile_begin = tile * s_.k_iters;
      const int64_t from = std::max(begin, tile_begin);
      now_ = std::max(now_, arrivals_.of(p.first_tile + tile)) +
             static_cast<double>(at - from) * cost_.iter[piece];
      const bool finishes = at == tile_begin + s_.k_iters;
      if (shares_ > 0) {
        written_[slots + share] = now_;  // its last: see divided_shares
      } else if (!finishes) {
        written_[slots + share] = now_ += cost_.publish;
      } else {
        if (from > tile_begin) add_partials(slots, share, tile_begin);
        now_ += cost_.epilogue;
      }
      at = from;
    }
  }

  void add_partials(int64_t slots, int64_t share, int64_t tile_begin) {
    int64_t first = slots + share;
    do {
      now_ = std::max(now_, written_[--first]);
    } while (begins_[first] > tile_begin);
    now_ += static_cast<double>(slots + share - first) * cost_.add;
  }

  // The workers of a tile end it together.
  double end_of_divided() const {
    double last = 0;
    for (const double at : written_) last = std::max(last, at);
    return shares_ > 0 ? last + cost_.exchange : 0;
  }

  const Schedule& s_;
  const StepCost& cost_;
  const TileArrivals& arrivals_;
  int64_t running_;
  int64_t shares_;
  std::vector<double> written_;          // by slot: when a partial is there
  std::vector<int64_t> begins_;          // by slot: first iteration of the share
  int64_t next_begin_[kMaxPieces] = {};  // by piece: of the share of the next worker
  double now_ = 0;
};

// From when the first worker begins until the last ends, us.
inline double simulate_us(const Schedule& s, const StepCost& cost, const TileArrivals& arrivals,
                          int64_t running) {
  return WorkerWalk(s, cost, arrivals, running).run();
}

}  // namespace tpk::sm90a

// Plans: tile, schedule and order of one product on one machine. Pure functions, so a plan is the same on
// every call, and what a kernel computes is bitwise the same with it.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/check.hpp"
#include "host/cost_model.hpp"
#include "host/schedule_builder.hpp"
#include "host/tile_order.hpp"

namespace tpk {

struct Machine {
  int64_t multiprocessors = 1;  // or cores: workers that run at once
  CostConstants cost;
  int64_t min_iters = ScheduleOptions{}.min_iters;
};

// "128x64x32": bm, bn, bk.
inline std::string name(const TileShape& t) {
  return std::to_string(t.bm) + "x" + std::to_string(t.bn) + "x" + std::to_string(t.bk);
}

// Those of tiles that text allows: all for "", else the one of that name. Throws std::invalid_argument with a
// sentence where there is none.
inline std::span<const TileShape> tiles_named(std::string_view text, std::span<const TileShape> tiles) {
  if (text.empty()) return tiles;
  std::string names;
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (text == name(tiles[i])) return tiles.subspan(i, 1);
    names += (i == 0 ? "" : i + 1 < tiles.size() ? ", " : " or ") + name(tiles[i]);
  }
  throw std::invalid_argument("tile must be " + names + ", or empty for the cheapest, but it is '" +
                              std::string(text) + "'.");
}

struct Plan {
  TileShape tile;
  ScheduleKind kind = ScheduleKind::kDataParallel;
  int64_t splits = 1;  // of every tile, by split_k
  Schedule schedule;
  TileOrder order;
  double predicted_us = 0;
};

// The plan that the arguments name. options.workers is taken as the number that run at once.
inline Plan make_plan(const Problem& p, const TileShape& t, ScheduleKind kind, const ScheduleOptions& o,
                      const CostConstants& cost) {
  detail::check_extent("k", p.k, 0);
  detail::check_extent("bk", t.bk, 1);
  Plan plan;
  plan.tile = t;
  plan.kind = kind;
  plan.order = make_tile_order(p, t);
  plan.schedule = make_schedule(kind, plan.order.size(), iters_per_tile(p, t), o);
  // What K allows, which may be less than asked for.
  const bool is_split = kind == ScheduleKind::kSplitK && plan.schedule.num_slots > 0;
  plan.splits = is_split ? plan.schedule.workers / plan.order.size() : 1;
  plan.predicted_us = predict_us(plan.schedule, t, cost, o.workers);
  return plan;
}

// The cheapest plan by the cost model ("auto"). Among equals the simplest kind and the first candidate win.
// Kinds that matter only for communication are left out: without it they cost what hybrid_first does.
inline Plan choose_plan(const Problem& p, const Machine& machine, std::span<const TileShape> candidates) {
  detail::require(!candidates.empty(), "candidates must name at least one tile shape, but it is empty.");
  Plan best;
  bool found = false;
  const auto consider = [&](const TileShape& t, ScheduleKind kind, int64_t splits) {
    ScheduleOptions o;
    o.workers = machine.multiprocessors;
    o.splits = splits;
    o.min_iters = machine.min_iters;
    const Plan plan = make_plan(p, t, kind, o, machine.cost);
    if (!found || plan.predicted_us < best.predicted_us) best = plan;
    found = true;
  };
  for (const TileShape& t : candidates) {
    consider(t, ScheduleKind::kDataParallel, 1);
    consider(t, ScheduleKind::kHybridFirst, 1);
    consider(t, ScheduleKind::kStreamK, 1);
    // Splitting pays where even a few splits a tile leave multiprocessors idle; the partials of more tiles
    // than that would only fill memory.
    const int64_t tiles = num_tiles(p, t);
    if (tiles == 0 || tiles > machine.multiprocessors) continue;
    for (int64_t splits = 2; splits <= 2 * ceil_div(machine.multiprocessors, tiles) && splits <= 64;
         ++splits) {
      consider(t, ScheduleKind::kSplitK, splits);
    }
  }
  return best;
}

}  // namespace tpk

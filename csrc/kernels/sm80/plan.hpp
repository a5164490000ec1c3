// Plans of the portable kernel: which tile, schedule and number of workers a product gets. Pure functions, so
// that the launcher, explain() and tests agree without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/plan.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/cost_in_use.hpp"

namespace tpk::sm80 {

struct GemmPlan {
  Plan plan;
  int tile = 0;  // its place in tile_shapes(element)
};

// CTAs that a multiprocessor holds, by tile; 0: it has too little shared memory.
struct Residency {
  using OfTiles = std::array<int64_t, kMostTiles>;
  OfTiles of_tile{};
};

// What the vector kernels are compiled for.
inline Residency full_residency(Element e) {
  Residency r;
  const auto facts = tile_facts(e);
  for (size_t i = 0; i < facts.size(); ++i) r.of_tile[i] = facts[i].resident;
  return r;
}

// "128x128x16 or 64x64x16".
inline std::string tile_names(Element e) {
  std::string names;
  const auto shapes = tile_shapes(e);
  for (size_t i = 0; i < shapes.size(); ++i)
    names += (i == 0 ? "" : i + 1 < shapes.size() ? ", " : " or ") + name(shapes[i]);
  return names;
}

// The time of a schedule of tiles `tile`, of which a multiprocessor holds `resident`.
inline double predict_us(const Problem& p, Element element, int tile, const Schedule& s,
                         const PortableCost& cost, int64_t multiprocessors, int64_t resident) {
  return std::max(predict_us(s, cost.tile(element, tile), cost.machine, multiprocessors, resident),
                  memory_us(p, element, cost.machine));
}

// schedule: a name of host/schedule_builder.hpp or "auto". workers: CTAs, 0 for as many as fit. tile: a name
// such as "128x128x32", "" for the cheapest that the device can hold. Throws std::invalid_argument with a
// sentence where an argument makes no sense.
inline GemmPlan plan_gemm(const Problem& p, Element element, Generation generation, int64_t multiprocessors,
                          std::string_view schedule, int64_t workers, int64_t splits, std::string_view tile,
                          const Residency& residency) {
  tpk::detail::check_extent("k", p.k, 0);
  GemmPlan best;
  bool found = false;
  const PortableCost& cost = cost_in_use(generation).get();
  const std::span<const TileShape> shapes = tile_shapes(element);
  for (const TileShape& shape : tiles_named(tile, shapes)) {
    const auto id = static_cast<int>(&shape - shapes.data());
    const int64_t most = residency.of_tile[static_cast<size_t>(id)];
    if (most <= 0) continue;
    const TileOrder order = make_tile_order(p, shape);
    const int64_t tiles = order.size();
    const int64_t k_iters = iters_per_tile(p, shape);
    const auto consider = [&](ScheduleKind kind, int64_t of_workers, int64_t of_splits) {
      ScheduleOptions o;
      o.workers = of_workers;
      o.splits = of_splits;
      const Schedule made = make_schedule(kind, tiles, k_iters, o);
      const double us = predict_us(p, element, id, made, cost, multiprocessors, most);
      if (found && us >= best.plan.predicted_us) return;
      found = true;
      // What K allows, which may be fewer splits than asked for.
      const bool is_split = kind == ScheduleKind::kSplitK && made.num_slots > 0;
      best = {{shape, kind, is_split ? made.workers / tiles : 1, made, order, us}, id};
    };
    if (schedule != "auto") {
      consider(parse_schedule_kind(schedule), workers > 0 ? workers : multiprocessors * most, splits);
      continue;
    }
    // Whole tiles; else the remainder of waves of one, two, ... CTAs a multiprocessor is cut, or, where there
    // is less than a wave, every tile. Cutting every tile of more (stream_k) is predicted to take as long as
    // hybrid_first, and takes 2 to 3 % longer (702 float64 plans of two waves and more on an H200), up to 10
    // in products of milliseconds: CTAs that stand all over K share less in L2.
    consider(ScheduleKind::kDataParallel, workers > 0 ? workers : multiprocessors * most, 1);
    for (int64_t r = 1; r <= (workers > 0 ? 1 : most); ++r) {
      const int64_t at_once = workers > 0 ? workers : multiprocessors * r;
      if (tiles % at_once == 0) continue;
      if (tiles > at_once) {
        consider(ScheduleKind::kHybridFirst, at_once, 1);
        consider(ScheduleKind::kHybridAligned, at_once, 1);
      } else {
        consider(ScheduleKind::kStreamK, at_once, 1);
      }
      if (tiles <= at_once / 2) consider(ScheduleKind::kSplitK, at_once, at_once / tiles);
    }
  }
  if (!found) {
    throw std::invalid_argument("tile " + std::string(tile) +
                                " needs more shared memory than the device has: leave tile empty.");
  }
  return best;
}

}  // namespace tpk::sm80

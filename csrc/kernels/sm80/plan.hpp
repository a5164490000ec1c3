// Plans of the portable kernel: which tile, schedule and number of workers a product gets. Pure functions, so
// that the launcher, explain() and tests agree without a GPU.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/plan.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/cost.hpp"

namespace tpk::sm80 {

struct GemmPlan {
  Plan plan;
  int tile = 0;  // its place in tile_shapes(element)
};

// CTAs that a multiprocessor holds, by tile; 0: it has too little shared memory.
struct Residency {
  int64_t of_tile[kMostTiles] = {};
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

// schedule: a name of host/schedule_builder.hpp or "auto". workers: tickets that run at once, 0 for as many
// as fit. tile: a name such as "128x128x32", "" for the cheapest that the device can hold. Throws
// std::invalid_argument with a sentence where an argument makes no sense.
inline GemmPlan plan_gemm(const Problem& p, Element element, Generation generation, int64_t multiprocessors,
                          std::string_view schedule, int64_t workers, int64_t splits, std::string_view tile,
                          const Residency& residency) {
  GemmPlan best;
  bool found = false;
  const std::span<const TileShape> shapes = tile_shapes(element);
  for (const TileShape& shape : tiles_named(tile, shapes)) {
    const auto id = static_cast<int>(&shape - shapes.data());
    const int64_t most = residency.of_tile[id];
    // A named schedule fills the multiprocessors unless it is told how many workers to use.
    for (int64_t resident = schedule == "auto" ? 1 : max64(1, most); resident <= most; ++resident) {
      Machine machine;
      machine.multiprocessors = workers > 0 ? workers : multiprocessors * resident;
      machine.cost = cost_of(element, id, generation, resident);
      GemmPlan candidate;
      candidate.tile = id;
      if (schedule == "auto") {
        candidate.plan = choose_plan(p, machine, std::span(&shape, 1));
      } else {
        ScheduleOptions o;
        o.workers = machine.multiprocessors;
        o.splits = splits;
        candidate.plan = make_plan(p, shape, parse_schedule_kind(schedule), o, machine.cost);
      }
      if (!found || candidate.plan.predicted_us < best.plan.predicted_us) best = candidate;
      found = true;
    }
  }
  if (!found) {
    throw std::invalid_argument("tile " + std::string(tile) +
                                " needs more shared memory than the device has: leave tile empty.");
  }
  return best;
}

}  // namespace tpk::sm80

// Plans of the portable kernel: which tile, schedule and number of workers a product gets. Pure functions, so
// that the launcher, explain() and tests agree without a GPU.
#pragma once

#include <span>
#include <string_view>

#include "host/plan.hpp"
#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

struct GemmPlan {
  Plan plan;
  TileId tile = TileId::k128x128;
};

// CTAs that a multiprocessor holds, by tile: what the launcher asked the device for, or what the vector
// kernels are compiled for.
struct Residency {
  int64_t k128x128 = Tile128x128::kMinCtas;
  int64_t k64x64 = Tile64x64::kMinCtas;

  int64_t of(TileId id) const { return id == TileId::k128x128 ? k128x128 : k64x64; }
};

namespace detail {

// CTAs that share a multiprocessor share its tensor cores and bandwidth; a CTA alone cannot keep them busy.
// The second is a guess, to be refitted together with host/cost_model.hpp.
inline CostConstants shared_cost(CostConstants c, int64_t resident) {
  const double slower = resident == 1 ? 1.25 : static_cast<double>(resident);
  c.mac_us *= slower;
  c.load_us *= slower;
  c.epilogue_elem_us *= slower;
  c.partial_elem_us *= slower;
  return c;
}

}  // namespace detail

// schedule: a name of host/schedule_builder.hpp or "auto". workers: tickets that run at once, 0 for as many
// as fit. tile: a name such as "128x128x32", "" for the cheapest. Throws std::invalid_argument with a
// sentence where an argument makes no sense.
inline GemmPlan plan_gemm(const Problem& p, int64_t multiprocessors, const CostConstants& cost,
                          std::string_view schedule, int64_t workers, int64_t splits,
                          std::string_view tile = {}, const Residency& residency = {}) {
  GemmPlan best;
  bool found = false;
  for (const TileShape& shape : tiles_named(tile, kTileShapes)) {
    const auto id = static_cast<TileId>(&shape - kTileShapes);
    const int64_t most = residency.of(id);
    for (const int64_t resident : {int64_t{1}, most}) {
      // A named schedule fills the multiprocessors unless it is told how many workers to use.
      if (schedule != "auto" && resident != most) continue;
      Machine machine;
      machine.multiprocessors = workers > 0 ? workers : multiprocessors * resident;
      machine.cost = detail::shared_cost(cost, resident);
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
  return best;
}

}  // namespace tpk::sm80

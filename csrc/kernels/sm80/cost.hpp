// What the portable kernel's work costs, by element and tile: see host/cost_model.hpp for how it is put
// together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/cost_model.hpp"
#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

enum class Generation : int32_t { kAmpere, kHopper };

inline Generation generation_of(int compute_capability_major) {
  return compute_capability_major >= 9 ? Generation::kHopper : Generation::kAmpere;
}

// Microseconds.
struct TileCost {
  double alone;     // one iteration of a CTA that has a multiprocessor to itself
  double share;     // of a multiprocessor's time, where CTAs fill it: r of them take max(alone, r * share)
  double epilogue;  // one tile
  double partial;   // a partial tile written, or waited for and added
};

// Fitted by hand to one run on an H200 (squares 128 to 8192, data-parallel, split-K and hybrid with each
// tile): the times that decide between those agree within some 5 %. Not fitted: more than a few CTAs a tile.
constexpr double kLaunchUs = 4.1;  // launch, and the first stages
// What plans cost whose CTAs wait for each other: words are cleared in front of the launch, tickets are
// drawn, and segments are looked for in the schedule.
constexpr double kClearUs = 6.2;

// In the order of TilesOf<>.
constexpr TileCost kHalfHopper[] = {
    {0.62, 0.62, 4.8, 2.5}, {0.42, 0.335, 3.6, 1.5}, {0.156, 0.108, 0.8, 0.6}};
constexpr TileCost kTf32Hopper[] = {{0.67, 0.67, 4.8, 2.5}, {0.215, 0.13, 0.8, 0.6}};
constexpr TileCost kFp32Hopper[] = {{1.67, 1.67, 5.0, 1.5}, {0.525, 0.44, 0.8, 0.6}};
constexpr TileCost kFp64Hopper[] = {{1.10, 1.10, 5.6, 2.5}, {0.40, 0.325, 1.0, 0.8}};

inline const TileCost& tile_cost(Element e, int tile) {
  switch (e) {
    case Element::kTf32:
      return kTf32Hopper[tile];
    case Element::kFp32:
      return kFp32Hopper[tile];
    case Element::kFp64:
      return kFp64Hopper[tile];
    default:
      return kHalfHopper[tile];
  }
}

// An A100's multiprocessor against an H200's, by their peaks: an estimate.
constexpr double ampere_slower(Element e) { return e == Element::kFp64 || e == Element::kFp32 ? 2.8 : 1.25; }

// resident: CTAs that share a multiprocessor.
inline CostConstants cost_of(Element e, int tile, Generation g, int64_t resident) {
  const TileCost& t = tile_cost(e, tile);
  const double slower = g == Generation::kAmpere ? ampere_slower(e) : 1.0;
  CostConstants c;
  c.launch_us = kLaunchUs;
  c.clear_us = kClearUs;
  c.iter_us = slower * std::max(t.alone, static_cast<double>(resident) * t.share);
  c.epilogue_us = t.epilogue;
  c.partial_us = t.partial;
  return c;
}

}  // namespace tpk::sm80

// What the portable kernel's work costs, by element and tile: see host/cost_model.hpp for how it is put
// together.
#pragma once

#include <cstdint>

#include "host/cost_model.hpp"
#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

enum class Generation : int32_t { kAmpere, kHopper };

inline Generation generation_of(int compute_capability_major) {
  return compute_capability_major >= 9 ? Generation::kHopper : Generation::kAmpere;
}

// Microseconds of one CTA while the whole device works.
struct TileCost {
  double alone;     // one iteration, with a multiprocessor to itself
  double together;  // with as many beside it as fit
  double epilogue;  // one tile
  double partial;   // a partial tile written, or waited for and added
};

constexpr double kLaunchUs = 3.0;  // launch, and the first stages
constexpr double kClearUs = 1.5;   // what is cleared in front of a launch whose CTAs wait for each other

// In the order of TilesOf<>. PLACEHOLDER.
constexpr TileCost kHalfHopper[] = {{0.60, 0.60, 3.0, 3.5}, {0.37, 0.70, 2.0, 2.5}, {0.15, 0.40, 1.0, 1.0}};
constexpr TileCost kTf32Hopper[] = {{0.60, 0.60, 3.0, 3.5}, {0.15, 0.40, 1.0, 1.0}};
constexpr TileCost kFp32Hopper[] = {{1.40, 1.40, 3.0, 3.0}, {0.40, 1.20, 1.0, 1.0}};
constexpr TileCost kFp64Hopper[] = {{1.15, 1.15, 3.0, 3.5}, {0.35, 0.90, 1.0, 1.0}};

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

// An A100 over an H200 by multiprocessor, by what the two are said to reach.
inline double ampere_slower(Element e) {
  return e == Element::kFp64 ? 2.8 : e == Element::kFp32 ? 2.8 : 1.5;
}

inline CostConstants cost_of(Element e, int tile, Generation g, bool shared) {
  const TileCost& t = tile_cost(e, tile);
  const double slower = g == Generation::kAmpere ? ampere_slower(e) : 1.0;
  CostConstants c;
  c.launch_us = kLaunchUs;
  c.clear_us = kClearUs;
  c.iter_us = slower * (shared ? t.together : t.alone);
  c.epilogue_us = t.epilogue;
  c.partial_us = t.partial;
  return c;
}

}  // namespace tpk::sm80

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

constexpr double kLaunchUs = 3.0;  // launch, and the first stages
constexpr double kClearUs = 1.5;   // what is cleared in front of a launch whose CTAs wait for each other

// In the order of TilesOf<>. PLACEHOLDER.
constexpr TileCost kHalfHopper[] = {{0.62, 0.62, 3.5, 4.0}, {0.36, 0.33, 2.0, 2.5}, {0.16, 0.11, 1.0, 1.2}};
constexpr TileCost kTf32Hopper[] = {{0.90, 0.90, 3.5, 4.0}, {0.22, 0.17, 1.0, 1.2}};
constexpr TileCost kFp32Hopper[] = {{1.60, 1.60, 3.0, 3.0}, {0.60, 0.45, 1.0, 1.2}};
constexpr TileCost kFp64Hopper[] = {{1.08, 1.08, 3.0, 3.5}, {0.36, 0.31, 1.0, 1.2}};

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

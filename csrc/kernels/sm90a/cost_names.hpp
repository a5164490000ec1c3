// Names of the Hopper cost model's constants, for those who fit them.
#pragma once

#include <iterator>
#include <string>

#include "host/plan.hpp"
#include "kernels/sm90a/cost.hpp"

namespace tpk::sm90a {

inline constexpr struct {
  const char* name;
  double HopperCost::* field;
} kCostScalars[] = {
    {"launch_us", &HopperCost::launch_us},
    {"split_launch_us", &HopperCost::split_launch_us},
    {"divided_us", &HopperCost::divided_us},
    {"exchange_us", &HopperCost::exchange_us},
    {"bytes_per_us", &HopperCost::bytes_per_us},
    {"overlap", &HopperCost::overlap},
    {"l2_bytes", &HopperCost::l2_bytes},
    {"publish_us", &HopperCost::publish_us},
    {"add_us", &HopperCost::add_us},
    {"finish_us", &HopperCost::finish_us},
    {"owner_us", &HopperCost::owner_us},
    {"addend_us", &HopperCost::addend_us},
    {"departing_split_us", &HopperCost::departing_split_us},
    {"outer_us", &HopperCost::outer_us},
};
static_assert(sizeof(HopperCost) ==
                  sizeof(double) *
                      (std::size(kCostScalars) + kNumWalkingTiles * kNumWalkingClusters + kNumWalkingTiles),
              "kCostScalars must name every number of HopperCost.");

// Every constant with its name: "launch_us", "iter_us 128x256x64/2x1", "epilogue_us 128x256x64".
template <class Cost, class Visit>
void visit_constants(Cost& cost, const Visit& visit) {
  for (const auto& scalar : kCostScalars) visit(scalar.name, cost.*scalar.field);
  for (int t = 0; t < kNumWalkingTiles; ++t) {
    const auto tile = static_cast<TileId>(t);
    visit("epilogue_us " + name(tile), cost.epilogue_us[t]);
    for (int c = 0; c < kNumWalkingClusters; ++c)
      visit("iter_us " + name(tile, kClusterShapes[c]), cost.iter_us[t][c]);
  }
}

}  // namespace tpk::sm90a

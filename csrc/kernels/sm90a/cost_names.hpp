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
    {"split_per_us", &HopperCost::split_per_us},
};
inline constexpr struct {
  const char* name;
  double OneTileCost::* field;
} kWholeCostScalars[] = {
    {"whole launch_us", &OneTileCost::launch_us},
    {"whole cluster_us", &OneTileCost::cluster_us},
    {"whole iteration_us", &OneTileCost::iteration_us},
    {"whole row_us", &OneTileCost::row_us},
    {"whole skew", &OneTileCost::skew},
    {"whole peak_us", &OneTileCost::peak_us},
    {"whole sustained_us", &OneTileCost::sustained_us},
    {"whole asked_per_us", &OneTileCost::asked_per_us},
    {"whole company", &OneTileCost::company},
    {"whole l2_per_us", &OneTileCost::l2_per_us},
    {"whole sent_per_us", &OneTileCost::sent_per_us},
    {"whole split_lines", &OneTileCost::split_lines},
    {"whole split_sectors", &OneTileCost::split_sectors},
    {"whole latency_us", &OneTileCost::latency_us},
    {"whole end_column_us", &OneTileCost::end_column_us},
    {"whole end_us", &OneTileCost::end_us},
    {"whole later_end_us", &OneTileCost::later_end_us},
    {"whole walk_end", &OneTileCost::walk_end},
    {"whole meet_us", &OneTileCost::meet_us},
    {"whole meet_unit_us", &OneTileCost::meet_unit_us},
    {"whole wave_us", &OneTileCost::wave_us},
    {"whole bytes_per_us", &OneTileCost::bytes_per_us},
    {"whole crowding", &OneTileCost::crowding},
    {"whole deep_eight", &OneTileCost::deep_eight},
};
static_assert(sizeof(OneTileCost) == sizeof(double) * std::size(kWholeCostScalars),
              "kWholeCostScalars must name every number of OneTileCost.");
static_assert(sizeof(HopperCost) ==
                  sizeof(double) * (std::size(kCostScalars) + kNumWalkingTiles * kNumWalkingClusters +
                                    kNumWalkingTiles) +
                      sizeof(OneTileCost),
              "kCostScalars must name every number of HopperCost.");

// Every constant with its name: "launch_us", "iter_us 128x256x64/2x1", "epilogue_us 128x256x64"; those of
// one_tile.cuh "whole launch_us".
template <class Cost, class Visit>
void visit_constants(Cost& cost, const Visit& visit) {
  for (const auto& scalar : kCostScalars) visit(scalar.name, cost.*scalar.field);
  for (int t = 0; t < kNumWalkingTiles; ++t) {
    const auto tile = static_cast<TileId>(t);
    visit("epilogue_us " + name(tile), cost.epilogue_us[t]);
    for (int c = 0; c < kNumWalkingClusters; ++c)
      visit("iter_us " + name(tile, kClusterShapes[c]), cost.iter_us[t][c]);
  }
  for (const auto& scalar : kWholeCostScalars) visit(scalar.name, cost.whole.*scalar.field);
}

}  // namespace tpk::sm90a

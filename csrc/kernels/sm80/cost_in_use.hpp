// Constants that plans of the portable kernel are made with, and their names, for those who fit them.
#pragma once

#include <iterator>
#include <string>

#include "host/cost_model.hpp"
#include "host/plan.hpp"
#include "kernels/sm80/cost.hpp"

namespace tpk::sm80 {

// Elements whose tiles cost alike have one row: the first is that of half precision.
inline constexpr struct {
  Element element;
  const char* name;  // as torch.ops.tpkernels.streamk_plan calls it, but for half precision
} kCostElements[] = {{Element::kBf16, "half"},
                     {Element::kTf32, "tf32"},
                     {Element::kFp32, "float32"},
                     {Element::kFp64, "float64"}};
constexpr int kNumCostElements = static_cast<int>(std::size(kCostElements));

constexpr int cost_row(Element e) {
  int row = kNumCostElements - 1;
  while (row > 0 && kCostElements[row].element != e) --row;
  return row;
}

struct PortableCost {
  MachineCost machine;
  TileCost tiles[kNumCostElements][kMostTiles];

  const TileCost& tile(Element e, int id) const { return tiles[cost_row(e)][id]; }
};

// What the package comes with.
inline PortableCost usual_cost(Generation g) {
  PortableCost cost{machine_cost(g), {}};
  for (int row = 0; row < kNumCostElements; ++row) {
    const Element e = kCostElements[row].element;
    for (size_t i = 0; i < tile_shapes(e).size(); ++i)
      cost.tiles[row][i] = tile_cost(e, static_cast<int>(i), g);
  }
  return cost;
}

// See CostInUse.
inline CostInUse<PortableCost>& cost_in_use(Generation g) {
  static const PortableCost usual[] = {usual_cost(Generation::kAmpere), usual_cost(Generation::kHopper)};
  static CostInUse<PortableCost> in_use[] = {CostInUse<PortableCost>(usual[0]),
                                             CostInUse<PortableCost>(usual[1])};
  return in_use[static_cast<int>(g)];
}

// Every constant with its name: "launch_us", "alone_us 128x256x32 half".
template <class Cost, class Visit>
void visit_constants(Cost& cost, const Visit& visit) {
  visit("launch_us", cost.machine.launch_us);
  visit("cut_us", cost.machine.cut_us);
  visit("bytes_per_us", cost.machine.bytes_per_us);
  for (int row = 0; row < kNumCostElements; ++row) {
    const auto shapes = tile_shapes(kCostElements[row].element);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const std::string of = " " + name(shapes[i]) + " " + kCostElements[row].name;
      auto& tile = cost.tiles[row][i];
      visit("alone_us" + of, tile.alone);
      visit("share_us" + of, tile.share);
      visit("epilogue_us" + of, tile.epilogue);
      visit("busy_us" + of, tile.busy);
      visit("partial_us" + of, tile.partial);
    }
  }
}
static_assert(sizeof(MachineCost) == 3 * sizeof(double) && sizeof(TileCost) == 5 * sizeof(double),
              "visit_constants must name every number.");

// What the constants of a generation are called: torch.ops.tpkernels.plan_cost.
inline const char* cost_name(Generation g) { return g == Generation::kAmpere ? "sm80" : "sm90-portable"; }

}  // namespace tpk::sm80

// Plans of the Hopper kernel over a grid of products, tiles and schedules: all iterations, every partial that
// is waited for, the cheapest first. tests/host has the property tests.
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/sm90a/plan.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;

// No finisher may wait for a slot that nobody writes.
void check_slots(const GemmPlan& plan, int64_t k, const std::string& context) {
  const Schedule& s = plan.plan.schedule;
  std::vector<char> written(static_cast<size_t>(s.num_slots), 0);
  std::vector<char> wanted(static_cast<size_t>(s.num_slots), 0);
  int64_t iterations = 0;
  for (int64_t w = 0; w < s.workers; ++w) {
    SegmentCursor cursor(s, w);
    Segment segment;
    while (cursor.next(&segment)) {
      iterations += segment.k_end - segment.k_begin;
      TPK_CHECK(segment.k_end > segment.k_begin, context);
      if (segment.slot >= 0) written.at(static_cast<size_t>(segment.slot))++;
      for (int64_t i = segment.first_slot; i < segment.end_slot; ++i) wanted.at(static_cast<size_t>(i))++;
    }
  }
  TPK_CHECK(written == wanted, context);
  TPK_CHECK(s.k_iters == max64(1, ceil_div(k, plan.plan.tile.bk)), context);
  TPK_CHECK(iterations == plan.plan.order.size() * s.k_iters, context);
}

void check_plans(const Problem& p, const std::string& schedule, int64_t splits, int64_t multiprocessors,
                 bool gated, Product product) {
  const std::string context = schedule + " m, n, k " + std::to_string(p.m) + " " + std::to_string(p.n) + " " +
                              std::to_string(p.k) + " on " + std::to_string(multiprocessors) + ", product " +
                              std::to_string(static_cast<int>(product));
  const Demands demands{gated, false, false, 1, product};
  const auto plans = candidates(p, schedule, 0, splits, "", demands, full_residency(multiprocessors));
  double before = 0;
  for (const GemmPlan& plan : plans) {
    ++cases;
    const std::string full = name(plan.tile, plan.cluster);
    const std::string here = context + " " + full;
    TPK_CHECK(is_tile_name(full), here);
    TPK_CHECK(is_scaled(plan.tile) == (product != Product::kHalf), here);
    TPK_CHECK(plan.plan.tile.bk * element_bytes(plan.tile) == kSwizzleBytes * plan.cluster.k, here);
    if (is_one_tile(plan.tile)) {
      TPK_CHECK(schedule == "auto" || schedule == "data_parallel", here);
      TPK_CHECK(plan.plan.schedule.workers == max64(1, plan.plan.order.size()), here);
    }
    TPK_CHECK(plan.plan.predicted_us >= before, here);
    before = plan.plan.predicted_us;
    TPK_CHECK(plan.cluster.size() <= multiprocessors, here);
    TPK_CHECK(!gated || takes_gate(plan.tile), here);
    const TileShape whole = cluster_tile(plan.tile, plan.cluster);
    TPK_CHECK(plan.plan.tile.bm == whole.bm && plan.plan.tile.bn == (gated ? whole.bn / 2 : whole.bn), here);
    check_slots(plan, p.k, here);
    const GemmPlan named = plan_gemm(p, schedule, 0, splits, full, demands, full_residency(multiprocessors));
    TPK_CHECK(name(named.tile, named.cluster) == full, here);
    TPK_CHECK(named.plan.predicted_us == plan.plan.predicted_us, here);
  }
}

}  // namespace

int main() {
  std::vector<std::string> schedules{"auto"};
  for (int i = 0; i < kNumScheduleKinds; ++i) schedules.emplace_back(name(static_cast<ScheduleKind>(i)));
  for (const int64_t m : {0, 1, 129, 1000}) {
    for (const int64_t n : {1, 384, 2050}) {
      for (const int64_t k : {0, 1, 500, 5000}) {
        for (const int64_t multiprocessors : {1, 2, 60, 132}) {
          for (const std::string& schedule : schedules) {
            const int64_t splits = 1 + (m + n + k) % 5;
            check_plans({m, n, k, 1 + k % 2}, schedule, splits, multiprocessors, n == 384, Product::kHalf);
            const auto product = static_cast<Product>(1 + splits % kNumScaledProducts);
            check_plans({m, n, k, 1}, schedule, splits, multiprocessors, false, product);
          }
        }
      }
    }
  }
  return tpk::test::result("sm90a plans", cases);
}

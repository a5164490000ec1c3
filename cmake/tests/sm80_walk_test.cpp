// The portable kernel's short way to its work (kernels/sm80/walk.hpp) against the long one: every step of
// every worker of random plans, tiles at random positions, and division at the ends of its range.
#include "kernels/sm80/walk.hpp"

#include <random>

#include "check.hpp"
#include "host/plan.hpp"

using namespace tpk;
using namespace tpk::sm80;

namespace {

long long cases = 0;
std::mt19937_64 random_numbers(std::random_device{}());

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_numbers);
}

// Small and large numbers alike.
int64_t of_any_size(int64_t high) {
  const double log =
      std::uniform_real_distribution<double>(0.0, std::log2(static_cast<double>(high)))(random_numbers);
  return std::min(high, static_cast<int64_t>(std::exp2(log)));
}

template <class Unsigned>
void check_division() {
  constexpr Unsigned kMost = ~Unsigned{0} / 2;
  const auto check_one = [](Unsigned x, Unsigned by) {
    ++cases;
    const std::string context = std::to_string(x) + " / " + std::to_string(by);
    const auto got = Divisor<Unsigned>(by).divide(x);
    TPK_CHECK(got.quotient == x / by && got.remainder == x % by, context);
  };
  for (int i = 0; i < 20000; ++i) {
    const auto by = static_cast<Unsigned>(of_any_size(static_cast<int64_t>(kMost)));
    const auto x = static_cast<Unsigned>(between(0, static_cast<int64_t>(kMost)));
    check_one(x, by);
    check_one(x / by * by, by);
    if (x >= by) check_one(x / by * by - 1, by);
  }
  for (const Unsigned by : {Unsigned{1}, Unsigned{2}, Unsigned{3}, kMost / 2, kMost - 1, kMost}) {
    for (const Unsigned x : {Unsigned{0}, Unsigned{1}, by - 1, by, kMost - 1, kMost}) check_one(x, by);
  }
}

void check_tile(const Walk& walk, const TileOrder& order, int64_t position, const std::string& context) {
  const TileCoord got = walk.tile_at(static_cast<int32_t>(position));
  const TileCoord want = order.at(position);
  TPK_CHECK(got.batch == want.batch && got.m == want.m && got.n == want.n, context);
}

void check_worker(const Walk& walk, const Schedule& schedule, int64_t worker, const std::string& plan) {
  ++cases;
  const std::string context = plan + ", worker " + std::to_string(worker);
  SegmentCursor cursor(schedule, worker);
  Walker walker(static_cast<int32_t>(worker));
  Segment want;
  Step got;
  for (int64_t steps = 0; steps < 1000; ++steps) {
    const bool more = cursor.next(&want);
    TPK_CHECK(walker.next(walk, &got) == more, context);
    if (!more) return;
    TPK_CHECK(got.position == want.position && got.k_begin == want.k_begin && got.k_end == want.k_end,
              context);
    TPK_CHECK(got.slot == want.slot && got.first_slot == want.first_slot && got.end_slot == want.end_slot,
              context);
  }
}

// A plan of a product with so many tiles of so many iterations.
void check_plan(const Problem& p, int64_t workers) {
  const TileShape shape{64, 32, 16};
  ScheduleOptions options;
  options.workers = workers;
  options.min_iters = between(1, 5);
  options.splits = of_any_size(40);
  for (const auto kind : {ScheduleKind::kDataParallel, ScheduleKind::kStreamK, ScheduleKind::kSplitK,
                          ScheduleKind::kHybridFirst, ScheduleKind::kHybridLast, ScheduleKind::kOwnFirst,
                          ScheduleKind::kEveryShard, ScheduleKind::kHybridAligned}) {
    if (kind == ScheduleKind::kSplitK && num_tiles(p, shape) > (int64_t{1} << 31) / 64) continue;
    const Plan plan = make_plan(p, shape, kind, options, CostConstants{});
    const Walk walk = make_walk(plan.schedule, plan.order);
    const std::string context = std::string(name(kind)) + " of " + std::to_string(num_tiles(p, shape)) +
                                " tiles of " + std::to_string(plan.schedule.k_iters) + " iterations, " +
                                std::to_string(workers) + " workers, min_iters " +
                                std::to_string(options.min_iters) + ", splits " +
                                std::to_string(options.splits);
    TPK_CHECK(walk.workers == plan.schedule.workers, context);
    const int64_t count = plan.schedule.workers;
    if (count <= 600) {
      for (int64_t w = 0; w < count; ++w) check_worker(walk, plan.schedule, w, context);
    } else {
      for (int i = 0; i < 50; ++i) check_worker(walk, plan.schedule, between(0, count - 1), context);
      check_worker(walk, plan.schedule, count - 1, context);
    }
    const int64_t tiles = plan.order.size();
    for (int i = 0; i < 20; ++i) check_tile(walk, plan.order, between(0, tiles - 1), context);
    check_tile(walk, plan.order, tiles - 1, context);
  }
}

void check_refusals() {
  const std::string context;
  const auto sentence = [](const Schedule& s, const TileOrder& order) {
    try {
      make_walk(s, order);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const TileShape shape{64, 64, 16};
  const Problem many{64, 64, 16, int64_t{1} << 31};
  const Plan plan = make_plan(many, shape, ScheduleKind::kDataParallel, {}, CostConstants{});
  TPK_CHECK(sentence(plan.schedule, plan.order).find("to 2^31 - 1, but there are 2147483648 and") !=
                std::string::npos,
            context);
  TileOrder rotated = make_tile_order({640, 64, 16, 1}, shape);
  rotated.start_m = 2;
  TPK_CHECK(sentence(plan.schedule, rotated).find("no schedules for communication") != std::string::npos,
            context);
}

}  // namespace

int main() {
  check_division<uint32_t>();
  check_division<uint64_t>();
  for (int i = 0; i < 400; ++i) {
    const Problem small{of_any_size(2000), of_any_size(2000), of_any_size(20000), of_any_size(5)};
    check_plan(small, of_any_size(900));
    const Problem large{of_any_size(int64_t{1} << 19), of_any_size(int64_t{1} << 16),
                        of_any_size(int64_t{1} << 35), 1};
    check_plan(large, of_any_size(900));
  }
  check_refusals();
  return tpk::test::result("sm80 walk", cases);
}

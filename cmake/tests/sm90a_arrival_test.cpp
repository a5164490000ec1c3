// Times of an arrival: when chunks and rows of tiles are there, the walk of waits.hpp against a plain one
// along the segments, and how groups are cut.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "arrivals.hpp"
#include "check.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;
using namespace tpk::test;

long long cases = 0;

// ---- The walk.

// The same rules, segment by segment.
double walk_plainly(const Schedule& s, const StepCost& c, const TileArrivals& arrivals, int64_t running) {
  const int64_t shares = s.workers <= running ? divided_shares(s) : 0;
  std::vector<double> partials(static_cast<size_t>(s.num_slots), 0.0);
  std::vector<double> free(static_cast<size_t>(running), 0.0);
  std::vector<std::vector<double>> together(static_cast<size_t>(s.workers + 1));  // divided: by first slot
  double last = 0;
  for (int64_t w = 0; w < s.workers; ++w) {
    double& now = *std::min_element(free.begin(), free.end());
    SegmentCursor cursor(s, w);
    for (Segment g; cursor.next(&g);) {
      now =
          std::max(now, arrivals.of(g.position)) + static_cast<double>(g.k_end - g.k_begin) * c.iter[g.piece];
      if (g.is_split() && shares > 0) {
        together[static_cast<size_t>(g.position % s.workers)].push_back(now);
      } else if (!g.finishes()) {
        partials[static_cast<size_t>(g.slot)] = now += c.publish;
      } else {
        for (int64_t i = g.first_slot; i < g.end_slot; ++i)
          now = std::max(now, partials[static_cast<size_t>(i)]);
        now += static_cast<double>(g.end_slot - g.first_slot) * c.add + c.epilogue;
      }
    }
    last = std::max(last, now);
  }
  for (const auto& tile : together) {
    for (const double at : tile) last = std::max(last, at + c.exchange);
  }
  return last;
}

void check_walk() {
  for (int i = 0; i < 3000; ++i) {
    ScheduleOptions o;
    o.workers = pick(1, 40);
    o.min_iters = pick(1, 5);
    o.splits = pick(1, 9);
    o.aligned = pick(0, 1) == 1;
    const int64_t shards = pick(1, 5);
    for (int64_t r = 0; r < shards; ++r) o.shard_tiles.push_back(pick(0, 60));
    const int64_t tiles = std::accumulate(o.shard_tiles.begin(), o.shard_tiles.end(), int64_t{0});
    const auto kind = static_cast<ScheduleKind>(i % kNumScheduleKinds);
    const Schedule s = make_schedule(kind, tiles, pick(1, 60), o);
    StepCost cost;
    for (double& iter : cost.iter) iter = 0.5 + real(1);
    cost.epilogue = real(5);
    cost.publish = real(3);
    cost.add = real(3);
    cost.exchange = real(9);
    TileArrivals arrivals;
    for (int64_t t = 0; t < tiles; ++t) {
      arrivals.at.push_back(i % 4 == 0 ? real(100) : static_cast<double>(t * pick(1, 3)));
      arrivals.last = std::max(arrivals.last, arrivals.at.back());
    }
    const int64_t running = pick(0, 3) == 0 ? pick(1, s.workers) : s.workers;
    const std::string here = std::string(name(kind)) + " " + std::to_string(i);
    ++cases;
    const double us = simulate_us(s, cost, arrivals, running);
    TPK_CHECK(std::abs(us - walk_plainly(s, cost, arrivals, running)) < 1e-6 * (1 + us), here);
    TPK_CHECK(us >= simulate_us(s, cost, {}, running), here);
    // Later rows, no earlier end.
    TileArrivals later = arrivals;
    for (double& at : later.at) later.last = std::max(later.last, at += pick(0, 2) * 10.0);
    TPK_CHECK(simulate_us(s, cost, later, running) >= us - 1e-9, here);
  }
}

// Nobody waits: the walk says what the closed form says, but for waits for partials.
void check_against_closed_form() {
  for (int i = 0; i < 900; ++i) {
    const Problem p{pick(256, 9000), pick(256, 9000), pick(2000, 14000), 1};
    const auto tile = static_cast<TileId>(pick(0, kNumWalkingTiles - 1));
    const ClusterShape cluster = kClusterShapes[pick(0, kNumWalkingClusters - 1)];
    const char* schedule = i % 3 == 0 ? "data_parallel" : "hybrid_aligned";
    const GemmPlan plan = plan_gemm(p, schedule, 0, pick(1, 8), name(tile, cluster), {}, full_residency(132));
    const Schedule& s = plan.plan.schedule;
    const double walked =
        simulate_us(s, step_cost(p, s, tile, cluster, s.workers, {}, kCostHopper), {}, s.workers);
    const double told = work_us(p, s, tile, cluster, s.workers, {}, kCostHopper);
    ++cases;
    const std::string here = name(tile, cluster) + " " + std::to_string(p.m) + " " + std::to_string(p.n) +
                             " " + std::to_string(p.k) + ": " + std::to_string(walked) + " for " +
                             std::to_string(told);
    TPK_CHECK(walked > 0.98 * told && walked < 1.08 * told, here);
  }
}

// ---- When rows are there.

void check_arrivals() {
  ++cases;
  const LinkCost link{10, {1000, 500, 250}};
  // Rank 1 of 3; K 500, hence 1000 bytes a row, 2 us.
  Ranks ranks = arrival_of({100, 200, 300}, 1, 500);
  TPK_CHECK(ranks.num_chunks == 3, "");
  TPK_CHECK((chunk_arrivals(ranks, 500, link) == std::vector<double>{2 * (10 + 200), 0, 10 + 600}), "");
  // The same in two chunks of rank 0: its shard is sent twice, once to rank 2.
  ranks.num_chunks = 4;
  const int32_t ends[] = {60, 100, 300, 600};
  std::copy(ends, ends + 4, ranks.chunk_end);
  const auto at = chunk_arrivals(ranks, 500, link);
  TPK_CHECK((at == std::vector<double>{220 + 130, 220 + 220, 0, 610}), "");
  // Tiles of 64 rows: 0-63 has rows of both chunks, 64-127 of rank 0 and own ones, ...
  TPK_CHECK(
      (row_arrivals(ranks, at, 10, 64) == std::vector<double>{440, 440, 0, 0, 610, 610, 610, 610, 610, 610}),
      "");
  const TileOrder order = place_tiles({600, 64, 500, 1}, {64, 64, 64}, ranks).order;
  const auto bands = arrival_bands(order, row_arrivals(ranks, at, 10, 64));
  TPK_CHECK(bands.size() == 3 && bands[0].rows == 2 && bands[1].rows == 6 && bands[2].rows == 2, "");
  TPK_CHECK(bands[0].at == 0 && bands[1].at == 610 && bands[2].at == 440, "");
  TPK_CHECK(kCostLink.rate(2) >= kCostLink.rate(4) && kCostLink.rate(4) >= kCostLink.rate(8), "");
}

// Bands of one row each: taken apart where a group would wait, together where all is there.
void check_groups() {
  ++cases;
  GroupCost cost{10, 100, 4, 10, 1, 2, 1, 1, 0};  // a row is a wave of 102 us
  const auto groups = [&](std::vector<double> at) {
    std::vector<Band> bands;
    for (const double t : at) bands.push_back({1, t});
    return choose_groups(bands, cost);
  };
  TPK_CHECK((groups({0, 0, 0}) == std::vector<int64_t>{3}), "");
  TPK_CHECK((groups({0, 50, 90}) == std::vector<int64_t>{3}), "a wave has ended before the next rows come");
  TPK_CHECK(groups({}).empty(), "");
  cost.row_tiles = 4;  // 4 of 10 workers: cut in 5, two fifths each take 46 us
  TPK_CHECK((groups({0, 50, 100, 150}).size() == 4), "each row alone, while the next one comes");
  TPK_CHECK((groups({0, 200, 400, 600}) == std::vector<int64_t>{3, 1}), "only the last one's end counts");
  cost.least = 1000;
  TPK_CHECK((groups({0, 200, 400, 600}).size() == 1), "each group would read all of B");
  TPK_CHECK(choose_groups(std::vector<Band>(16, {1, 5}), cost).size() == 1, "");
}

}  // namespace

int main() {
  check_walk();
  check_against_closed_form();
  check_arrivals();
  check_groups();
  return tpk::test::result("sm90a arrivals", cases);
}

// Plans of products whose rows belong to ranks: no tile has rows of two, all rows are covered once, tiles of
// rank
// + 1 come first and own ones last, and no plan that is taken lets a worker wait before it has done what
// others wait for.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/sm90a/plan.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;

Ranks ranks_with(const std::vector<int32_t>& rows, int32_t rank, Direction direction) {
  Ranks r;
  r.direction = direction;
  r.rows.world = static_cast<int32_t>(rows.size());
  r.rows.rank = rank;
  int32_t end = 0;
  for (size_t i = 0; i < rows.size(); ++i) r.rows.row_end[i] = end += rows[i];
  return r;
}

// The rank that a row of tiles belongs to, and its rows: what scheduler.cuh works out.
struct TileRows {
  int32_t rank = 0;
  int64_t begin = 0;
  int64_t end = 0;
};
TileRows rows_of(const RowBlocks& blocks, int64_t tile_row, int64_t bm) {
  TileRows r;
  while (r.rank + 1 < blocks.count && tile_row >= blocks.first_tile[r.rank + 1]) ++r.rank;
  r.begin = blocks.row_begin[r.rank] + (tile_row - blocks.first_tile[r.rank]) * bm;
  r.end = min64(r.begin + bm, blocks.row_begin[r.rank + 1]);
  return r;
}

// together: rows that leave as one, see DepartureHook.
void check_departure(const std::vector<int32_t>& rows, int32_t rank, int64_t n, int64_t multiprocessors,
                     int32_t together) {
  Ranks ranks = ranks_with(rows, rank, Direction::kDeparture);
  ranks.together = together;
  const auto world = static_cast<int32_t>(rows.size());
  const int64_t m = ranks.rows.row_end[world - 1];
  std::string context =
      std::to_string(rank) + " of " + std::to_string(world) + ", n " + std::to_string(n) + ":";
  for (const int32_t r : rows) context += " " + std::to_string(r);
  const Residency residency = full_residency(multiprocessors);
  for (const char* schedule : {"auto", "data_parallel", "hybrid_last"}) {
    std::vector<GemmPlan> plans;
    try {
      plans = candidates({m, n, 4096, 1}, schedule, 0, 1, "", {}, residency, ranks);
    } catch (const std::invalid_argument& error) {
      TPK_CHECK(std::string(schedule) == "hybrid_last", context + error.what());
      continue;
    }
    for (const GemmPlan& plan : plans) {
      ++cases;
      const std::string here = context + " " + schedule + " " + name(plan.tile, plan.cluster);
      TPK_CHECK(plan.waits_safely, here);
      TPK_CHECK(plan.plan.schedule.workers <=
                    residency.clusters[static_cast<int>(plan.tile)][cluster_index(plan.cluster)],
                here);
      const TileOrder& order = plan.plan.order;
      // What leaves together is not begun before what leaves before it is done, as far as tiles allow.
      const int64_t bm = plan.plan.tile.bm;
      TPK_CHECK(together == 0 || order.group_m * bm <= max64(bm, together), here);
      TPK_CHECK(order.group_m <= 8, here);
      std::vector<int> covered(static_cast<size_t>(m), 0);
      int32_t last = -1;
      for (int64_t i = 0; i < order.size(); ++i) {
        const TileCoord c = order.at(i);
        const TileRows t = rows_of(plan.blocks, c.m, plan.plan.tile.bm);
        TPK_CHECK(t.begin < t.end, here);
        const auto turn = static_cast<int32_t>(departure_class(t.rank, rank, world));
        TPK_CHECK(turn >= last, here);
        last = turn;
        for (int64_t row = t.begin; c.n == 0 && row < t.end; ++row) covered.at(static_cast<size_t>(row))++;
      }
      for (const int times : covered) TPK_CHECK(times == 1, here);
      // An own tile is no worker's work before one of another rank's.
      const Schedule& s = plan.plan.schedule;
      for (int64_t w = 0; w < s.workers; ++w) {
        bool own = false;
        for (const Segment& segment : worker_segments(s, w)) {
          const bool mine =
              rows_of(plan.blocks, order.at(segment.position).m, plan.plan.tile.bm).rank == rank;
          TPK_CHECK(mine || !own, here);
          own = own || mine;
        }
      }
    }
  }
}

void check_refused() {
  const Ranks ranks = ranks_with({512, 512, 512, 512}, 1, Direction::kDeparture);
  for (const char* schedule : {"stream_k", "split_k"}) {
    ++cases;
    std::string said;
    try {
      (void)candidates({2048, 2048, 4096, 1}, schedule, 0, 4, "", {}, full_residency(132), ranks);
    } catch (const std::invalid_argument& error) {
      said = error.what();
    }
    TPK_CHECK(said.find("wait for each other") != std::string::npos, schedule + said);
  }
}

void check_keys() {
  const auto key = [](std::vector<int32_t> rows, int32_t rank, Direction d) {
    return ranks_with(rows, rank, d).key();
  };
  const std::string one = key({10, 20}, 0, Direction::kArrival);
  ++cases;
  TPK_CHECK(one == key({10, 20}, 0, Direction::kArrival), one);
  TPK_CHECK(one != key({10, 20}, 1, Direction::kArrival), one);
  TPK_CHECK(one != key({10, 20}, 0, Direction::kDeparture), one);
  TPK_CHECK(one != key({11, 19}, 0, Direction::kArrival), one);
  Ranks parts = ranks_with({10, 20}, 0, Direction::kArrival);
  parts.together = 256;
  TPK_CHECK(one != parts.key(), one);
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int i = 0; i < 60; ++i) {
    std::vector<int32_t> rows(1 + random() % 8);
    for (int32_t& r : rows) r = random() % 5 == 0 ? 0 : static_cast<int32_t>(random() % 1500);
    rows[random() % rows.size()] += 1;
    const auto rank = static_cast<int32_t>(random() % rows.size());
    check_departure(rows, rank, 1 + static_cast<int64_t>(random() % 4000), i % 3 == 0 ? 33 : 132,
                    static_cast<int32_t>(random() % 5) * 256);
  }
  check_departure({1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024}, 3, 8192, 132, 512);
  check_refused();
  check_keys();
  return tpk::test::result("sm90a departures", cases);
}

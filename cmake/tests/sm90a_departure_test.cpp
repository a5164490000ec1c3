// Plans of products whose rows belong to ranks: no tile has rows of two, all rows are covered once, tiles of
// rank + 1 come first and own ones last, or chunk by chunk, and an own one's ticket is behind those of all
// tiles that peers need for theirs.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "host/pushes.hpp"
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

// Blocks of rows in order of time, each of whole chunks.
void set_blocks(Ranks& ranks, int64_t least_bytes, bool sums) {
  std::vector<int64_t> shards;
  for (int32_t r = 0; r < ranks.rows.world; ++r)
    shards.push_back(ranks.rows.row_end[r] - ranks.rows.begin(r));
  const auto chunks = protocol::cut_chunks(shards, 1, least_bytes, 4);
  for (const int32_t c : protocol::leaving_order(chunks, ranks.rows.rank, ranks.rows.world, sums))
    ranks.blocks[ranks.num_blocks++] = {chunks.begin(c), chunks.row_end[c]};
}

struct TileRows {
  int32_t block = 0;
  int64_t begin = 0;
  int64_t end = 0;
};
TileRows rows_of(const RowBlocks& blocks, int64_t tile_row, int64_t bm) {
  TileRows r;
  while (tile_row >= blocks.first_tile[r.block + 1]) ++r.block;
  r.begin = blocks.rows[r.block].begin + (tile_row - blocks.first_tile[r.block]) * bm;
  r.end = min64(r.begin + bm, blocks.rows[r.block].end);
  return r;
}

void check_departure(const std::vector<int32_t>& rows, int32_t rank, int64_t n, int64_t multiprocessors,
                     int32_t together, bool sums) {
  Ranks ranks = ranks_with(rows, rank, Direction::kDeparture);
  set_blocks(ranks, together, sums);
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
      const TileOrder& order = plan.plan.order;
      const int64_t bm = plan.plan.tile.bm;
      TPK_CHECK(order.group_m <= 8, here);
      // Block after block, and every row once.
      std::vector<int> covered(static_cast<size_t>(m), 0);
      int32_t last = 0;
      for (int64_t i = 0; i < order.size(); ++i) {
        const TileCoord c = order.at(i);
        const TileRows t = rows_of(plan.blocks, c.m, bm);
        TPK_CHECK(t.begin < t.end && t.block >= last, here);
        last = t.block;
        for (int64_t row = t.begin; c.n == 0 && row < t.end; ++row) covered.at(static_cast<size_t>(row))++;
      }
      for (const int times : covered) TPK_CHECK(times == 1, here);
      // Who draws an own tile knows that all tiles of blocks in front of that run of own ones are drawn.
      // Nothing is left out.
      const Schedule& s = plan.plan.schedule;
      const auto is_own = [&](int32_t block) {
        const RowSpan& span = plan.blocks.rows[block];
        return span.begin >= ranks.rows.begin(rank) && span.begin < ranks.rows.row_end[rank];
      };
      int64_t iterations = 0;
      int32_t waits_for = 0;  // own tiles of tickets so far: for blocks in front of this one
      for (int64_t t = 0; t < s.tickets(); ++t) {
        const int32_t before = waits_for;
        for (const Segment& segment : worker_segments(s, t)) {
          const int32_t block = rows_of(plan.blocks, order.at(segment.position).m, bm).block;
          TPK_CHECK(is_own(block) || block >= before, here);
          int32_t run = block;
          while (run > 0 && is_own(run - 1)) --run;
          if (is_own(block)) waits_for = std::max(waits_for, run);
          TPK_CHECK(segment.slot < s.num_slots && segment.end_slot <= s.num_slots, here);
          iterations += segment.k_end - segment.k_begin;
        }
      }
      TPK_CHECK(iterations == order.size() * s.k_iters, here);
    }
  }
}

void check_refused() {
  Ranks ranks = ranks_with({512, 512, 512, 512}, 1, Direction::kDeparture);
  set_blocks(ranks, 1 << 20, false);
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
  parts.blocks[parts.num_blocks++] = {0, 10};
  TPK_CHECK(one != parts.key(), one);
}

// Sums cost what tiles of 128x128 gain: 3 % of llama70b's product on one H200. Without ranks they are
// cheapest.
void check_sums_count() {
  const Problem p{8192, 8192, 3584, 1};
  const auto elements = [](const GemmPlan& g) {
    const TileShape t = tile_shape(g.tile);
    return t.bm * t.bn;
  };
  for (const int32_t world : {2, 4, 8}) {
    Ranks ranks =
        ranks_with(std::vector<int32_t>(static_cast<size_t>(world), 8192 / world), 0, Direction::kDeparture);
    set_blocks(ranks, 4 << 20, false);
    const GemmPlan plan = plan_gemm(p, "auto", 0, 1, "", {}, full_residency(132), ranks);
    ++cases;
    TPK_CHECK(elements(plan) == 32768 && plan.plan.schedule.num_slots == 0, std::to_string(world));
    Demands serves;  // on the same kernel: whole tiles know nothing of ranks
    serves.keeps_rows = true;
    const double alone = plan_gemm(p, "auto", 0, 1, "", serves, full_residency(132)).plan.predicted_us;
    TPK_CHECK(plan.plan.predicted_us > alone + 15 && plan.plan.predicted_us < alone + 50,
              std::to_string(world) + " " + std::to_string(plan.plan.predicted_us - alone));
  }
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
                    1 + static_cast<int32_t>(random() % 5) * 256, i % 2 == 0);
  }
  for (const bool sums : {false, true})
    check_departure({1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024}, 3, 8192, 132, 512, sums);
  check_refused();
  check_sums_count();
  check_keys();
  return tpk::test::result("sm90a departures", cases);
}

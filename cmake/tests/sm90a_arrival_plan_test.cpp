// Plans that know when rows arrive: what they cover, what is chosen, and that products without an arrival get
// what they always got. With the argument "table" it prints the plans of measured cases instead.
#include <chrono>
#include <cstdint>
#include <cstring>
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

// What candidates() chose before it knew of arrivals; schedule: "auto", or every_shard.
GemmPlan old_choice(const Problem& p, const std::string& schedule, const Demands& demands, const Residency& r,
                    const Ranks& ranks) {
  GemmPlan best;
  best.plan.predicted_us = -1;
  for (int t = 0; t < kNumWalkingTiles; ++t) {
    for (int c = 0; c < kNumWalkingClusters; ++c) {
      const auto tile = static_cast<TileId>(t);
      if (r.clusters[t][c] < 1 || (demands.gated && !takes_gate(tile))) continue;
      if (ranks.direction == Direction::kDeparture && tile_shape(tile).bn == 192)
        continue;  // sums have no room
      TileShape shape = cluster_tile(tile, kClusterShapes[c]);
      if (demands.gated) shape.bn /= 2;
      const Placement placement = place_tiles(p, shape, ranks);
      const auto consider = [&](ScheduleKind kind, int64_t n) {
        ScheduleOptions o;
        o.workers = r.clusters[t][c];
        o.splits = n;
        o.shard_tiles = placement.shard_tiles;
        Schedule s = make_schedule(kind, placement.order.size(), iters_per_tile(p, shape), o);
        for (const int64_t position : placement.turns) {
          if (!tiles_apart(s, position)) return;
        }
        const int64_t running = min64(r.clusters[t][c], s.workers);
        double us = predict_us(p, s, tile, kClusterShapes[c], running, demands, kCostHopper);
        if (ranks.direction == Direction::kDeparture) {
          us += departure_us(s, placement.own_tiles, ranks.rows.world - 1, running,
                             work_cost(p, tile, kClusterShapes[c], demands, kCostHopper).part, kCostHopper);
        }
        if (best.plan.predicted_us >= 0 && us >= best.plan.predicted_us) return;
        best.tile = tile;
        best.cluster = kClusterShapes[c];
        best.blocks = placement.blocks;
        best.plan.predicted_us = us;
        best.plan.kind = kind;
        best.plan.order = placement.order;
        for (const int64_t position : placement.turns) s = start_turn(s, position);
        best.plan.schedule = s;
      };
      if (schedule == "every_shard") {
        consider(ScheduleKind::kEveryShard, 1);
        continue;
      }
      consider(ScheduleKind::kDataParallel, 1);
      for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 11}) consider(ScheduleKind::kHybridAligned, n);
    }
  }
  return best;
}

template <class T>
bool same(const T& a, const T& b) {  // these have no padding
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void check_others_are_as_before() {
  for (int i = 0; i < 200; ++i) {
    Problem p{pick(1, 9000), pick(1, 9000), pick(1, 14000), 1};
    const Demands demands{i % 5 == 0, i % 3 == 0, i % 7 == 0};
    Residency r = full_residency(i % 4 == 0 ? pick(2, 131) : 132);
    for (int t = kNumWalkingTiles; t < kNumTiles; ++t) {
      for (int64_t& clusters : r.clusters[t]) clusters = 0;  // whole tiles came later
    }
    Ranks ranks;
    if (i % 2 == 0) {
      ranks = arrival_of(std::vector<int64_t>(static_cast<size_t>(pick(1, 8)), pick(1, 1000)), 0, p.k);
      ranks.direction = Direction::kDeparture;
      ranks.num_chunks = 0;
      p.m = ranks.rows.row_end[ranks.rows.world - 1];
      for (int32_t step = 1; step <= ranks.rows.world; ++step) {
        const int32_t owner = step % ranks.rows.world;
        ranks.blocks[ranks.num_blocks++] = {ranks.rows.begin(owner), ranks.rows.row_end[owner]};
      }
    }
    const char* schedule = i % 3 == 0 && i % 2 != 0 ? "every_shard" : "auto";
    const GemmPlan now = plan_gemm(p, schedule, 0, 1, "", demands, r, ranks);
    const GemmPlan then = old_choice(p, schedule, demands, r, ranks);
    ++cases;
    const std::string here = std::to_string(p.m) + " " + std::to_string(p.n) + " " + std::to_string(p.k);
    TPK_CHECK(now.plan.predicted_us == then.plan.predicted_us && now.plan.kind == then.plan.kind, here);
    TPK_CHECK(now.tile == then.tile && same(now.cluster, then.cluster) && same(now.blocks, then.blocks),
              here);
    const Schedule& a = now.plan.schedule;
    const Schedule& b = then.plan.schedule;
    bool equal = a.k_iters == b.k_iters && a.workers == b.workers && a.num_slots == b.num_slots &&
                 a.num_pieces == b.num_pieces && same(now.plan.order, then.plan.order);
    for (int64_t j = 0; equal && j < a.num_pieces; ++j) {
      const Piece& x = a.pieces[j];
      const Piece& y = b.pieces[j];
      equal = x.kind == y.kind && x.first_tile == y.first_tile && x.num_tiles == y.num_tiles &&
              x.workers == y.workers && x.granules == y.granules;
    }
    TPK_CHECK(equal, here);
  }
}

// Every iteration once, every partial that is waited for written, bounded slots, no wait in vain.
void check_covers(const GemmPlan& plan, int64_t resident, const std::string& here) {
  ++cases;
  const Schedule& s = plan.plan.schedule;
  const TileOrder& order = plan.plan.order;
  std::vector<std::vector<char>> done(static_cast<size_t>(order.size()),
                                      std::vector<char>(static_cast<size_t>(s.k_iters), 0));
  std::vector<char> written(static_cast<size_t>(s.num_slots), 0);
  std::vector<char> wanted = written;
  for (int64_t w = 0; w < s.workers; ++w) {
    for (const Segment& g : worker_segments(s, w)) {
      for (int64_t k = g.k_begin; k < g.k_end; ++k)
        ++done[static_cast<size_t>(g.position)][static_cast<size_t>(k)];
      if (g.slot >= 0) ++written[static_cast<size_t>(g.slot)];
      for (int64_t i = g.first_slot; i < g.end_slot; ++i) ++wanted[static_cast<size_t>(i)];
    }
  }
  for (const auto& tile : done) TPK_CHECK(tile == std::vector<char>(tile.size(), 1), here);
  TPK_CHECK(written == wanted, here);
  TPK_CHECK(s.num_slots <= kMostGroups * resident, here);
  std::vector<char> seen(static_cast<size_t>(order.size()), 0);
  for (int64_t i = 0; i < order.size(); ++i) {
    const TileCoord c = order.at(i);
    ++seen[static_cast<size_t>(c.m * order.tiles_n + c.n)];
  }
  TPK_CHECK(seen == std::vector<char>(seen.size(), 1), here);
  for (const int64_t at_once : {int64_t{1}, int64_t{2}, resident}) {
    ProgressOptions o;
    o.resident = at_once;
    TPK_CHECK(simulate_progress({make_rank_program(s, order)}, o).finished, here);
  }
}

void check_plans() {
  int64_t in_groups = 0;
  for (int i = 0; i < 120; ++i) {
    std::vector<int64_t> rows(static_cast<size_t>(pick(2, 8)));
    for (int64_t& r : rows) r = pick(0, 4) == 0 ? 0 : pick(1, 1500);
    rows[static_cast<size_t>(pick(0, static_cast<int64_t>(rows.size()) - 1))] += 1;
    const Problem p{std::accumulate(rows.begin(), rows.end(), int64_t{0}), pick(1, 3000), pick(1, 9000), 1};
    const auto rank = static_cast<int32_t>(pick(0, static_cast<int64_t>(rows.size()) - 1));
    const Ranks ranks = arrival_of(rows, rank, p.k);
    const int64_t multiprocessors = i % 3 == 0 ? 29 : 132;
    for (const char* schedule : {"auto", "own_first", "every_shard"}) {
      const auto tile = static_cast<TileId>(pick(0, kNumWalkingTiles - 1));
      const ClusterShape cluster = kClusterShapes[pick(0, kNumWalkingClusters - 1)];
      const GemmPlan plan = plan_gemm(p, schedule, 0, pick(1, 5), name(tile, cluster), {},
                                      full_residency(multiprocessors), ranks);
      const std::string here = std::string(schedule) + " " + name(tile, cluster) + " of rank " +
                               std::to_string(rank) + ", case " + std::to_string(i);
      check_covers(plan, multiprocessors / cluster.size(), here);
      int64_t streamed = 0;
      for (int64_t j = 0; j < plan.plan.schedule.num_pieces; ++j)
        streamed += plan.plan.schedule.pieces[j].kind == PieceKind::kStreamed;
      in_groups += streamed > 1;
    }
  }
  TPK_CHECK(in_groups > 60, std::to_string(in_groups));
}

// What has landed is planned as what never travelled; and so is what the hooks say has.
void check_landed() {
  GemmHooks hooks;
  hooks.arrival.ranks = even_arrival(4096, 4, 4096).rows;
  hooks.arrival.num_chunks = 4;
  for (int32_t c = 0; c < 4; ++c) hooks.arrival.row_end[c] = (c + 1) * 1024;
  const Ranks waits = ranks_of(&hooks);
  TPK_CHECK(waits.direction == Direction::kArrival && waits.num_chunks == 4, "");
  hooks.arrival.landed = true;
  TPK_CHECK(ranks_of(&hooks).direction == Direction::kNone && ranks_of(&hooks).key() == Ranks{}.key(), "");
  for (int i = 0; i < 40; ++i) {
    const Problem p{4096, pick(1, 6000), pick(64, 9000), 1};
    Ranks there = waits;
    there.num_chunks = 0;
    Demands serves;
    serves.keeps_rows = true;
    const GemmPlan a = plan_gemm(p, "auto", 0, 1, "", serves, full_residency(132), there);
    const GemmPlan b = plan_gemm(p, "auto", 0, 1, "", serves, full_residency(132));
    ++cases;
    TPK_CHECK(a.plan.predicted_us == b.plan.predicted_us && a.plan.kind == b.plan.kind && a.tile == b.tile,
              std::to_string(p.n) + " " + std::to_string(p.k));
  }
  Ranks other = waits;
  other.chunk_end[1] -= 256;
  Ranks none = waits;
  none.num_chunks = 0;
  TPK_CHECK(waits.key() != other.key() && waits.key() != none.key(), "");
}

// ---- Measured cases: see the README.

struct Case {
  const char* name;
  int64_t m, n, k;
  int32_t world;
  double most;  // of what the plan of a plain product is predicted to take here
};
constexpr Case kCases[] = {
    {"llama70b M2048", 2048, 3584, 8192, 4, 0.85}, {"gpt3 M2048", 2048, 6144, 12288, 4, 0.95},
    {"gpt3 M1024", 1024, 6144, 12288, 4, 0.98},    {"llama8b M8192", 8192, 1792, 4096, 4, 1},
    {"qkv M8192", 8192, 1280, 8192, 4, 0.96},      {"gpt3 M8192", 8192, 6144, 12288, 4, 1},
    {"llama70b M8192", 8192, 3584, 8192, 4, 0.99}, {"llama70b M2048", 2048, 3584, 8192, 2, 0.85},
    {"gpt3 M2048", 2048, 6144, 12288, 2, 1},       {"gpt3 M1024", 1024, 6144, 12288, 2, 1},
    {"llama8b M8192", 8192, 1792, 4096, 2, 1},     {"qkv M8192", 8192, 1280, 8192, 2, 1},
    {"gpt3 M8192", 8192, 6144, 12288, 2, 1},       {"llama70b M8192", 8192, 3584, 8192, 2, 1}};

GemmPlan best_of(const Case& c, const char* schedule, const std::string& tile = "", int64_t splits = 1) {
  return plan_gemm({c.m, c.n, c.k, 1}, schedule, 0, splits, tile, {}, full_residency(132),
                   even_arrival(c.m, c.world, c.k));
}
// Without whole tiles, which know nothing of ranks.
GemmPlan plain_plan(const Case& c) {
  Demands serves;
  serves.keeps_rows = true;
  return plan_gemm({c.m, c.n, c.k, 1}, "auto", 0, 1, "", serves, full_residency(132));
}
// The plain product's plan, when rows arrive.
GemmPlan old_plan(const Case& c) {
  const GemmPlan plain = plain_plan(c);
  return best_of(c, name(plain.plan.kind), name(plain.tile, plain.cluster), plain.plan.splits);
}

void check_measured_cases() {
  for (const Case& c : kCases) {
    ++cases;
    const std::string here = std::string(c.name) + " on " + std::to_string(c.world);
    const double chosen = best_of(c, "auto").plan.predicted_us;
    TPK_CHECK(chosen <= c.most * old_plan(c).plan.predicted_us, here);
    TPK_CHECK(chosen <= best_of(c, "data_parallel").plan.predicted_us, here);
    TPK_CHECK(chosen >= plain_plan(c).plan.predicted_us * (1 - 1e-12), here);  // sums in another order
  }
}

void check_quick() {
  std::vector<double> us;
  for (int64_t n = 1280; n < 1300; ++n) {
    const auto start = std::chrono::steady_clock::now();
    (void)plan_gemm({8192, n, 8192, 1}, "auto", 0, 1, "", {}, full_residency(132),
                    even_arrival(8192, 4, 8192));
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(us.begin(), us.end());
  TPK_CHECK(us[us.size() / 2] < 30e3, std::to_string(us[us.size() / 2]));  // about 3 ms; plans are cached
}

void print_table() {
  for (const Case& c : kCases) {
    std::printf("%s, %d ranks: plain %.0f us, its plan here %.0f\n", c.name, c.world,
                plain_plan(c).plan.predicted_us, old_plan(c).plan.predicted_us);
    for (const char* schedule : {"data_parallel", "hybrid_aligned", "own_first", "every_shard", "auto"}) {
      const GemmPlan g = best_of(c, schedule);
      std::printf("  %-14s %6.0f  %s %s, splits %lld, %lld pieces, %lld slots\n", schedule,
                  g.plan.predicted_us, name(g.tile, g.cluster).c_str(), name(g.plan.kind),
                  static_cast<long long>(g.plan.splits), static_cast<long long>(g.plan.schedule.num_pieces),
                  static_cast<long long>(g.plan.schedule.num_slots));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "table") {
    print_table();
    return 0;
  }
  check_others_are_as_before();
  check_plans();
  check_landed();
  check_measured_cases();
  check_quick();
  return tpk::test::result("sm90a plans of arrivals", cases);
}

// Schedules over a grid of small cases: every iteration once, one finisher, fix-up in K order, progress.
// tests/host has the property tests; this one shows that the headers stand alone, and runs without Python.
#include <map>
#include <string>
#include <vector>

#include "check.hpp"
#include "host/plan.hpp"
#include "host/progress.hpp"

namespace {

using namespace tpk;

struct Part {
  Segment segment;
  int64_t worker;
};

void check_tile(const std::vector<Part>& parts, int64_t k_iters, int64_t min_iters,
                const std::string& context) {
  const Part& last = parts.back();
  int64_t at = 0;
  for (const Part& part : parts) {
    TPK_CHECK(part.segment.k_begin == at, context);
    TPK_CHECK(parts.size() == 1 || part.segment.k_end - part.segment.k_begin >= min_iters, context);
    TPK_CHECK(part.worker <= last.worker, context);
    at = part.segment.k_end;
  }
  TPK_CHECK(at == k_iters, context);
  TPK_CHECK(last.segment.finishes(), context);
  const auto others = static_cast<int64_t>(parts.size()) - 1;
  TPK_CHECK(last.segment.end_slot - last.segment.first_slot == others, context);
  for (int64_t i = 0; i < others; ++i)
    TPK_CHECK(parts[i].segment.slot == last.segment.first_slot + i, context);
}

void check_schedule(ScheduleKind kind, int64_t tiles, int64_t k_iters, const ScheduleOptions& o) {
  const std::string context = std::string(name(kind)) + " tiles " + std::to_string(tiles) + " k_iters " +
                              std::to_string(k_iters) + " workers " + std::to_string(o.workers) +
                              " min_iters " + std::to_string(o.min_iters) + " comm " +
                              std::to_string(o.comm_workers);
  const Schedule s = make_schedule(kind, tiles, k_iters, o);
  std::map<int64_t, std::map<int64_t, Part>> by_tile;  // position, k_begin
  for (int64_t w = 0; w < s.workers; ++w) {
    WorkCounts counts;
    for (const Segment& segment : worker_segments(s, w)) {
      TPK_CHECK(by_tile[segment.position].emplace(segment.k_begin, Part{segment, w}).second, context);
      counts.iterations += segment.k_end - segment.k_begin;
      counts.epilogues += segment.finishes();
      counts.partials_added += segment.end_slot - segment.first_slot;
    }
    const WorkCounts counted = count_work(s, w);
    TPK_CHECK(counts.iterations == counted.iterations, context);
    TPK_CHECK(counts.epilogues == counted.epilogues, context);
    TPK_CHECK(counts.partials_added == counted.partials_added, context);
  }
  TPK_CHECK(static_cast<int64_t>(by_tile.size()) == tiles, context);
  for (const auto& [position, by_k] : by_tile) {
    TPK_CHECK(position >= 0 && position < tiles, context);
    std::vector<Part> parts;
    for (const auto& [k, part] : by_k) parts.push_back(part);
    check_tile(parts, k_iters, o.min_iters, context);
  }
  TileOrder order;
  order.tiles_m = tiles;
  order.tiles_n = 1;
  ProgressOptions one;
  TPK_CHECK(simulate_progress({make_rank_program(s, order)}, one).finished, context);
}

}  // namespace

int main() {
  long long cases = 0;
  for (int k = 0; k < kNumScheduleKinds; ++k) {
    for (const int64_t tiles : {0, 1, 2, 5, 13, 60}) {
      for (const int64_t k_iters : {1, 2, 7, 16, 33}) {
        for (const int64_t workers : {1, 2, 3, 8, 30}) {
          for (const int64_t min_iters : {1, 4}) {
            for (const int64_t comm : {int64_t{0}, workers / 3}) {
              ScheduleOptions o;
              o.workers = workers;
              o.min_iters = min_iters;
              o.splits = 3;
              o.comm_workers = comm;
              o.comm_iters = 5;
              o.shard_tiles = {tiles / 3, 0, tiles - tiles / 3};
              for (const bool aligned : {false, true}) {
                o.aligned = aligned;
                check_schedule(static_cast<ScheduleKind>(k), tiles, k_iters, o);
                ++cases;
              }
            }
          }
        }
      }
    }
  }
  return tpk::test::result("schedule", cases);
}

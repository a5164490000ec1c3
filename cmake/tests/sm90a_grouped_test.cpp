// Plans of grouped products: no tile has rows of two groups, all rows of all groups are covered once, by the
// group's own matrix, group after group, and each call has a fair part of them.
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/grouped_calls.hpp"
#include "kernels/sm90a/plan.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;
std::mt19937 random_bits{7};

int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

void check_calls(const std::vector<int64_t>& sizes) {
  const std::vector<GroupedRows> calls = grouped_calls(sizes);
  int64_t used = 0;
  for (const int64_t size : sizes) used += size > 0;
  TPK_CHECK(static_cast<int64_t>(calls.size()) == ceil_div(used, kMaxChunks), "as few calls as there can be");
  size_t group = 0;
  int64_t begin = 0;
  for (const GroupedRows& call : calls) {
    TPK_CHECK(call.matrices == static_cast<int64_t>(sizes.size()), "matrices");
    TPK_CHECK(call.count > 0 && call.count >= used / static_cast<int64_t>(calls.size()), "a fair part");
    TPK_CHECK(call.num_rows() == call.rows[call.count - 1].end - call.rows[0].begin, "rows");
    for (int32_t i = 0; i < call.count; ++i, ++group) {
      for (; sizes[group] == 0; ++group) {
      }
      const std::string here = "group " + std::to_string(group);
      TPK_CHECK(call.matrix[i] == static_cast<int32_t>(group), here);
      TPK_CHECK(call.rows[i].begin == begin && call.rows[i].end == begin + sizes[group], here);
      begin += sizes[group];
    }
  }
  for (; group < sizes.size(); ++group) TPK_CHECK(sizes[group] == 0, "a group was left out");
}

void check_plans(const std::vector<int64_t>& sizes, int64_t n, int64_t k, const std::string& schedule,
                 bool gated) {
  for (const GroupedRows& groups : grouped_calls(sizes)) {
    const Problem p{groups.num_rows(), n, k, 1};
    const Demands demands{gated, gated, false, groups.count};
    for (const GemmPlan& plan :
         candidates(p, schedule, 0, 1, "", demands, full_residency(132), {}, &groups)) {
      ++cases;
      const std::string here = schedule + " " + name(plan.tile, plan.cluster);
      TPK_CHECK(!is_one_tile(plan.tile), here);
      const TileOrder& order = plan.plan.order;
      const RowBlocks& blocks = plan.blocks;
      const int64_t bm = plan.plan.tile.bm;
      TPK_CHECK(!gated || takes_gate(plan.tile), here);
      TPK_CHECK(order.tiles_n == ceil_div(n, cluster_tile(plan.tile, plan.cluster).bn / (gated ? 2 : 1)),
                here);
      TPK_CHECK(blocks.count == groups.count, here);
      std::vector<int> covered(static_cast<size_t>(order.tiles_m * order.tiles_n), 0);
      int32_t last = 0;
      for (int64_t i = 0; i < order.size(); ++i) {
        const TileCoord c = order.at(i);
        ++covered.at(static_cast<size_t>(c.m * order.tiles_n + c.n));
        int32_t block = 0;
        while (c.m >= blocks.first_tile[block + 1]) ++block;
        TPK_CHECK(block >= last, here + ": group after group");
        last = block;
      }
      for (const int times : covered) TPK_CHECK(times == 1, here);
      for (int32_t b = 0; b < blocks.count; ++b) {
        const int64_t rows = blocks.rows[b].end - blocks.rows[b].begin;
        const int64_t tiles = blocks.first_tile[b + 1] - blocks.first_tile[b];
        TPK_CHECK(blocks.rows[b].begin == groups.rows[b].begin && blocks.rows[b].end == groups.rows[b].end,
                  here);
        TPK_CHECK(blocks.matrix[b] == groups.matrix[b], here);
        TPK_CHECK(tiles * bm >= rows && (tiles - 1) * bm < rows, here);
      }
      const Schedule& s = plan.plan.schedule;
      int64_t iterations = 0;
      for (int64_t t = 0; t < s.tickets(); ++t) {
        for (const Segment& segment : worker_segments(s, t)) iterations += segment.k_end - segment.k_begin;
      }
      TPK_CHECK(iterations == order.size() * s.k_iters, here);
    }
  }
}

// Small groups fill the device together: the list of all their tiles is cut, as that of one product would be.
void check_that_groups_share_waves() {
  std::vector<int64_t> sizes(16, 128);
  const GroupedRows groups = grouped_calls(sizes).front();
  const Problem p{2048, 2048, 7168, 1};
  const GemmPlan plan = plan_gemm(p, "data_parallel", 0, 1, "128x128x64/1x1", {false, false, false, 16},
                                  full_residency(132), {}, &groups);
  TPK_CHECK(plan.plan.order.size() == 256 && plan.plan.schedule.workers == 132, "all tiles are one list");
  const GemmPlan one = plan_gemm(p, "data_parallel", 0, 1, "128x128x64/1x1", {}, full_residency(132));
  TPK_CHECK(plan.plan.predicted_us > one.plan.predicted_us, "16 matrices take longer to read than one");
}

// Few rows, but of groups: the kernel of whole tiles knows one matrix.
void check_that_whole_tiles_are_refused() {
  const GroupedRows groups = grouped_calls({3, 4}).front();
  std::string sentence;
  try {
    plan_gemm({7, 512, 4096, 1}, "auto", 0, 1, "64x128x64s/1x1x4", {false, false, false, 2},
              full_residency(132), {}, &groups);
  } catch (const std::invalid_argument& error) {
    sentence = error.what();
  }
  TPK_CHECK(sentence.find("is of the kernel whose CTAs take whole tiles, one each, and no rows of groups") !=
                std::string::npos,
            sentence);
  const GemmPlan alone = plan_gemm({7, 512, 4096, 1}, "auto", 0, 1, "", {}, full_residency(132));
  TPK_CHECK(is_one_tile(alone.tile), "one product of as many rows takes a whole tile");
}

}  // namespace

int main() {
  check_calls({});
  check_calls({0, 0});
  check_calls({5});
  for (int i = 0; i < 200; ++i) {
    std::vector<int64_t> sizes(static_cast<size_t>(pick(1, 300)));
    for (int64_t& size : sizes) size = pick(0, 3) == 0 ? 0 : pick(1, 400);
    check_calls(sizes);
    if (i % 10 != 0) continue;
    const int64_t n = pick(1, 40) * 64 + pick(0, 1);
    for (const char* schedule : {"auto", "stream_k", "split_k", "own_first"})
      check_plans(sizes, n, pick(1, 3000), schedule, pick(0, 1) == 1);
  }
  check_that_groups_share_waves();
  check_that_whole_tiles_are_refused();
  return tpk::test::result("sm90a grouped", cases);
}

// Sums of several products along one K: where each pair of factors begins, and how parts of that K, wherever
// a schedule cuts them, fall into the pairs.
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/sm90a/pairs.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;

GemmCall call_of(const std::vector<int64_t>& ks) {
  GemmCall c;
  c.problem = {128, 128, ks[0], 1};
  c.num_more = static_cast<int>(ks.size()) - 1;
  for (int i = 0; i < c.num_more; ++i) c.more[i].k = ks[i + 1];
  return c;
}

// One iteration at a time: which pair it is of, and where in that pair.
struct Step {
  int32_t pair;
  int32_t k;
  bool operator==(const Step&) const = default;
};

std::vector<Step> steps_of(const std::vector<int64_t>& ks) {
  std::vector<Step> steps;
  for (size_t i = 0; i < ks.size(); ++i) {
    for (int64_t k = 0; k < ks[i]; k += kBK)
      steps.push_back({static_cast<int32_t>(i), static_cast<int32_t>(k)});
  }
  return steps;
}

// As the loading thread walks the iterations [first, last).
std::vector<Step> walk(const PairEnds& ends, int64_t first, int64_t last, int* runs) {
  std::vector<Step> steps;
  auto k = static_cast<int32_t>(first * kBK);
  const auto end = static_cast<int32_t>(last * kBK);
  for (*runs = 0; k < end; ++*runs) {
    const PairRun run = pair_run(ends, k, end);
    if (run.end <= k || run.end > end) return {};
    for (; k < run.end; k += kBK) steps.push_back({run.pair, k - run.begin});
  }
  return steps;
}

void check(const std::vector<int64_t>& ks) {
  std::string context = "K";
  for (const int64_t k : ks) context += " " + std::to_string(k);
  const GemmCall call = call_of(ks);
  const std::vector<Step> steps = steps_of(ks);
  const auto count = static_cast<int64_t>(steps.size());
  TPK_CHECK(iters_per_tile(whole_problem(call), {128, 128, kBK}) == count, context);
  const PairEnds ends = pair_ends(call);
  for (int64_t first = 0; first < count; ++first) {
    for (int64_t last = first; last <= count; ++last) {
      ++cases;
      int runs = 0;
      const std::vector<Step> got = walk(ends, first, last, &runs);
      const std::vector<Step> want(steps.begin() + first, steps.begin() + last);
      TPK_CHECK(got == want, context + ", iterations from " + std::to_string(first));
      const int pairs = want.empty() ? 0 : want.back().pair - want.front().pair + 1;
      TPK_CHECK(runs == pairs, context + ": a pair in more than one run");
    }
  }
}

// Nothing may wrap near the largest K that the launcher takes.
void check_largest() {
  const int64_t half = (int64_t{1} << 30) - 1024;
  const GemmCall call = call_of({half, half});
  const PairEnds ends = pair_ends(call);
  const auto end = static_cast<int32_t>(2 * half);
  TPK_CHECK(whole_problem(call).k == 2 * half, "the largest K");
  const PairRun first = pair_run(ends, static_cast<int32_t>(half) - kBK, end);
  TPK_CHECK(first.pair == 0 && first.begin == 0 && first.end == half, "the largest K, first pair");
  const PairRun second = pair_run(ends, first.end, end);
  TPK_CHECK(second.pair == 1 && second.begin == half && second.end == end, "the largest K, second pair");
}

}  // namespace

int main() {
  for (const auto& ks : std::vector<std::vector<int64_t>>{
           {64}, {1}, {1000}, {64, 64}, {1, 1}, {65, 63}, {64, 1, 200}, {200, 7, 64, 129}, {8, 8, 8, 8}}) {
    check(ks);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<int64_t> ks(1 + random() % kMaxPairs);
    for (int64_t& k : ks) k = 1 + random() % 700;
    check(ks);
  }
  check_largest();
  return tpk::test::result("sm90a pairs", cases);
}

// Factors in blocks on many ranks: every block that a rank waits for is sent to it once, by whom it belongs
// to, into a slot and under a word of its own; first what is needed first.
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "block_tables.hpp"
#include "check.hpp"

namespace {

using namespace tpk;
using namespace tpk::blocks;

long long cases = 0;

void check(const Holders& h, int64_t m, int64_t n, int64_t k, const std::string& context) {
  ++cases;
  const Cut cut = cut_blocks(h, m, n, k, 2);
  const int64_t words = cut.slots[kLeft] * cut.blocks[kLeft] + cut.slots[kRight] * cut.blocks[kRight];
  TPK_CHECK(words <= kMaxBlocks, context);
  for (const Side side : {kLeft, kRight}) {
    const int64_t extent = side == kLeft ? m : n;
    TPK_CHECK((cut.blocks[side] - 1) * cut.extent[side] < extent, context);
    TPK_CHECK(cut.blocks[side] * cut.extent[side] >= extent, context);
    TPK_CHECK(cut.blocks[side] == 1 || cut.extent[side] % kBlockUnit == 0, context);
    TPK_CHECK(cut.blocks[side] == 1 || cut.by_columns == (side == kRight), context);
  }
  // By receiver: words, and what comes under each.
  std::vector<std::map<int64_t, std::tuple<int, int64_t, int64_t>>> got(static_cast<size_t>(h.world));
  for (int64_t rank = 0; rank < h.world; ++rank) {
    std::tuple<int64_t, int64_t> last{-1, -1};
    for (const Push& p : pushes_of(h, cut, rank)) {
      TPK_CHECK(p.peer != rank && h.at(p.side, p.peer, p.step) == rank, context);
      TPK_CHECK(p.slot == h.slot(p.side, p.peer, p.step) && p.slot < cut.slots[p.side], context);
      const auto [_, is_new] =
          got[p.peer].insert({cut.word(p.side, p.slot, p.block), {p.side, p.slot, p.block}});
      TPK_CHECK(is_new, context + ": a word has two writers");
      TPK_CHECK((std::tuple(p.block, p.step) >= last), context);
      last = {p.block, p.step};
    }
  }
  for (int64_t rank = 0; rank < h.world; ++rank) {
    size_t wanted = 0;
    for (int64_t step = 0; step < h.steps; ++step) {
      for (const Side side : {kLeft, kRight}) {
        const int64_t slot = h.slot(side, rank, step);
        TPK_CHECK((slot < 0) == (h.at(side, rank, step) == rank), context);
        for (int64_t b = 0; slot >= 0 && b < cut.blocks[side]; ++b, ++wanted)
          TPK_CHECK(got[rank].count(cut.word(side, slot, b)) == 1, context);
      }
    }
    TPK_CHECK(got[rank].size() == wanted, context + ": more comes than is waited for");
  }
}

bool refuses(int64_t world, const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
  try {
    (void)make_holders(world, left, right);
    return false;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

}  // namespace

int main() {
  std::mt19937 random(20261130);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int64_t q = 1; q <= 4; ++q) {
    for (int i = 0; i < 50; ++i) {
      const int64_t m = draw(1, 20000);
      const int64_t n = draw(1, 20000);
      const int64_t k = draw(1, 20000);
      check(blocks::test::of_squares(q * q), m, n, k,
            "q " + std::to_string(q) + ", " + std::to_string(m) + "x" + std::to_string(n) + "x" +
                std::to_string(k));
    }
  }
  for (int i = 0; i < 500; ++i) {
    const int64_t world = draw(1, kMaxRanks);
    check(blocks::test::at_random(world, random), draw(1, 9000), draw(1, 9000), draw(1, 9000),
          "random tables, " + std::to_string(i));
  }
  // Large factors come in several blocks, of the side of which more comes; small ones in one.
  const Holders square = blocks::test::of_squares(4);
  const Cut large = cut_blocks(square, 2048, 8192, 4096, 2);
  TPK_CHECK(large.by_columns && large.blocks[kRight] == 8 && large.blocks[kLeft] == 1, "large");
  TPK_CHECK(cut_blocks(square, 128, 256, 512, 2).blocks[kRight] == 1, "small");
  TPK_CHECK(refuses(2, {0, 1, 0}, {0, 1, 0}), "no whole rows");
  TPK_CHECK(refuses(2, {0, 1}, {0, 1, 0, 1}), "unequal");
  TPK_CHECK(refuses(2, {0, 2}, {0, 1}), "no such rank");
  TPK_CHECK(refuses(17, std::vector<int64_t>(17, 0), std::vector<int64_t>(17, 0)), "too many ranks");
  TPK_CHECK(refuses(1, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}), "too many steps");
  return tpk::test::result("block pushes", cases);
}

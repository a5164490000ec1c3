// A product whose pairs of factors lie on several ranks, block by block as they travel: which blocks a rank
// sends to whom, in which order, where they come to lie, and which word tells of each. Pure functions of what
// is the same on all ranks. Used by csrc/ops/sm90a_fused_blocks.cpp; the words: host/protocol.hpp.
//
// At step s rank r multiplies the left factor of rank left[r][s] with the right factor of rank right[r][s],
// and adds that to what it has. Its own factors are there; each of the others' gets a slot in its buffer, in
// the order of steps. One side is needed whole before the first row, or column, of tiles is done; the other,
// the one of which more comes, is cut into blocks, and tiles are taken in their order: what arrives later
// hides beneath what came first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "host/check.hpp"
#include "host/problem.hpp"
#include "kernels/gemm_hooks.hpp"

namespace tpk::blocks {

enum Side : int { kLeft, kRight };

// Whose factors every rank takes: at(side, rank, step).
struct Holders {
  int64_t world = 0;
  int64_t steps = 0;
  std::vector<int64_t> left;  // [world, steps]
  std::vector<int64_t> right;

  int64_t at(Side side, int64_t rank, int64_t step) const {
    return (side == kLeft ? left : right)[static_cast<size_t>(rank * steps + step)];
  }
  // The slot that the factor of this step gets, -1 for the rank's own.
  int64_t slot(Side side, int64_t rank, int64_t step) const {
    if (at(side, rank, step) == rank) return -1;
    int64_t before = 0;
    for (int64_t s = 0; s < step; ++s) before += at(side, rank, s) != rank ? 1 : 0;
    return before;
  }
  // The most that a rank needs.
  int64_t slots(Side side) const {
    int64_t most = 0;
    for (int64_t r = 0; r < world; ++r) {
      int64_t count = 0;
      for (int64_t s = 0; s < steps; ++s) count += at(side, r, s) != r ? 1 : 0;
      most = std::max(most, count);
    }
    return most;
  }
};

inline Holders make_holders(int64_t world, const std::vector<int64_t>& left,
                            const std::vector<int64_t>& right) {
  const auto count = static_cast<int64_t>(left.size());
  if (world < 1 || world > kMaxRanks || count % world != 0 || count == 0 || left.size() != right.size() ||
      count / world > kMaxPairs) {
    throw std::invalid_argument("left_from and right_from must name a rank for each of 1 to " +
                                std::to_string(kMaxPairs) + " steps of each of up to " +
                                std::to_string(kMaxRanks) + " ranks, but they name " + std::to_string(count) +
                                " and " + std::to_string(right.size()) + " of " + std::to_string(world) +
                                " ranks.");
  }
  for (const auto* side : {&left, &right}) {
    for (const int64_t rank : *side) {
      if (rank < 0 || rank >= world)
        throw std::invalid_argument("left_from and right_from must name ranks below " +
                                    std::to_string(world) + ", but they name " + std::to_string(rank) + ".");
    }
  }
  return {world, count / world, left, right};
}

// How factors are cut: a left one into blocks of `extent` rows of M, a right one into blocks of columns of N.
struct Cut {
  int64_t extent[2] = {1, 1};
  int64_t blocks[2] = {1, 1};
  int64_t slots[2] = {0, 0};
  bool by_columns = false;

  // Which word tells of a block.
  int64_t word(Side side, int64_t slot, int64_t block) const {
    return (side == kLeft ? 0 : slots[kLeft] * blocks[kLeft]) + slot * blocks[side] + block;
  }
};

// A copy and its flag cost about 10 us beside what they move.
constexpr int64_t kLeastBlockBytes = int64_t{2} << 20;
constexpr int64_t kMostBlocksOfFactor = 8;
constexpr int64_t kBlockUnit = 256;  // blocks end where tiles do

// Of factors [m, k] and [k, n] in elements of so many bytes.
inline Cut cut_blocks(const Holders& holders, int64_t m, int64_t n, int64_t k, int64_t bytes,
                      int64_t least_bytes = kLeastBlockBytes) {
  Cut cut;
  const int64_t extents[2] = {m, n};
  for (const Side side : {kLeft, kRight}) {
    cut.extent[side] = max64(1, extents[side]);
    cut.slots[side] = holders.slots(side);
  }
  cut.by_columns = cut.slots[kRight] * n > cut.slots[kLeft] * m;
  const Side side = cut.by_columns ? kRight : kLeft;
  const Side other = cut.by_columns ? kLeft : kRight;
  if (cut.slots[side] == 0) return cut;
  const int64_t words = (kMaxBlocks - cut.slots[other]) / cut.slots[side];
  const int64_t units = ceil_div(cut.extent[side], kBlockUnit);
  const int64_t count =
      min64(min64(words, kMostBlocksOfFactor), min64(units, cut.extent[side] * k * bytes / least_bytes));
  cut.extent[side] = min64(cut.extent[side], ceil_div(units, max64(1, count)) * kBlockUnit);
  cut.blocks[side] = ceil_div(extents[side], cut.extent[side]);
  return cut;
}

// What the product of a rank is told, but for where the words are.
inline BlockArrival arrival_of(const Holders& holders, const Cut& cut, int64_t rank) {
  BlockArrival h;
  h.by_columns = cut.by_columns;
  for (const Side side : {kLeft, kRight}) {
    h.extent[side] = static_cast<int32_t>(cut.extent[side]);
    h.count[side] = static_cast<int32_t>(cut.blocks[side]);
    for (int64_t s = 0; s < holders.steps; ++s) {
      const int64_t slot = holders.slot(side, rank, s);
      h.first[side][s] = slot < 0 ? -1 : static_cast<int32_t>(cut.word(side, slot, 0));
      h.from[side][s] = static_cast<int32_t>(holders.at(side, rank, s));
    }
  }
  return h;
}

// A block of this rank's factor on its way to `peer`.
struct Push {
  Side side;
  int64_t peer;
  int64_t slot;
  int64_t block;
  int64_t step;  // of the peer
};

// In the order in which they leave: what all tiles need and first blocks, step after step, then second
// blocks, and so on; at each step to rank + 1 first.
inline std::vector<Push> pushes_of(const Holders& holders, const Cut& cut, int64_t rank) {
  std::vector<Push> pushes;
  for (const Side side : {kLeft, kRight}) {
    for (int64_t peer = 0; peer < holders.world; ++peer) {
      for (int64_t step = 0; step < holders.steps; ++step) {
        if (peer == rank || holders.at(side, peer, step) != rank) continue;
        for (int64_t block = 0; block < cut.blocks[side]; ++block)
          pushes.push_back({side, peer, holders.slot(side, peer, step), block, step});
      }
    }
  }
  const Side whole = cut.by_columns ? kLeft : kRight;
  const auto key = [&](const Push& p) {
    return std::tuple(p.block, p.step, p.side == whole ? 0 : 1,
                      (p.peer - rank + holders.world) % holders.world);
  };
  std::stable_sort(pushes.begin(), pushes.end(),
                   [&](const Push& a, const Push& b) { return key(a) < key(b); });
  return pushes;
}

}  // namespace tpk::blocks

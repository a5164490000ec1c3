// Whose factors ranks take (ops/block_pushes.hpp), for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/block_pushes.hpp"

namespace tpk::blocks::test {

// 2-D, results stay: rank (r, c) multiplies left (r, s) by right (c, s). On as many squares, each for itself,
// as there are, as large as they can be.
inline Holders of_squares(int64_t world) {
  int64_t q = 1;
  for (int64_t i = 2; i <= kMaxPairs; ++i) {
    if (world % (i * i) == 0) q = i;
  }
  std::vector<int64_t> left;
  std::vector<int64_t> right;
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t first = rank / (q * q) * (q * q);
    const int64_t r = rank % (q * q) / q;
    const int64_t c = rank % q;
    for (int64_t t = 0; t < q; ++t) {
      left.push_back(first + r * q + (r + c + t) % q);
      right.push_back(first + c * q + (r + c + t) % q);
    }
  }
  return make_holders(world, left, right);
}

// Every rank takes factors of up to eight ranks, its own first.
inline Holders from_all(int64_t world) {
  std::vector<int64_t> left;
  std::vector<int64_t> right;
  for (int64_t rank = 0; rank < world; ++rank) {
    for (int64_t t = 0; t < kMaxPairs; ++t) {
      left.push_back((rank + t) % world);
      right.push_back((rank + kMaxPairs + t) % world);
    }
  }
  return make_holders(world, left, right);
}

template <class Random>
Holders at_random(int64_t world, Random& random) {
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  std::vector<int64_t> left(static_cast<size_t>(world * (1 + below(kMaxPairs))));
  std::vector<int64_t> right(left.size());
  for (int64_t& rank : left) rank = below(world);
  for (int64_t& rank : right) rank = below(world);
  return make_holders(world, left, right);
}

}  // namespace tpk::blocks::test

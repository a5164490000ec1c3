// Checks of arguments: a sentence where one makes no sense. Host only.
#pragma once

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tpk::detail {

inline void require(bool ok, const std::string& sentence) {
  if (!ok) throw std::invalid_argument(sentence);
}

// The same where it runs often: the sentence is made only if it is needed.
template <std::invocable Sentence>
void require(bool ok, const Sentence& sentence) {
  if (!ok) throw std::invalid_argument(sentence());
}

inline void check_extent(const char* what, int64_t value, int64_t least) {
  require(value >= least, [&] {
    return std::string(what) + " must be at least " + std::to_string(least) + ", but it is " +
           std::to_string(value) + ".";
  });
}

// Products of two counts stay at or below 2^60, so twice one times another still leaves room for sums.
constexpr int64_t kMaxCount = int64_t{1} << 30;
inline void check_count(const char* what, int64_t value) {
  require(value >= 1 && value <= kMaxCount, [&] {
    return std::string(what) + " must lie between 1 and 2^30, but it is " + std::to_string(value) + ".";
  });
}

}  // namespace tpk::detail

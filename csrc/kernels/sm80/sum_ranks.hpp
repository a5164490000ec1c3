// The sum over ranks of what they sent, and what follows it: see sum_ranks.cu.
#pragma once

#include <cstdint>

namespace tpk::sm80 {

enum class SumKind : int32_t { kBf16, kFp16, kFp32, kFp64 };

constexpr int64_t bytes_of(SumKind kind) {
  return kind == SumKind::kFp64 ? 8 : kind == SumKind::kFp32 ? 4 : 2;
}

constexpr int kSumThreads = 256;
constexpr int kSumCtas = 4;  // of a multiprocessor, at least
constexpr int kUnitBytes = 16;

// Pieces, own, residual and out are of one kind, and element i of each piece belongs to element i of the
// others.
struct SumParams {
  const void* pieces;    // [world, elements]
  const void* own;       // [elements]: taken instead of pieces[own_rank], which may be -1
  const void* bias;      // [n]; null: none. Element i gets that of column (first_column + i) % n.
  const void* residual;  // [elements]; null: none
  void* out;             // [elements]
  int64_t elements;
  int64_t n;  // 1 without a bias
  int64_t first_column;
  int32_t world;
  int32_t own_rank;
  SumKind kind;
  SumKind bias_kind;   // kFp64 only if kind is
  bool in_units;       // all of these can be read and written 16 bytes at a time: none ends inside 16
  bool bias_in_units;  // bias too, and no row of it ends inside 16 bytes of the others
};

// For cudaLaunchKernel, kSumThreads threads; argument: SumParams.
const void* sum_ranks_function(const SumParams& params);

}  // namespace tpk::sm80

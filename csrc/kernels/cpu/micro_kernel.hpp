// The innermost product: a block of MR x NR sums in vector registers, from packed panels.
//
// It is written once over compiler vectors (GCC and Clang), and compiled for every instruction set in the
// functions of multiply.cpp, into which all of this is inlined.
#pragma once

#include <cstdint>

#define TPK_INLINE inline __attribute__((always_inline))

namespace tpk::cpu {

// kRows x (two vectors of columns) of sums, two vectors of b and a broadcast a must fit into the registers.
struct Baseline {  // SSE2 or NEON: 16 registers or more
  static constexpr int kRows = 4;
  static constexpr int kBytes = 16;
};
struct Avx2 {  // 16 registers
  static constexpr int kRows = 6;
  static constexpr int kBytes = 32;
};
struct Avx512 {  // 32 registers
  static constexpr int kRows = 8;
  static constexpr int kBytes = 64;
};

// Multiples of every Micro::kRows and kColumns: buffers rounded up to them hold whole panels.
constexpr int64_t kPanelRows = 24;
constexpr int64_t kPanelColumns = 32;

template <typename T, typename Isa>
struct Micro {
  typedef T Vector __attribute__((vector_size(Isa::kBytes), aligned(sizeof(T)), may_alias));
  static constexpr int64_t kRows = Isa::kRows;
  static constexpr int64_t kLanes = Isa::kBytes / sizeof(T);
  static constexpr int64_t kColumns = 2 * kLanes;

  // c[kRows][ldc] += a[depth][kRows] * b[depth][kColumns].
  static TPK_INLINE void run(int64_t depth, const T* __restrict a, const T* __restrict b, T* __restrict c,
                             int64_t ldc) {
    Vector sum[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = *reinterpret_cast<const Vector*>(c + r * ldc);
      sum[r][1] = *reinterpret_cast<const Vector*>(c + r * ldc + kLanes);
    }
    for (int64_t k = 0; k < depth; ++k) {
      const Vector b0 = *reinterpret_cast<const Vector*>(b);
      const Vector b1 = *reinterpret_cast<const Vector*>(b + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sum[r][0] += a[r] * b0;
        sum[r][1] += a[r] * b1;
      }
      a += kRows;
      b += kColumns;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      *reinterpret_cast<Vector*>(c + r * ldc) = sum[r][0];
      *reinterpret_cast<Vector*>(c + r * ldc + kLanes) = sum[r][1];
    }
  }
};

}  // namespace tpk::cpu

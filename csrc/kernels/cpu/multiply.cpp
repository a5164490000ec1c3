#include "kernels/cpu/multiply.hpp"

#include <cstring>

#include "kernels/cpu/half.hpp"

namespace tpk::cpu {
namespace {

// Panels of kWidth rows, depth after depth: out[panel][depth][kWidth], missing rows zero. src is indexed
// [row, k]; for b its roles are exchanged. The loops run along the unit stride where there is one.
template <typename In, typename Acc, int64_t kWidth>
TPK_INLINE void pack(const In* src, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth,
                     Acc* out) {
  for (int64_t first = 0; first < rows; first += kWidth, out += kWidth * depth) {
    const In* panel = src + first * row_stride;
    const int64_t count = min64(kWidth, rows - first);
    if (count < kWidth) std::memset(out, 0, sizeof(Acc) * kWidth * depth);
    if (count == kWidth && row_stride == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t r = 0; r < kWidth; ++r) out[k * kWidth + r] = convert<Acc>(panel[k * k_stride + r]);
      }
    } else if (count == kWidth && k_stride == 1) {
      // Blocks of a few k at a time: the writes of a block stay within a few cache lines.
      constexpr int64_t kBlock = 16;
      const int64_t whole = depth / kBlock * kBlock;
      for (int64_t k0 = 0; k0 < whole; k0 += kBlock) {
        for (int64_t r = 0; r < kWidth; ++r) {
          const In* row = panel + r * row_stride + k0;
          for (int64_t k = 0; k < kBlock; ++k) out[(k0 + k) * kWidth + r] = convert<Acc>(row[k]);
        }
      }
      for (int64_t k = whole; k < depth; ++k) {
        for (int64_t r = 0; r < kWidth; ++r) out[k * kWidth + r] = convert<Acc>(panel[r * row_stride + k]);
      }
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t r = 0; r < count; ++r) {
          out[k * kWidth + r] = convert<Acc>(panel[r * row_stride + k * k_stride]);
        }
      }
    }
  }
}

template <typename In, typename Acc, typename Isa>
TPK_INLINE void multiply(Acc* acc, int64_t ld, const Operand& a, const Operand& b, int64_t rows,
                         int64_t columns, int64_t depth, Acc* a_panels, Acc* b_panels) {
  using M = Micro<Acc, Isa>;
  pack<In, Acc, M::kRows>(static_cast<const In*>(a.data), a.row_stride, a.column_stride, rows, depth,
                          a_panels);
  pack<In, Acc, M::kColumns>(static_cast<const In*>(b.data), b.column_stride, b.row_stride, columns, depth,
                             b_panels);
  // A panel of b stays in the first cache while all panels of a, in the second, pass by.
  for (int64_t n = 0; n < columns; n += M::kColumns) {
    for (int64_t m = 0; m < rows; m += M::kRows) {
      M::run(depth, a_panels + m * depth, b_panels + n * depth, acc + m * ld + n, ld);
    }
  }
}

#define TPK_MULTIPLY_FOR(function, isa, target)                                                \
  template <typename In, typename Acc>                                                         \
  target void function(Acc* acc, int64_t ld, const Operand& a, const Operand& b, int64_t rows, \
                       int64_t columns, int64_t depth, Acc* a_panels, Acc* b_panels) {         \
    multiply<In, Acc, isa>(acc, ld, a, b, rows, columns, depth, a_panels, b_panels);           \
  }

TPK_MULTIPLY_FOR(multiply_baseline, Baseline, )
#if defined(__x86_64__)
TPK_MULTIPLY_FOR(multiply_avx2, Avx2, __attribute__((target("avx2,fma"))))
TPK_MULTIPLY_FOR(multiply_avx512, Avx512,
                 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif
#undef TPK_MULTIPLY_FOR

enum class IsaLevel { kBaseline, kAvx2, kAvx512 };

IsaLevel isa_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return IsaLevel::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return IsaLevel::kAvx2;
#endif
  return IsaLevel::kBaseline;
}

template <typename In, typename Acc>
Multiply<Acc> select() {
#if defined(__x86_64__)
  switch (isa_level()) {
    case IsaLevel::kAvx512:
      return &multiply_avx512<In, Acc>;
    case IsaLevel::kAvx2:
      return &multiply_avx2<In, Acc>;
    case IsaLevel::kBaseline:
      break;
  }
#endif
  return &multiply_baseline<In, Acc>;
}

}  // namespace

template <>
Multiply<double> select_multiply<double>(DType) {
  return select<double, double>();
}

template <>
Multiply<float> select_multiply<float>(DType in) {
  if (in == DType::kBFloat16) return select<BFloat16, float>();
  if (in == DType::kFloat16) return select<Float16, float>();
  return select<float, float>();
}

const char* instruction_set() {
  switch (isa_level()) {
    case IsaLevel::kAvx512:
      return "avx512";
    case IsaLevel::kAvx2:
      return "avx2";
    case IsaLevel::kBaseline:
      break;
  }
  return "baseline";
}

}  // namespace tpk::cpu

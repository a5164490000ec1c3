// Which operands and outputs TMA can take, and how. Pure functions, tested on the CPU.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/gemm_call.hpp"
#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

// A matrix as TMA sees it: rows of contiguous elements. Strides in bytes, multiples of 16.
struct TensorView {
  void* data = nullptr;
  int64_t inner = 1;  // extents
  int64_t outer = 1;
  int64_t batch = 1;
  int64_t outer_stride = 16;
  int64_t batch_stride = 16;
};

struct OperandView {
  TensorView tensor;
  Major major = Major::kK;
  int32_t batch_step = 1;  // 0: the same matrix for every batch
};

namespace detail {

constexpr int64_t kTmaAlignment = 16;
constexpr int64_t kMostStride = int64_t{1} << 40;

// A stride that TMA takes; where the extent is 1 nothing is multiplied by it, and any will do.
inline std::optional<int64_t> tma_stride(int64_t extent, int64_t bytes) {
  if (extent <= 1) return kTmaAlignment;
  if (bytes <= 0 || bytes % kTmaAlignment != 0 || bytes >= kMostStride) return std::nullopt;
  return bytes;
}

inline std::optional<TensorView> view(void* data, int64_t element_bytes, int64_t inner, int64_t inner_stride,
                                      int64_t outer, int64_t outer_stride, int64_t batch,
                                      int64_t batch_stride) {
  if (inner > 1 && inner_stride != 1) return std::nullopt;
  if (reinterpret_cast<uintptr_t>(data) % kTmaAlignment != 0) return std::nullopt;
  const auto rows = tma_stride(outer, outer_stride * element_bytes);
  const auto batches = tma_stride(batch, batch_stride * element_bytes);
  if (!rows || !batches) return std::nullopt;
  return TensorView{data, inner, outer, batch, *rows, *batches};
}

}  // namespace detail

// outer: extent and stride of M for A, of N for B. Of 8-bit elements wgmma takes K contiguous only.
inline std::optional<OperandView> view_operand(const Matrix& m, int64_t batch, int64_t outer,
                                               int64_t outer_stride, int64_t k, int64_t k_stride,
                                               int element_bytes = kElementBytes) {
  OperandView o;
  o.batch_step = batch > 1 && m.batch_stride == 0 ? 0 : 1;
  const int64_t batches = o.batch_step == 0 ? 1 : batch;
  for (const Major major : {Major::kK, Major::kOuter}) {
    if (element_bytes == 1 && major == Major::kOuter) continue;
    const auto t =
        major == Major::kK
            ? detail::view(m.data, element_bytes, k, k_stride, outer, outer_stride, batches, m.batch_stride)
            : detail::view(m.data, element_bytes, outer, outer_stride, k, k_stride, batches, m.batch_stride);
    if (!t) continue;
    o.tensor = *t;
    o.major = major;
    return o;
  }
  return std::nullopt;
}

// Operands of a call.
struct PairView {
  OperandView a;
  OperandView b;
};

struct Operands : PairView {
  PairView more[kMaxPairs - 1];
  OperandView gate;
  OperandView own;  // rows of a; no data: none
};

// An output [batch, rows, cols], or nothing if it must be stored element by element.
inline std::optional<TensorView> view_output(const Matrix& m, int64_t batch, int64_t rows, int64_t cols) {
  return detail::view(m.data, bytes_of(m.kind), cols, m.col_stride, rows, m.row_stride, batch,
                      m.batch_stride);
}

}  // namespace tpk::sm90a

// How the portable kernel reads and writes the matrices of a call. Pure functions, tested on the CPU.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/gemm_call.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/params.hpp"

namespace tpk::sm80 {

namespace detail {

// A stride that is never multiplied by anything but 0 does not matter, whatever it says.
constexpr int64_t used(int64_t extent, int64_t stride) { return extent > 1 ? stride : 0; }

inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace detail

// outer: extent and stride of M for A, of N for B.
inline std::pair<Operand, OperandLayout> read_operand(const Matrix& t, int64_t batch, int64_t outer,
                                                      int64_t outer_stride, int64_t k, int64_t k_stride) {
  const int64_t batch_step = detail::used(batch, t.batch_stride);
  const int64_t outer_step = detail::used(outer, outer_stride);
  const int64_t k_step = detail::used(k, k_stride);
  const Operand o{t.data, batch_step * kElementBytes, outer_step * kElementBytes, k_step * kElementBytes};
  const bool aligned = detail::is_aligned(t.data, kChunkBytes) && batch_step % kChunkElements == 0;
  const bool k_contiguous = k <= 1 || k_stride == 1;
  const bool outer_contiguous = outer <= 1 || outer_stride == 1;
  if (aligned && k_contiguous && outer_step % kChunkElements == 0) return {o, OperandLayout::kKMajor};
  if (aligned && outer_contiguous && k_step % kChunkElements == 0) return {o, OperandLayout::kOuterMajor};
  return {o, OperandLayout::kStrided};
}

inline std::pair<Operand, OperandLayout> read_left(const Matrix& a, const Problem& p) {
  return read_operand(a, p.batch, p.m, a.row_stride, p.k, a.col_stride);
}
inline std::pair<Operand, OperandLayout> read_right(const Matrix& b, const Problem& p) {
  return read_operand(b, p.batch, p.n, b.col_stride, p.k, b.row_stride);
}

// Anything [batch, M, N] that the epilogue touches; nothing if there is no such matrix.
inline Output read_output(const Matrix& t, const Problem& p) {
  if (t.data == nullptr) return {};
  const int64_t bytes = bytes_of(t.kind);
  const int64_t batch = detail::used(p.batch, t.batch_stride);
  const int64_t row = detail::used(p.m, t.row_stride);
  const int64_t col = detail::used(p.n, t.col_stride);
  const bool vector = col == 1 && batch % 4 == 0 && row % 4 == 0 && detail::is_aligned(t.data, 4 * bytes);
  return {t.data, batch * bytes, row * bytes, col * bytes, vector};
}

}  // namespace tpk::sm80

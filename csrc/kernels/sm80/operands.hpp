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

// outer: extent and stride of M for A, of N for B. bytes: of an element.
inline std::pair<Operand, OperandLayout> read_operand(const Matrix& t, int64_t bytes, int64_t batch,
                                                      int64_t outer, int64_t outer_stride, int64_t k,
                                                      int64_t k_stride) {
  const int64_t batch_step = detail::used(batch, t.batch_stride);
  const int64_t outer_step = detail::used(outer, outer_stride);
  const int64_t k_step = detail::used(k, k_stride);
  const Operand o{t.data, batch_step * bytes, outer_step * bytes, k_step * bytes};
  const int64_t chunk = kChunkBytes / bytes;
  const bool aligned = detail::is_aligned(t.data, kChunkBytes) && batch_step % chunk == 0;
  const bool k_contiguous = k <= 1 || k_stride == 1;
  const bool outer_contiguous = outer <= 1 || outer_stride == 1;
  if (aligned && k_contiguous && outer_step % chunk == 0) return {o, OperandLayout::kKMajor};
  if (aligned && outer_contiguous && k_step % chunk == 0) return {o, OperandLayout::kOuterMajor};
  return {o, OperandLayout::kStrided};
}

inline std::pair<Operand, OperandLayout> read_left(const Matrix& a, Element e, const Problem& p) {
  return read_operand(a, bytes_of(e), p.batch, p.m, a.row_stride, p.k, a.col_stride);
}
inline std::pair<Operand, OperandLayout> read_right(const Matrix& b, Element e, const Problem& p) {
  return read_operand(b, bytes_of(e), p.batch, p.n, b.col_stride, p.k, b.row_stride);
}

// Anything [batch, M, N] that the epilogue touches; nothing if there is no such matrix.
inline Output read_output(const Matrix& t, Element e, const Problem& p) {
  if (t.data == nullptr) return {};
  const int64_t bytes = bytes_of(t.kind);
  const int64_t batch = detail::used(p.batch, t.batch_stride);
  const int64_t row = detail::used(p.m, t.row_stride);
  const int64_t col = detail::used(p.n, t.col_stride);
  const bool is_fp64 = e == Element::kFp64;
  const int64_t columns = is_fp64 ? 2 : 4;
  const bool vector = (t.kind == ScalarKind::kFp64) == is_fp64 && col == 1 && batch % columns == 0 &&
                      row % columns == 0 && detail::is_aligned(t.data, columns * bytes);
  return {t.data, batch * bytes, row * bytes, col * bytes, vector};
}

}  // namespace tpk::sm80

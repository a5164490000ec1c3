// Checks of arguments and settings that the CPU and the CUDA launcher share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>

#include "ops/sentence.hpp"

namespace tpk::ops {

inline std::string shape_text(const torch::stable::Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

// meaning names the dimensions, such as "[batch, M, N]".
inline void check_shape(const char* op, const char* name, const torch::stable::Tensor& t,
                        std::initializer_list<int64_t> expected, const char* meaning) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (const int64_t n : expected) same = same && t.size(i++) == n;
  if (same) return;
  std::string want;
  for (const int64_t n : expected) want += (want.empty() ? "" : ", ") + std::to_string(n);
  throw std::runtime_error(sentence(op, ": ", name, " must have shape ", meaning, " = [", want,
                                    "], but it has shape ", shape_text(t), "."));
}

// Bytes from the tensor's first element to behind its last; strides are not negative in torch.
inline int64_t byte_extent(const torch::stable::Tensor& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

// False if the two tensors provably have no byte in common: they lie apart, or they are blocks of columns of
// one row-major buffer, such as buffer[:, :k] and buffer[:, k:].
inline bool may_overlap(const torch::stable::Tensor& x, const torch::stable::Tensor& y) {
  if (x.numel() == 0 || y.numel() == 0) return false;
  const auto x_begin = reinterpret_cast<intptr_t>(x.data_ptr());
  const auto y_begin = reinterpret_cast<intptr_t>(y.data_ptr());
  if (x_begin + byte_extent(x) <= y_begin || y_begin + byte_extent(y) <= x_begin) return false;
  const int64_t pitch = x.dim() == 3 ? x.stride(1) * static_cast<int64_t>(x.element_size()) : 0;
  const auto row_bytes =
      [](const torch::stable::Tensor& t) {  // from a row's first element to behind its last
        return ((t.size(2) - 1) * t.stride(2) + 1) * static_cast<int64_t>(t.element_size());
      };
  const auto in_rows = [&](const torch::stable::Tensor& t) {
    const int64_t size = static_cast<int64_t>(t.element_size());
    return t.dim() == 3 && t.stride(1) * size == pitch && row_bytes(t) <= pitch &&
           (t.size(0) == 1 || t.stride(0) * size % pitch == 0);
  };
  if (pitch <= 0 || !in_rows(x) || !in_rows(y)) return true;
  const int64_t behind = ((y_begin - x_begin) % pitch + pitch) % pitch;  // from x's column 0 to y's
  return behind < row_bytes(x) || behind + row_bytes(y) > pitch;
}

// The tensor that is written must not share memory with one that is read.
inline void check_separate(const char* op, const char* name, const torch::stable::Tensor& read,
                           const char* written_name, const torch::stable::Tensor& written) {
  TPK_REQUIRE(!may_overlap(read, written), op, ": ", name, " must not share memory with ", written_name,
              ": it would be read after it was overwritten. Pass another ", written_name, ".");
}

// Bound of waits between workers of one product, TPK_KERNEL_TIMEOUT_S or the default.
inline double timeout_seconds(double default_seconds) {
  const char* text = std::getenv("TPK_KERNEL_TIMEOUT_S");
  if (text == nullptr || *text == '\0') return default_seconds;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  TPK_REQUIRE(*end == '\0' && seconds > 0.0,
              "TPK_KERNEL_TIMEOUT_S must be a number of seconds above 0, but it is '", text, "'.");
  return std::min(seconds, 1e6);
}

}  // namespace tpk::ops

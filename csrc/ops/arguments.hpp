// Checks of tensors and settings that the CPU and the CUDA launcher share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include "kernels/gemm_types.hpp"
#include "ops/sentence.hpp"

namespace tpk::ops {

// What checks and launchers ask of a tensor, read once: every question to the stable ABI is a call into
// torch. Sizes and strides stay the tensor's own.
struct View {
  const char* name = "";
  void* data = nullptr;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;  // null: there is no such tensor
  const int64_t* strides = nullptr;
  torch::headeronly::ScalarType type{};
  int64_t element_bytes = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;

  bool exists() const { return sizes != nullptr; }
  // A stride that is never multiplied by anything but 0 does not matter, whatever it says.
  int64_t stride(int64_t d) const { return sizes[d] > 1 ? strides[d] : 0; }
  bool is_empty() const { return std::find(sizes, sizes + dim, 0) != sizes + dim; }
};

inline View view_of(const char* name, const torch::stable::Tensor& t) {
  View v;
  v.name = name;
  v.data = t.data_ptr();
  const auto sizes = t.sizes();
  v.dim = static_cast<int64_t>(sizes.size());
  // A scalar has no sizes, and perhaps no array of them either.
  static constexpr int64_t kNone = 0;
  v.sizes = sizes.data() != nullptr ? sizes.data() : &kNone;
  v.strides = t.strides().data();
  v.type = t.scalar_type();
  v.element_bytes = static_cast<int64_t>(t.element_size());
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &v.device_type));
  v.device_index = t.get_device_index();
  return v;
}

inline std::string shape_text(const View& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim; ++i) text += (i > 0 ? ", " : "") + std::to_string(t.sizes[i]);
  return text + "]";
}

// meaning names the dimensions, such as "[batch, M, N]".
inline void check_shape(const char* op, const View& t, std::initializer_list<int64_t> expected,
                        const char* meaning) {
  if (std::equal(expected.begin(), expected.end(), t.sizes, t.sizes + t.dim)) return;
  std::string want;
  for (const int64_t n : expected) want += (want.empty() ? "" : ", ") + std::to_string(n);
  throw std::runtime_error(sentence(op, ": ", t.name, " must have shape ", meaning, " = [", want,
                                    "], but it has shape ", shape_text(t), "."));
}

// Bytes from the tensor's first element to behind its last; strides are not negative in torch.
inline int64_t byte_extent(const View& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim; ++i) last += (t.sizes[i] - 1) * t.strides[i];
  return (last + 1) * t.element_bytes;
}

// False if the two tensors provably have no byte in common: they lie apart, or they are blocks of columns of
// one row-major buffer, such as buffer[:, :k] and buffer[:, k:].
inline bool may_overlap(const View& x, const View& y) {
  if (x.is_empty() || y.is_empty()) return false;
  const auto x_begin = reinterpret_cast<intptr_t>(x.data);
  const auto y_begin = reinterpret_cast<intptr_t>(y.data);
  if (x_begin + byte_extent(x) <= y_begin || y_begin + byte_extent(y) <= x_begin) return false;
  const int64_t pitch = x.dim == 3 ? x.strides[1] * x.element_bytes : 0;
  const auto row_bytes = [](const View& t) {  // from a row's first element to behind its last
    return ((t.sizes[2] - 1) * t.strides[2] + 1) * t.element_bytes;
  };
  const auto in_rows = [&](const View& t) {
    return t.dim == 3 && t.strides[1] * t.element_bytes == pitch && row_bytes(t) <= pitch &&
           (t.sizes[0] == 1 || t.strides[0] * t.element_bytes % pitch == 0);
  };
  if (pitch <= 0 || !in_rows(x) || !in_rows(y)) return true;
  const int64_t behind = ((y_begin - x_begin) % pitch + pitch) % pitch;  // from x's column 0 to y's
  return behind < row_bytes(x) || behind + row_bytes(y) > pitch;
}

// Whether element by element the two are the same memory.
inline bool same_elements(const View& x, const View& y) {
  if (x.data != y.data || x.type != y.type || x.dim != y.dim) return false;
  for (int64_t i = 0; i < x.dim; ++i) {
    if (x.sizes[i] != y.sizes[i] || x.stride(i) != y.stride(i)) return false;
  }
  return true;
}

// The tensor that is written must not share memory with one that is read.
inline void check_separate(const char* op, const View& read, const View& written) {
  TPK_REQUIRE(!read.exists() || !written.exists() || !may_overlap(read, written), op, ": ", read.name,
              " must not share memory with ", written.name,
              ": it would be read after it was overwritten. Pass another ", written.name, ".");
}

inline Activation parse_activation(const char* op, std::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TPK_REQUIRE(name == "gelu_tanh", op,
              ": activation must be one of none, relu, silu, gelu or gelu_tanh, but it is '", name, "'.");
  return Activation::kGeluTanh;
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

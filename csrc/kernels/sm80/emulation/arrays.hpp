// Random matrices in any layout, and what the epilogue makes of them in double: for the tests of the portable
// kernel on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/gemm_call.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::emulation {

using sm80::pack_bf16;
using sm80::pack_fp16;
using sm80::unpack_bf16;
using sm80::unpack_fp16;

inline std::mt19937 random_numbers;

inline int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random_numbers() % (high - low + 1));
}

template <class T>
inline T pick(std::initializer_list<T> values) {
  return values.begin()[random_numbers() % values.size()];
}

inline double normal() { return std::normal_distribution<double>()(random_numbers); }

inline double get(ScalarKind kind, const unsigned char* p) {
  double d;
  float f;
  uint16_t bits;
  if (kind == ScalarKind::kFp64) {
    std::memcpy(&d, p, 8);
    return d;
  }
  if (kind == ScalarKind::kFp32) {
    std::memcpy(&f, p, 4);
    return f;
  }
  std::memcpy(&bits, p, 2);
  return kind == ScalarKind::kBf16 ? unpack_bf16(bits) : unpack_fp16(bits);
}

inline void put(ScalarKind kind, unsigned char* p, double d) {
  if (kind == ScalarKind::kFp64) {
    std::memcpy(p, &d, 8);
    return;
  }
  const auto f = static_cast<float>(d);
  if (kind == ScalarKind::kFp32) {
    std::memcpy(p, &f, 4);
    return;
  }
  const auto bits = static_cast<uint16_t>(kind == ScalarKind::kBf16 ? pack_bf16(f, 0) : pack_fp16(f, 0));
  std::memcpy(p, &bits, 2);
}

enum class Memory { kRows, kCols, kRowsOdd, kStrided };  // what is contiguous, and whether it is aligned

// A matrix [batch, rows, cols] somewhere in a buffer of 0xff bytes, which are NaN in every type.
class Array {
 public:
  Array(int64_t batch, int64_t rows, int64_t cols, ScalarKind kind, Memory memory, bool broadcast = false)
      : batch(batch), rows(rows), cols(cols), kind(kind), bytes(bytes_of(kind)) {
    const int64_t line = 16 / bytes;
    const int64_t fast = memory == Memory::kCols ? rows : cols;
    const int64_t slow = memory == Memory::kCols ? cols : rows;
    const int64_t step = memory == Memory::kStrided ? 3 : 1;
    const bool aligned = memory == Memory::kRows || memory == Memory::kCols;
    const int64_t pitch = aligned ? (fast + line - 1) / line * line + line : step * fast + 1;
    row_stride = memory == Memory::kCols ? step : pitch;
    col_stride = memory == Memory::kCols ? pitch : step;
    batch_stride = pitch * (slow + 1) + (aligned ? 0 : 3);
    buffer.assign(static_cast<size_t>((batch * batch_stride + 64) * bytes), 0xff);
    first =
        buffer.data() + (16 - reinterpret_cast<uintptr_t>(buffer.data()) % 16) % 16 + (aligned ? 0 : bytes);
    if (broadcast) batch_stride = 0;
  }
  // Of one batch, with value(row, col).
  template <class Value>
  Array(int64_t batch, int64_t rows, int64_t cols, ScalarKind kind, Memory memory, bool broadcast,
        Value value)
      : Array(batch, rows, cols, kind, memory, broadcast) {
    each([&](int64_t b, int64_t r, int64_t c) { put(kind, at(b, r, c), value(r, c)); });
  }
  Array(const Array&) = delete;

  unsigned char* at(int64_t b, int64_t r, int64_t c) const {
    return first + bytes * (b * batch_stride + r * row_stride + c * col_stride);
  }
  double operator()(int64_t b, int64_t r, int64_t c) const { return get(kind, at(b, r, c)); }

  template <class Do>
  void each(Do body) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) body(b, r, c);
      }
    }
  }
  void fill() {
    each([&](int64_t b, int64_t r, int64_t c) { put(kind, at(b, r, c), normal()); });
  }
  // Bytes beside the elements that are no longer 0xff.
  int64_t overwritten() const {
    std::vector<char> own(buffer.size(), 0);
    each([&](int64_t b, int64_t r, int64_t c) { std::memset(&own[at(b, r, c) - buffer.data()], 1, bytes); });
    int64_t count = 0;
    for (size_t i = 0; i < buffer.size(); ++i) count += own[i] == 0 && buffer[i] != 0xff;
    return count;
  }

  int64_t batch, rows, cols;
  ScalarKind kind;
  int64_t bytes;
  int64_t batch_stride, row_stride, col_stride;  // elements
  std::vector<unsigned char> buffer;
  unsigned char* first;
};

// As a call of the op has it.
inline Matrix matrix(const Array& t) { return {t.first, t.batch_stride, t.row_stride, t.col_stride, t.kind}; }

inline double reference(Activation kind, double x) {
  switch (kind) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  }
  return x;
}

inline double rounding(ScalarKind kind) {
  return kind == ScalarKind::kBf16   ? 0x1p-8
         : kind == ScalarKind::kFp16 ? 0x1p-11
         : kind == ScalarKind::kFp32 ? 0x1p-24
                                     : 0x1p-53;
}

// Of an operand in memory.
inline ScalarKind kind_of(Element e) {
  return e == Element::kBf16   ? ScalarKind::kBf16
         : e == Element::kFp16 ? ScalarKind::kFp16
         : e == Element::kFp64 ? ScalarKind::kFp64
                               : ScalarKind::kFp32;
}
// Error of a sum, as a part of the sizes of all that is added.
inline double sum_error(Element e) { return e == Element::kFp64 ? 1e-14 : e == Element::kTf32 ? 1e-3 : 1e-5; }
constexpr std::initializer_list<Element> kElements = {Element::kBf16, Element::kFp16, Element::kFp32,
                                                      Element::kTf32, Element::kFp64};
constexpr std::initializer_list<ScalarKind> kKinds = {ScalarKind::kBf16, ScalarKind::kFp16, ScalarKind::kFp32,
                                                      ScalarKind::kFp64};

// What the epilogue makes of element (i, r, c): kernels/gemm_call.hpp in double.
struct Expected {
  double preact;
  double out;
  double size;  // of all that was added
};

struct Epilogue {
  const Array* bias = nullptr;
  const Array* mul = nullptr;
  const Array* residual = nullptr;
  const Array* old = nullptr;
  double alpha = 1;
  Activation activation = Activation::kNone;
};

inline Expected expect(const Array& a, const Array& b, const Epilogue& e, int64_t i, int64_t r, int64_t c) {
  double sum = 0;
  double size = 0;
  for (int64_t k = 0; k < a.cols; ++k) {
    const double product = static_cast<double>(a(i, r, k)) * b(i, k, c);
    sum += product;
    size += std::abs(product);
  }
  sum *= e.alpha;
  size *= std::abs(e.alpha);
  const auto add = [&](double x) {
    sum += x;
    size += std::abs(x);
  };
  if (e.bias != nullptr) add((*e.bias)(0, 0, c));
  const double preact = sum;
  if (e.mul != nullptr) {
    const double factor = reference(e.activation, (*e.mul)(i, r, c));
    sum *= factor;
    size *= std::abs(factor) + 1;
  } else {
    sum = reference(e.activation, sum);
  }
  if (e.residual != nullptr) add((*e.residual)(i, r, c));
  if (e.old != nullptr) add((*e.old)(i, r, c));
  return {preact, sum, size};
}

}  // namespace tpk::emulation

#include "kernels/cpu/epilogue.hpp"

#include <cmath>

#include "kernels/cpu/half.hpp"

namespace tpk::cpu {
namespace {

// Calls f with a null pointer of the element type that dtype names.
template <typename F>
void with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(static_cast<double*>(nullptr));
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Float16*>(nullptr));
  }
}

// Calls f(sum, element) for every element of the view under the tile.
template <typename Acc, typename F>
void for_each(const MatrixView& view, const TileBounds& t, Acc* acc, int64_t ld, F&& f) {
  with_element_type(view.dtype, [&](auto* null) {
    using Element = std::remove_pointer_t<decltype(null)>;
    Element* base = static_cast<Element*>(view.data) + t.batch * view.stride[0] + t.row * view.stride[1] +
                    t.column * view.stride[2];
    for (int64_t i = 0; i < t.rows; ++i) {
      Element* row = base + i * view.stride[1];
      if (view.stride[2] == 1) {
        for (int64_t j = 0; j < t.columns; ++j) f(acc[i * ld + j], row[j]);
      } else {
        for (int64_t j = 0; j < t.columns; ++j) f(acc[i * ld + j], row[j * view.stride[2]]);
      }
    }
  });
}

template <typename Acc>
void store(const MatrixView& view, const TileBounds& t, Acc* acc, int64_t ld) {
  for_each(view, t, acc, ld, [](Acc sum, auto& element) {
    element = convert<std::remove_reference_t<decltype(element)>>(sum);
  });
}

template <typename Acc>
void add(const MatrixView& view, const TileBounds& t, Acc* acc, int64_t ld) {
  for_each(view, t, acc, ld, [](Acc& sum, const auto& element) { sum += convert<Acc>(element); });
}

// Calls f with the activation as a function of Acc.
template <typename Acc, typename F>
void with_activation(Activation activation, F&& f) {
  constexpr Acc kHalf = Acc(0.5);
  switch (activation) {
    case Activation::kNone:
      return f([](Acc x) { return x; });
    case Activation::kRelu:  // not max: NaN stays NaN
      return f([](Acc x) { return x < 0 ? Acc(0) : x; });
    case Activation::kSilu:
      return f([](Acc x) { return x / (Acc(1) + std::exp(-x)); });
    case Activation::kGelu:
      return f([](Acc x) { return kHalf * x * (Acc(1) + std::erf(x * Acc(0.70710678118654752))); });
    case Activation::kGeluTanh:
      return f([](Acc x) {
        const Acc inner = Acc(0.79788456080286536) * (x + Acc(0.044715) * x * x * x);
        return kHalf * x * (Acc(1) + std::tanh(inner));
      });
  }
}

template <typename Acc, typename F>
void apply(const TileBounds& t, Acc* acc, int64_t ld, F&& f) {
  for (int64_t i = 0; i < t.rows; ++i) {
    for (int64_t j = 0; j < t.columns; ++j) acc[i * ld + j] = f(acc[i * ld + j]);
  }
}

template <typename Acc>
void activate(Activation activation, const TileBounds& t, Acc* acc, int64_t ld) {
  if (activation == Activation::kNone) return;
  with_activation<Acc>(activation, [&](auto f) { apply(t, acc, ld, f); });
}

// acc *= activation(mul).
template <typename Acc>
void multiply_activated(Activation activation, const MatrixView& mul, const TileBounds& t, Acc* acc,
                        int64_t ld) {
  with_activation<Acc>(activation, [&](auto f) {
    for_each(mul, t, acc, ld, [&](Acc& sum, const auto& element) { sum *= f(convert<Acc>(element)); });
  });
}

}  // namespace

template <typename Acc>
void epilogue(const GemmArgs& args, const MatrixView& mul, const TileBounds& tile, Acc* acc, int64_t ld) {
  const Acc alpha = static_cast<Acc>(args.alpha);
  if (alpha != Acc(1)) apply(tile, acc, ld, [=](Acc x) { return alpha * x; });
  if (args.bias.data != nullptr) {
    MatrixView rows = args.bias;  // the same for every batch and row
    rows.stride[0] = rows.stride[1] = 0;
    add(rows, tile, acc, ld);
  }
  if (args.preact.data != nullptr) store(args.preact, tile, acc, ld);
  if (mul.data != nullptr) {
    multiply_activated(args.activation, mul, tile, acc, ld);
  } else {
    activate(args.activation, tile, acc, ld);
  }
  if (args.residual.data != nullptr) add(args.residual, tile, acc, ld);
  if (args.accumulate) add(args.out, tile, acc, ld);
  store(args.out, tile, acc, ld);
}

template void epilogue<float>(const GemmArgs&, const MatrixView&, const TileBounds&, float*, int64_t);
template void epilogue<double>(const GemmArgs&, const MatrixView&, const TileBounds&, double*, int64_t);

}  // namespace tpk::cpu

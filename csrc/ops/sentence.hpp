// Errors as sentences, and what they are made of. Without iostreams: a toolchain that links the C++ standard
// library statically gives an extension a second, half-initialised set of locales, and the first `<<` in it
// crashes (seen with a g++ wrapper of a container image).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace tpk::ops {

template <class T>
std::string to_text(const T& part) {
  if constexpr (std::is_same_v<T, torch::headeronly::ScalarType>) {
    return torch::headeronly::toString(part);
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(part);
  } else {
    return std::string(std::string_view(part));
  }
}

template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::string text;
  ((text += to_text(parts)), ...);
  return text;
}

}  // namespace tpk::ops

// Throws std::runtime_error (RuntimeError in Python) with the other arguments joined, unless the first is
// true. A macro, so that the sentence costs nothing where all is well.
#define TPK_REQUIRE(ok, ...)                                                \
  do {                                                                      \
    if (!(ok)) throw std::runtime_error(::tpk::ops::sentence(__VA_ARGS__)); \
  } while (false)

// From run-time choices to a kernel. Only the launcher includes this: it names every instantiation.
#pragma once

#include "kernels/sm80/launch.hpp"

namespace tpk::sm80 {

template <Element kElement>
KernelInfo find_kernel(OperandLayout a, OperandLayout b, int tile) {
  constexpr auto kK = OperandLayout::kKMajor;
  constexpr auto kOuter = OperandLayout::kOuterMajor;
  constexpr auto kAny = OperandLayout::kStrided;
  if (a == kAny || b == kAny) return kernel_info<kElement, kAny, kAny>(tile);
  if (a == kK) return b == kK ? kernel_info<kElement, kK, kK>(tile) : kernel_info<kElement, kK, kOuter>(tile);
  return b == kK ? kernel_info<kElement, kOuter, kK>(tile) : kernel_info<kElement, kOuter, kOuter>(tile);
}

inline KernelInfo find_kernel(Element element, OperandLayout a, OperandLayout b, int tile) {
  return with_element(element, [=](auto of) { return find_kernel<of.value>(a, b, tile); });
}

}  // namespace tpk::sm80

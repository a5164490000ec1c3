// From run-time choices to a kernel. Only the launcher includes this: it names every instantiation.
#pragma once

#include <utility>

#include "kernels/sm90a/launch.hpp"
#include "kernels/sm90a/tiles.hpp"

namespace tpk::sm90a {

// Of the kernel that walks a schedule. a, b: how the product's operands lie.
template <Element kElement>
KernelInfo find_kernel(TileId tile, Major a, Major b) {
  switch (tile) {
    case TileId::k128x256:
      return kernel_info<Tile128x256, kElement>(a, b);
    case TileId::k256x128:
      return kernel_info<Tile256x128, kElement>(a, b);
    case TileId::k256x192:
      return kernel_info<Tile256x192, kElement>(a, b);
    case TileId::k128x192:
      return kernel_info<Tile128x192, kElement>(a, b);
    case TileId::k192x192:
      return kernel_info<Tile192x192, kElement>(a, b);
    default:
      break;
  }
  return kernel_info<Tile128x128, kElement>(a, b);
}

template <Element kElement, int kKernel = 0>
KernelInfo find_one_tile_kernel(int kernel, Major rows, Major columns) {
  if constexpr (kKernel + 1 < kNumOneTileKernels) {
    if (kernel != kKernel) return find_one_tile_kernel<kElement, kKernel + 1>(kernel, rows, columns);
  }
  return one_tile_kernel_info<kElement, kKernel>(rows, columns);
}

inline KernelInfo find_kernel(TileId tile, Element element, Major a, Major b) {
  if (is_one_tile(tile)) {
    const OneTileShape t = one_tile_shape(tile);
    if (t.swapped) std::swap(a, b);
    return element == Element::kBf16 ? find_one_tile_kernel<Element::kBf16>(t.kernel, a, b)
                                     : find_one_tile_kernel<Element::kFp16>(t.kernel, a, b);
  }
  if (tile == TileId::kScaled128x256) return scaled_kernel_info<ScaledTile128x256>();
  if (tile == TileId::kScaled128x128) return scaled_kernel_info<ScaledTile128x128>();
  return element == Element::kBf16 ? find_kernel<Element::kBf16>(tile, a, b)
                                   : find_kernel<Element::kFp16>(tile, a, b);
}

}  // namespace tpk::sm90a

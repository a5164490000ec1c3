// From run-time choices to a kernel. Only the launcher includes this: it names every instantiation.
#pragma once

#include "kernels/sm90a/launch.hpp"

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

template <Element kElement>
KernelInfo find_one_tile_kernel(TileId tile, Major a, Major b) {
  return tile_shape(tile).bn == 64 ? one_tile_kernel_info<kElement, 64>(b, a)
                                   : one_tile_kernel_info<kElement, 128>(b, a);
}

inline KernelInfo find_kernel(TileId tile, Element element, Major a, Major b) {
  if (is_swapped(tile)) {
    return element == Element::kBf16 ? find_one_tile_kernel<Element::kBf16>(tile, a, b)
                                     : find_one_tile_kernel<Element::kFp16>(tile, a, b);
  }
  if (tile == TileId::kScaled128x256) return scaled_kernel_info<ScaledTile128x256>();
  if (tile == TileId::kScaled128x128) return scaled_kernel_info<ScaledTile128x128>();
  return element == Element::kBf16 ? find_kernel<Element::kBf16>(tile, a, b)
                                   : find_kernel<Element::kFp16>(tile, a, b);
}

}  // namespace tpk::sm90a

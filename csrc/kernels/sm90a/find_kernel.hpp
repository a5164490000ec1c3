// From run-time choices to a kernel. Only the launcher includes this: it names every instantiation.
#pragma once

#include "kernels/sm90a/launch.hpp"

namespace tpk::sm90a {

// a, b: how the product's operands lie, which swapped tiles take the other way round.
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
    case TileId::k64x128s:
      return kernel_info<Tile64x128s, kElement>(b, a);
    case TileId::k128x128:
    case TileId::kScaled128x256:
    case TileId::kScaled128x128:
      break;
  }
  return kernel_info<Tile128x128, kElement>(a, b);
}

inline KernelInfo find_kernel(TileId tile, Element element, Major a, Major b) {
  if (tile == TileId::kScaled128x256) return scaled_kernel_info<ScaledTile128x256>();
  if (tile == TileId::kScaled128x128) return scaled_kernel_info<ScaledTile128x128>();
  return element == Element::kBf16 ? find_kernel<Element::kBf16>(tile, a, b)
                                   : find_kernel<Element::kFp16>(tile, a, b);
}

}  // namespace tpk::sm90a

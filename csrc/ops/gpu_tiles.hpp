// Names of tiles on GPUs: which kernel they belong to.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "host/plan.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm90a/plan.hpp"

namespace tpk::ops {

// "128x256x64", the tile of a CTA, or with the cluster: "128x256x64/2x1".
inline bool is_hopper_tile(std::string_view text) { return !text.empty() && sm90a::is_tile_name(text); }

// Throws std::invalid_argument with a sentence unless some kernel has the tile; "" leaves the choice.
inline void check_gpu_tile(std::string_view text, Element element) {
  if (text.empty() || is_hopper_tile(text)) return;
  try {
    tiles_named(text, sm80::tile_shapes(element));
  } catch (const std::invalid_argument& error) {
    if (element != Element::kBf16 && element != Element::kFp16) throw;
    throw std::invalid_argument(std::string(error.what()) + " The Hopper kernel has " +
                                sm90a::tile_names(false) + ", each also with a cluster, such as " +
                                name(sm90a::tile_shape(sm90a::TileId::k128x256)) + "/2x1.");
  }
}

}  // namespace tpk::ops

// Tensor maps for TMA, without linking to the driver.
#pragma once

#include <cuda.h>

#include "kernels/sm90a/operands.hpp"

namespace tpk::sm90a {

// A map of boxes of box_inner x box_outer elements with a 128-byte swizzle. box_inner elements are 128 bytes.
// Throws std::runtime_error with a sentence if the driver refuses.
CUtensorMap encode_tensor_map(const TensorView& t, ScalarKind kind, uint32_t box_inner, uint32_t box_outer);
// The same, of elements of 8 bits of any kind.
CUtensorMap encode_byte_map(const TensorView& t, uint32_t box_inner, uint32_t box_outer);

}  // namespace tpk::sm90a

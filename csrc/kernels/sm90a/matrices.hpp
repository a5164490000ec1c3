// Matrices of a call as kernels are told of them: outputs, what is added, and the boxes of operands.
#pragma once

#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/tensor_map.hpp"

namespace tpk::sm90a {

// A stride that is never multiplied by anything but 0 does not matter, whatever it says.
inline Output output_of(const Matrix& m, const Problem& p) {
  const int64_t bytes = bytes_of(m.kind);
  const bool whole_lines = p.n * bytes % 16 == 0 && view_output(m, p.batch, p.m, p.n).has_value();
  return {m.data, p.batch > 1 ? m.batch_stride * bytes : 0, p.m > 1 ? m.row_stride * bytes : 0,
          m.col_stride * bytes, whole_lines};
}

inline Addend addend_of(const Matrix& m, const Problem& p) {
  const Output o = output_of(m, p);
  return {o.data, o.batch_stride, o.row_stride, o.col_stride, m.kind};
}

// Boxes of an operand's stage: `extent` of the tile. parts: of so many CTAs that share it, each loads a part
// of the rows, or, outer-major, of K. outer_parts: where those differ.
inline CUtensorMap operand_map(const OperandView& o, Element element, int64_t extent, int32_t parts,
                               int32_t outer_parts = 0) {
  const auto kind = element == Element::kBf16 ? ScalarKind::kBf16 : ScalarKind::kFp16;
  if (o.major == Major::kK) {
    const auto rows = static_cast<uint32_t>(extent / parts);
    if (element == Element::kFp8) return encode_byte_map(o.tensor, kScaledBK, rows);
    return encode_tensor_map(o.tensor, kind, kBK, rows);
  }
  return encode_tensor_map(o.tensor, kind, kChunkOuter, kBK / (outer_parts > 0 ? outer_parts : parts));
}

}  // namespace tpk::sm90a

#include "kernels/sm90a/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace tpk::sm90a {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled: install one for CUDA 12 or newer.");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType data_type(ScalarKind kind) {
  switch (kind) {
    case ScalarKind::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ScalarKind::kFp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case ScalarKind::kFp32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case ScalarKind::kFp64:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
}

CUtensorMap encode_map(const TensorView& t, CUtensorMapDataType type, uint32_t box_inner,
                       uint32_t box_outer) {
  static const Encode encode = find_encode();
  CUtensorMap map{};
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(t.inner), static_cast<cuuint64_t>(t.outer),
                                static_cast<cuuint64_t>(t.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(t.outer_stride),
                                static_cast<cuuint64_t>(t.batch_stride)};
  const cuuint32_t box[] = {box_inner, box_outer, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  // Fetching 256 bytes for each row of a box helps where K is long and M small (4 % at 128x7168x16384), but
  // costs a sixth at 3000x1536x9000, whose rows start anywhere in a line.
  const auto in_lines = [](int64_t bytes) { return bytes % kSwizzleBytes == 0; };
  const bool whole = in_lines(reinterpret_cast<int64_t>(t.data)) &&
                     (t.outer <= 1 || in_lines(t.outer_stride)) && (t.batch <= 1 || in_lines(t.batch_stride));
  const auto promotion = whole ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult result =
      encode(&map, type, 3, t.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result) +
                             " for extents " + std::to_string(t.inner) + " x " + std::to_string(t.outer) +
                             " x " + std::to_string(t.batch) + ", strides " + std::to_string(t.outer_stride) +
                             " and " + std::to_string(t.batch_stride) +
                             " bytes: this is a bug of tpkernels.");
  }
  return map;
}

}  // namespace

CUtensorMap encode_tensor_map(const TensorView& t, ScalarKind kind, uint32_t box_inner, uint32_t box_outer) {
  return encode_map(t, data_type(kind), box_inner, box_outer);
}

CUtensorMap encode_byte_map(const TensorView& t, uint32_t box_inner, uint32_t box_outer) {
  return encode_map(t, CU_TENSOR_MAP_DATA_TYPE_UINT8, box_inner, box_outer);
}

}  // namespace tpk::sm90a

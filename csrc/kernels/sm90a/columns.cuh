// The epilogue of one_tile.cuh: 8 adjacent columns of one row of the product, in one thread. All that
// kernels/gemm_call.hpp says, with 16-byte accesses where rows allow it and by elements elsewhere.
#pragma once

#include "kernels/sm90a/finish.cuh"
#include "kernels/sm90a/one_tile_params.hpp"

namespace tpk::sm90a {

constexpr int kLaneColumns = 8;  // that a thread finishes

struct LaneColumns {
  int first;
  int count;  // 1 to 8 exist
};

__device__ __forceinline__ void load_column_bias(const OneTileParams& p, int batch,
                                                 const LaneColumns& columns, float (&bias)[kLaneColumns]) {
  const char* from = static_cast<const char*>(p.bias) + batch * p.bias_batch_stride +
                     static_cast<int64_t>(columns.first) * p.bias_stride;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    bias[i] =
        p.bias != nullptr && i < columns.count ? load_scalar(p.bias_kind, from + i * p.bias_stride) : 0.0f;
  }
}

// Where a lane's columns of one token begin in a matrix of the output's shape.
template <class Matrix>
__device__ __forceinline__ int64_t offset_in(const Matrix& t, int batch, int token, int column) {
  return batch * t.batch_stride + token * t.row_stride + column * t.col_stride;
}

// v to an output, rounded; add (fp32): to what is there, in L2.
__device__ __forceinline__ void store_columns(const Output& to, ScalarKind kind, bool add, int batch,
                                              int token, const LaneColumns& columns,
                                              const float (&v)[kLaneColumns]) {
  char* p = static_cast<char*>(to.data) + offset_in(to, batch, token, columns.first);
  if (!to.aligned) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (i < columns.count) store_scalar(kind, p + i * to.col_stride, v[i]);
    }
    return;
  }
  if (kind == ScalarKind::kFp32) {  // whole chunks of 4 columns exist
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      if (i >= columns.count) break;
      if (add) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + 4 * i), "f"(v[i]),
                     "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3])
                     : "memory");
      } else {
        *reinterpret_cast<float4*>(p + 4 * i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
      }
    }
    return;
  }
  *reinterpret_cast<uint4*>(p) = make_uint4(pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                                            pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
}

// v += t. whole: 2-byte elements in whole chunks of 8 columns.
__device__ __forceinline__ void add_columns(const Addend& t, bool whole, int batch, int token,
                                            const LaneColumns& columns, float (&v)[kLaneColumns]) {
  const char* p = static_cast<const char*>(t.data) + offset_in(t, batch, token, columns.first);
  if (whole) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    const uint32_t bits[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] += unpack_low(t.kind, bits[i]);
      v[2 * i + 1] += unpack_high(t.kind, bits[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (i < columns.count) v[i] += load_scalar(t.kind, p + i * t.col_stride);
  }
}

// What follows on the products of one token, in this lane's columns.
__device__ __forceinline__ void finish_columns(const OneTileParams& p, int batch, int token,
                                               const LaneColumns& columns, const float (&bias)[kLaneColumns],
                                               float (&v)[kLaneColumns]) {
  if (!p.gated) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) v[i] = p.alpha * v[i] + bias[i];
    if (p.preact.data != nullptr) store_columns(p.preact, p.out_kind, false, batch, token, columns, v);
    activate(p.activation, v);
  }
#pragma unroll 1
  for (int i = 0; i < p.num_late; ++i)
    add_columns(p.late[i], p.late_whole >> i & 1, batch, token, columns, v);
  store_columns(p.out, p.out_kind, p.reduce, batch, token, columns, v);
}

}  // namespace tpk::sm90a

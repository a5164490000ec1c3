// The way of a unit between registers and global memory, through a warp's own buffer in shared memory: whole
// lines are stored and loaded, 16 bytes a lane.
#pragma once

#include "kernels/sm90a/finish.cuh"

namespace tpk::sm90a {

// A buffer of 16 rows x 128 bytes (32 fp32 columns, or 64 of 2 bytes). Swizzled as TMA's 128-byte mode has
// it: chunk c of 16 bytes of row r lies at c ^ (r % 8).
struct StagingBuffer {
  int lane;
  int warp;  // of the warpgroup
  uint32_t address;

  // buffers: of the warpgroup's first warp.
  __device__ __forceinline__ explicit StagingBuffer(const unsigned char* buffers) {
    const int thread = thread_number();
    lane = thread % 32;
    warp = thread / 32 % 4;
    address = shared_address(buffers) + warp * kStagingBytes;
  }

  __device__ __forceinline__ uint32_t at(int row, int chunk) const {
    return address + row * kSwizzleBytes + ((chunk ^ (row & 7)) << 4);
  }
  // Where this lane's values of the upper 8 rows of the j-th 8 fp32 columns lie; of the lower 8: 1024 bytes
  // on.
  __device__ __forceinline__ uint32_t fragment(int j) const {
    return at(lane / 4, 2 * j + (lane & 3) / 2) + (lane & 1) * 8;
  }
  // Where column `lane` of fp32 lies in a row.
  __device__ __forceinline__ uint32_t column(int row) const { return at(row, lane / 4) + (lane & 3) * 4; }
  // Where this lane's row of the j-th block of 16 x 16 elements of 2 bytes lies, for stmatrix and ldmatrix.
  __device__ __forceinline__ uint32_t matrix_row(int j) const {
    const int block = lane / 8;
    return at(lane % 8 + 8 * (block & 1), 2 * j + block / 2);
  }
};

// 32 fp32 columns to the buffer.
__device__ __forceinline__ void stage_fp32(const StagingBuffer& to, const float* v) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t address = to.fragment(j);
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v[4 * j]), "f"(v[4 * j + 1])
                 : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address + 8 * kSwizzleBytes), "f"(v[4 * j + 2]),
                 "f"(v[4 * j + 3])
                 : "memory");
  }
}

// kValues values of a thread, rounded to 2 bytes, to the buffer.
template <ScalarKind kKind, int kValues>
__device__ __forceinline__ void stage_rounded(const StagingBuffer& to, const float* v) {
#pragma unroll
  for (int j = 0; j < kValues / 8; ++j) {
    const float* x = v + 8 * j;
    store_matrix_x4(to.matrix_row(j), pack(kKind, x[0], x[1]), pack(kKind, x[2], x[3]),
                    pack(kKind, x[4], x[5]), pack(kKind, x[6], x[7]));
  }
}

// 16 rows of the buffer to memory, kChunks of 16 bytes of each; columns are whole chunks. kAdd (fp32): added
// to what is there, in L2, each element once.
template <int kBytes, int kChunks, bool kAdd>
__device__ __forceinline__ void store_buffer(const Output& to, const UnitPlace& at, int shift,
                                             const StagingBuffer& from) {
  constexpr int kRows = 32 / kChunks;  // at a time
  __syncwarp();
  const int chunk = from.lane % kChunks;
  const int first = from.lane / kChunks;
  const int col = at.col + shift + chunk * (16 / kBytes);
  char* p = static_cast<char*>(to.data) + at.batch * to.batch_stride +
            static_cast<int64_t>(at.row + first) * to.row_stride + static_cast<int64_t>(col) * kBytes;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i, p += kRows * to.row_stride) {
    const int r = first + kRows * i;
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from.at(r, chunk))
                 : "memory");
    const bool exists = at.row + r < at.rows && col < at.cols;
    if (kAdd) {  // predicated by hand: the compiler would branch around it
      asm volatile(
          "{\n"
          ".reg .pred exists;\n"
          "setp.ne.b32 exists, %5, 0;\n"
          "@exists red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
          "}" ::"l"(p),
          "f"(__uint_as_float(x.x)), "f"(__uint_as_float(x.y)), "f"(__uint_as_float(x.z)),
          "f"(__uint_as_float(x.w)), "r"(static_cast<int>(exists))
          : "memory");
    } else if (exists) {
      *reinterpret_cast<uint4*>(p) = x;
    }
  }
  __syncwarp();  // the buffer may be written again
}

// A unit to an output whose columns are whole chunks; add: to what is there (fp32).
template <int kValues>
__device__ __forceinline__ void store_whole(const Output& to, ScalarKind kind, bool add, const UnitPlace& at,
                                            const float* v, const StagingBuffer& staging) {
  if (kind == ScalarKind::kFp32) {
#pragma unroll
    for (int half = 0; half < kValues / 16; ++half) {
      stage_fp32(staging, v + 16 * half);
      if (add) {
        store_buffer<4, 8, true>(to, at, 32 * half, staging);
      } else {
        store_buffer<4, 8, false>(to, at, 32 * half, staging);
      }
    }
    return;
  }
  if (kind == ScalarKind::kBf16) {
    stage_rounded<ScalarKind::kBf16, kValues>(staging, v);
  } else {
    stage_rounded<ScalarKind::kFp16, kValues>(staging, v);
  }
  store_buffer<2, kValues / 4, false>(to, at, 0, staging);
}

// A unit to any output, element by element, a row at a time.
__device__ __forceinline__ void store_strided(const Output& to, ScalarKind kind, const UnitPlace& at,
                                              const float (&v)[16], const StagingBuffer& staging) {
  stage_fp32(staging, v);
  __syncwarp();
  const int col = at.col + staging.lane;
  char* p =
      static_cast<char*>(to.data) + at.batch * to.batch_stride + at.row * to.row_stride + col * to.col_stride;
  const int rows = min(16, at.rows - at.row);
#pragma unroll 1
  for (int r = 0; col < at.cols && r < rows; ++r, p += to.row_stride) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(staging.column(r)) : "memory");
    store_scalar(kind, p, x);
  }
  __syncwarp();  // the buffer may be written again
}

// A finished unit to one output.
template <int kValues>
__device__ __forceinline__ void write_unit(const GemmParams& p, const Output& to, bool add,
                                           const UnitPlace& at, const float (&v)[kValues],
                                           const StagingBuffer& staging) {
  if (to.aligned) {
    store_whole<kValues>(to, p.out_kind, add, at, v, staging);
  } else {
    store_strided(to, p.out_kind, at, v, staging);
  }
}

// v += t, through any strides.
__device__ __forceinline__ void add_strided(const Addend& t, const UnitPlace& at, float (&v)[16],
                                            const StagingBuffer& staging) {
  const int col = at.col + staging.lane;
  const char* p = static_cast<const char*>(t.data) + at.batch * t.batch_stride + at.row * t.row_stride +
                  col * t.col_stride;
  const int rows = min(16, at.rows - at.row);
#pragma unroll 4
  for (int r = 0; r < 16; ++r, p += t.row_stride) {
    const float x = col < at.cols && r < rows ? load_scalar(t.kind, p) : 0.0f;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(staging.column(r)), "f"(x) : "memory");
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t from = staging.fragment(j / 2) + j % 2 * 8 * kSwizzleBytes;
    float x;
    float y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory");
    v[2 * j] += x;
    v[2 * j + 1] += y;
  }
  __syncwarp();  // the buffer may be written again
}

// A unit of an addend of 2-byte elements whose rows are whole chunks: on its way into the buffer while the
// warp computes, without registers of its own. Nothing else may use the buffer between load and add.
template <int kValues>
__device__ __forceinline__ void load_staged(const Addend& t, const UnitPlace& at, const StagingBuffer& to) {
  constexpr int kChunks = kValues / 4;  // of a row
  constexpr int kRows = 32 / kChunks;   // at a time
  const int first = to.lane / kChunks;
  const int chunk = to.lane % kChunks;
  const int col = at.col + 8 * chunk;
  const char* p = static_cast<const char*>(t.data) + at.batch * t.batch_stride +
                  static_cast<int64_t>(at.row + first) * t.row_stride + static_cast<int64_t>(col) * 2;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i, p += kRows * t.row_stride) {
    const int r = first + kRows * i;
    if (at.row + r >= at.rows || col >= at.cols) continue;  // what is added there is not stored
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to.at(r, chunk)), "l"(p) : "memory");
  }
}

template <int kValues>
__device__ __forceinline__ void add_staged(ScalarKind kind, float (&v)[kValues], const StagingBuffer& from) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kValues / 8; ++j) {
    uint32_t bits[4];
    load_matrix_x4(from.matrix_row(j), bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[8 * j + 2 * i] += unpack_low(kind, bits[i]);
      v[8 * j + 2 * i + 1] += unpack_high(kind, bits[i]);
    }
  }
  __syncwarp();  // the buffer may be written again
}

}  // namespace tpk::sm90a

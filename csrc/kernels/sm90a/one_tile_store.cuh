// The end of a tile of one_tile.cuh, which alone knows whether it is swapped: straight from the sums where
// they are all that is stored, by way of fp32 in shared memory else.
#pragma once

#include "kernels/sm90a/columns.cuh"
#include "kernels/sm90a/one_tile_load.cuh"

namespace tpk::sm90a {

constexpr int kConsumersBarrier = 1;

template <int kN>
using TileSums = float[kN / 2];

// Unit u of the sums, as wgmma leaves it. u is known when the loop around is unrolled.
template <int kN>
__device__ __forceinline__ void unit_of(const TileSums<kN>& acc, int u, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = acc[8 * u + i];
}

// Where 16 bytes lie of a swapped tile in shared memory, so that 8 lanes with neighbouring rows, or 8 with
// neighbouring chunks, meet no bank twice. Of fp32, pairs of chunks stay together.
__device__ __forceinline__ uint32_t chunk_at(uint32_t base, int pitch, int row, int chunk, int mask = 7) {
  return base + row * pitch + ((chunk ^ (row & mask)) << 4);
}
constexpr int kPairs = 6;

// 16 bytes from shared memory to an output.
__device__ __forceinline__ void copy_out(uint32_t from, char* out) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  *reinterpret_cast<uint4*>(out) = x;
}

// Where an output lies in shared memory before it goes out: where stages were, or, where the loading thread
// is at the next tile already, behind them.
__device__ __forceinline__ uint32_t staging_of(const OneTileParams& p, const OneTileShared& s) {
  return shared_address(p.walks ? s.met : s.stages);
}

// The thread's number, read each time: what follows from it is the same for all tiles of a CTA, and the
// compiler would keep it in registers that there are not.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Two elements of a plain tile's bias from column `column` of the product on; its rows are whole chunks of 8.
__device__ __forceinline__ uint32_t bias_pair(const OneTileParams& p, int batch, int column) {
  if (p.bias == nullptr || column >= p.problem.n) return 0;
  const char* from = static_cast<const char*>(p.bias) + batch * p.bias_batch_stride;
  return *reinterpret_cast<const uint32_t*>(from + static_cast<int64_t>(column) * 2);
}

// A swapped tile: rounded, turned round in shared memory, and out in whole lines. kScales: alpha and a bias
// before that; a branch around them instead costs all plain products 1 %.
template <int kRows, int kN, bool kScales>
__device__ __forceinline__ void store_swapped(const OneTileParams& p, const OneTileShared& s,
                                              const OneTilePlace& at, const TileSums<kN>& acc) {
  constexpr int kRowBytes = kRows * 2;
  constexpr int kChunks = kRowBytes / 16;
  const int thread = thread_now();
  const int lane = thread % 32;
  const uint32_t base = staging_of(p, s);
  const ScalarKind kind = p.out_kind;
  // Of a thread's two rows of wgmma, columns of the product, 8 apart; the one above or below is another's.
  float bias[2] = {};
  if constexpr (kScales) {
    const int first = at.row + thread / 32 * 16 + lane / 8 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = bias_pair(p, at.batch, first + 8 * i);
      bias[i] = lane / 4 % 2 == 0 ? unpack_low(p.bias_kind, pair) : unpack_high(p.bias_kind, pair);
    }
  }
  named_sync(kConsumersBarrier, 2 * kRows);  // all have read all that lies there
  const uint32_t to = chunk_at(base, kRowBytes, lane / 16 * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2);
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u) {
    float v[8];
    unit_of<kN>(acc, u, v);
    if constexpr (kScales) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = fmaf(p.alpha, v[i], bias[i / 2 % 2]);
    }
    store_matrix_x4_transposed(to + u * kUnit * kRowBytes, pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                               pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
  }
  named_sync(kConsumersBarrier, 2 * kRows);
  const int row = thread / kChunks;  // one of each unit's
  const int column = at.row + thread % kChunks * 8;
  if (column >= p.problem.n) return;
  const uint32_t from = chunk_at(base, kRowBytes, row, thread % kChunks);
  const int rows = min(kN, static_cast<int>(p.problem.m) - at.column) - row;
  char* out = static_cast<char*>(p.out.data) + at.batch * p.out.batch_stride +
              (at.column + row) * p.out.row_stride + static_cast<int64_t>(column) * 2;
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u, out += kUnit * p.out.row_stride) {
    if (u * kUnit >= rows) return;
    copy_out(from + u * kUnit * kRowBytes, out);
  }
}

// A straight tile: each warp rounds its 16 rows into shared memory and reads them in lines, on its own.
template <int kRows, int kN, bool kScales>
__device__ __forceinline__ void store_straight(const OneTileParams& p, const OneTileShared& s,
                                               const OneTilePlace& at, const TileSums<kN>& acc) {
  constexpr int kPitch = straight_pitch(kN, 2);
  constexpr int kChunks = kN / 8;  // of a row
  const int warp = thread_now() / 32;
  const int lane = thread_now() % 32;
  const uint32_t base = staging_of(p, s) + warp * 16 * kPitch;
  const ScalarKind kind = p.out_kind;
  if (p.walks) {
    __syncwarp();
  } else {
    named_sync(kConsumersBarrier, 2 * kRows);  // all have read all stages
  }
  const uint32_t to = base + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u) {
    float v[8];
    unit_of<kN>(acc, u, v);
    if constexpr (kScales) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const uint32_t pair = bias_pair(p, at.batch, at.column + u * kUnit + 2 * i + 2 * (lane % 4));
        const float low = unpack_low(p.bias_kind, pair);
        const float high = unpack_high(p.bias_kind, pair);
#pragma unroll
        for (int j = i; j < i + 4; j += 2) {
          v[j] = fmaf(p.alpha, v[j], low);
          v[j + 1] = fmaf(p.alpha, v[j + 1], high);
        }
      }
    }
    store_matrix_x4(to + u * kUnit * 2, pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                    pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
  }
  __syncwarp();
  const int first = at.row + warp * 16;
  const int rows = static_cast<int>(p.problem.m) - first;
  const int columns = static_cast<int>(p.problem.n) - at.column;
  char* out = static_cast<char*>(p.out.data) + at.batch * p.out.batch_stride + first * p.out.row_stride +
              static_cast<int64_t>(at.column) * 2;
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u) {
    const int i = u * 32 + lane;
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    if (row < rows && chunk * 8 < columns)
      copy_out(base + row * kPitch + chunk * 16, out + row * p.out.row_stride + chunk * 16);
  }
}

// Where finish_tile() finds the sums that this CTA finishes, in fp32 where stages were: rows of the product.
struct LaidDown {
  uint32_t base;
  int pitch;
  int mask;  // see chunk_at()
};

template <int kRows>
__device__ __forceinline__ LaidDown lay_at(const OneTileParams& p, const OneTileShared& s, int units) {
  const uint32_t base = shared_address(s.stages);
  return p.swapped ? LaidDown{base, 4 * kRows, kPairs} : LaidDown{base, straight_pitch(units * kUnit, 4), 0};
}

// A unit of the sums, as wgmma leaves it.
__device__ __forceinline__ void lay_down(const OneTileParams& p, const LaidDown& lay, int unit,
                                         const float (&v)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const int column = unit * kUnit + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = row + i / 2 % 2 * 8;
    const int c = column + i / 4 * 8 + i % 2;
    const int line = p.swapped ? c : r;
    const int place = p.swapped ? r : c;
    const uint32_t to = chunk_at(lay.base, lay.pitch, line, place / 4, lay.mask) + place % 4 * 4;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[i]) : "memory");
  }
}

// Epilogues of all kinds, on `units` units that lie in fp32 where stages were, the first of them at column
// `first` of the kernel's.
template <int kRows>
__device__ __forceinline__ void finish_tile(const OneTileParams& p, const OneTileShared& s,
                                            const OneTilePlace& at, int first, int units) {
  named_sync(kConsumersBarrier, 2 * kRows);  // all of it lies there
  constexpr int kThreads = 2 * kRows;
  const LaidDown lay = lay_at<kRows>(p, s, units);
  // From here on, rows and columns are the product's.
  const int chunks =
      (p.swapped ? (p.gated ? kRows / 2 : kRows) : units * kUnit) / kLaneColumns;  // a thread's, of a row
  const int first_row = p.swapped ? first : at.row;
  const int rows_at_once = kThreads / chunks;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % chunks;
  LaneColumns columns{(p.swapped ? at.row : first) + chunk * kLaneColumns, 0};
  columns.count = min(kLaneColumns, static_cast<int>(p.problem.n) - columns.first);
  if (columns.count <= 0 || thread >= rows_at_once * chunks) return;
  const int batch = at.batch;
  float bias[kLaneColumns];
  load_column_bias(p, batch, columns, bias);
  const int rows = min(p.swapped ? units * kUnit : kRows, static_cast<int>(p.problem.m) - first_row);
#pragma unroll 1
  for (int row = thread / chunks; row < rows; row += rows_at_once) {
    const auto take = [&](int from, float (&v)[kLaneColumns]) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += 4) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                     : "r"(chunk_at(lay.base, lay.pitch, row, 2 * from + i / 4, lay.mask))
                     : "memory");
      }
    };
    float v[kLaneColumns];
    take(chunk, v);
    if (p.gated) {
      float b[kLaneColumns];
      take(chunk + chunks, b);
#pragma unroll
      for (float& x : v) x *= p.alpha;
      activate(p.activation, v);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) v[i] *= p.alpha * b[i];
    }
    finish_columns(p, batch, first_row + row, columns, bias, v);
  }
}

}  // namespace tpk::sm90a

// Epilogue: tile of sums -> * alpha -> + bias -> pre-activation out -> activation, or * activation of mul ->
// + residual -> + old output -> one rounding -> output. In the sums' type.
//
// The tile goes through shared memory, so that each thread holds 16 bytes of neighbouring columns of a row
// and a warp stores whole lines, and so that the arithmetic is one short loop rather than unrolled over
// accumulators.
#pragma once

#include "kernels/sm80/mainloop.cuh"
#include "kernels/sm80/scheduler.cuh"

namespace tpk::sm80 {

template <class Sum>
__device__ __forceinline__ Sum activate(Activation kind, Sum x) {
  constexpr Sum kOne = 1;
  constexpr Sum kHalf = 0.5;
  switch (kind) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;  // keeps NaN
    case Activation::kSilu:
      return x / (kOne + exp(-x));
    case Activation::kGelu:
      return kHalf * x * (kOne + erf(x * static_cast<Sum>(0.70710678118654752)));
    case Activation::kGeluTanh:
      return kHalf * x *
             (kOne +
              tanh(static_cast<Sum>(0.79788456080286536) * (x + static_cast<Sum>(0.044715) * x * x * x)));
  }
  return x;
}

template <class Sum>
__device__ __forceinline__ Sum load_scalar(ScalarKind kind, const void* p) {
  if (kind == ScalarKind::kFp64) return static_cast<Sum>(*static_cast<const double*>(p));
  if (kind == ScalarKind::kFp32) return *static_cast<const float*>(p);
  const uint32_t bits = *static_cast<const unsigned short*>(p);
  return kind == ScalarKind::kBf16 ? unpack_bf16(bits) : unpack_fp16(bits);
}

template <class Sum>
__device__ __forceinline__ void store_scalar(ScalarKind kind, void* p, Sum v) {
  if (kind == ScalarKind::kFp64) {
    *static_cast<double*>(p) = v;
  } else if (kind == ScalarKind::kFp32) {
    *static_cast<float*>(p) = static_cast<float>(v);
  } else {
    // fp64 by way of fp32, as torch rounds it.
    const auto x = static_cast<float>(v);
    const uint32_t bits = kind == ScalarKind::kBf16 ? pack_bf16(x, 0.0f) : pack_fp16(x, 0.0f);
    *static_cast<unsigned short*>(p) = static_cast<unsigned short>(bits);
  }
}

// Columns that a thread has of a row.
template <class Sum>
constexpr int kColumns = kChunkBytes / static_cast<int>(sizeof(Sum));

// All of them, where they are one access: of the sums' own type, or of half precision.
template <class Sum>
struct WideUnit {
  using Type = float4;
};
template <>
struct WideUnit<double> {
  using Type = double2;
};

__device__ __forceinline__ void unpack(ScalarKind /*kind*/, const float4& x, float (&v)[4]) {
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}
__device__ __forceinline__ void unpack(ScalarKind /*kind*/, const double2& x, double (&v)[2]) {
  v[0] = x.x, v[1] = x.y;
}
__device__ __forceinline__ void unpack(ScalarKind kind, const uint2& x, float (&v)[4]) {
  const uint32_t bits[4] = {x.x & 0xffffu, x.x >> 16, x.y & 0xffffu, x.y >> 16};
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = kind == ScalarKind::kBf16 ? unpack_bf16(bits[j]) : unpack_fp16(bits[j]);
}

__device__ __forceinline__ void pack(ScalarKind /*kind*/, const float (&v)[4], float4* to) {
  *to = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void pack(ScalarKind /*kind*/, const double (&v)[2], double2* to) {
  *to = make_double2(v[0], v[1]);
}
__device__ __forceinline__ void pack(ScalarKind kind, const float (&v)[4], uint2* to) {
  const bool bf16 = kind == ScalarKind::kBf16;
  *to = make_uint2(bf16 ? pack_bf16(v[0], v[1]) : pack_fp16(v[0], v[1]),
                   bf16 ? pack_bf16(v[2], v[3]) : pack_fp16(v[2], v[3]));
}

constexpr bool is_half(ScalarKind kind) { return bytes_of(kind) == 2; }
template <class Sum>
constexpr ScalarKind kWide = sizeof(Sum) == 8 ? ScalarKind::kFp64 : ScalarKind::kFp32;

// Neighbouring columns from column pointer p on; the first `count` exist.
template <class Sum, int kCount>
__device__ __forceinline__ void load_columns(ScalarKind kind, const Output& t, const char* p, int count,
                                             Sum (&v)[kCount]) {
  if (t.vector && count == kCount) {
    if (kind == kWide<Sum>) {
      unpack(kind, *reinterpret_cast<const typename WideUnit<Sum>::Type*>(p), v);
      return;
    }
    if constexpr (kCount == 4) {
      unpack(kind, *reinterpret_cast<const uint2*>(p), v);
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    v[j] = j < count ? load_scalar<Sum>(kind, p + j * t.col_stride) : static_cast<Sum>(0);
}

template <class Sum, int kCount>
__device__ __forceinline__ void store_columns(ScalarKind kind, const Output& t, char* p, int count,
                                              const Sum (&v)[kCount]) {
  if (t.vector && count == kCount) {
    if (kind == kWide<Sum>) {
      pack(kind, v, reinterpret_cast<typename WideUnit<Sum>::Type*>(p));
      return;
    }
    if constexpr (kCount == 4) {
      pack(kind, v, reinterpret_cast<uint2*>(p));
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (j < count) store_scalar(kind, p + j * t.col_stride, v[j]);
  }
}

// v += the columns of a row of t.
template <class Sum, int kCount>
__device__ __forceinline__ void add_columns(ScalarKind kind, const Output& t, const char* p, int count,
                                            Sum (&v)[kCount]) {
  Sum x[kCount];
  load_columns(kind, t, p, count, x);
#pragma unroll
  for (int j = 0; j < kCount; ++j) v[j] += x[j];
}

__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
__device__ __forceinline__ void store_pair(double* to, double x, double y) {
  *reinterpret_cast<double2*>(to) = make_double2(x, y);
}

// A part of the accumulators of all warps to shared memory. The thread's place is read anew, or its addresses
// here would be kept in registers from the kernel's start on.
template <class Tile>
__device__ __forceinline__ void stage_part(const Accumulators<Tile>& acc, typename Tile::Sum* staged,
                                           int part) {
  constexpr int kFragments = Tile::kFragmentsM / Tile::kParts;
  const int thread = thread_index_anew();
  const int lane = thread % 32;
  const int warp_m = thread / 32 % Tile::kWarpsM;
  const int warp_n = thread / 32 / Tile::kWarpsM;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) {
      const int col = warp_n * Tile::kWarpN + j * 8 + accumulator_col(lane, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (warp_m * kFragments + i) * 16 + accumulator_row(lane, 2 * half);
        const auto& sums = acc[part * kFragments + i][j];
        store_pair(staged + output_offset<Tile::kBN, typename Tile::Sum>(row, col), sums[2 * half],
                   sums[2 * half + 1]);
      }
    }
  }
}

// Where the thread's columns of an output start in the tile's first row.
__device__ __forceinline__ char* start_of(const Output& t, const WorkItem& item, int64_t n) {
  return static_cast<char*>(t.data) + item.batch * t.batch_stride + item.m * t.row_stride + n * t.col_stride;
}

// The rows of a staged part that a thread stores, and its columns.
template <class Tile>
struct StoredPart {
  using Sum = typename Tile::Sum;
  static constexpr int kCount = kColumns<Sum>;
  static constexpr int kThreadsPerRow = Tile::kBN / kCount;
  static constexpr int kRowsPerPass = Tile::kThreads / kThreadsPerRow;
  static constexpr int kRows = Tile::kBM / Tile::kParts;
  static_assert(Tile::kThreads % kThreadsPerRow == 0, "A thread keeps its columns from pass to pass.");

  const Sum* staged;
  int part;
  int first;  // row
  int col;
  int64_t n;  // of the matrix
  int rows;   // that exist, of the tile
  Sum bias[kCount];

  __device__ __forceinline__ int row(int local) const { return part_row<Tile>(part, local); }
  __device__ __forceinline__ void read(const GemmParams& p, int local, Sum (&v)[kCount]) const {
    const Sum* const sums = staged + output_offset<Tile::kBN, Sum>(local, col);
    const auto alpha = static_cast<Sum>(p.alpha);
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = alpha * sums[j] + bias[j];
  }
};

// Where nothing but additions of units follow: what is added to several rows is under way together.
template <class Tile, class Unit>
__device__ __forceinline__ void store_sums(const GemmParams& p, const WorkItem& item,
                                           const StoredPart<Tile>& s) {
  using S = StoredPart<Tile>;
  using Sum = typename Tile::Sum;
  constexpr int kBatch = 4;
  static_assert(S::kRows % (kBatch * S::kRowsPerPass) == 0, "Batches of rows make up a part.");
  char* const out = start_of(p.out, item, s.n);
  const char* const residual = start_of(p.residual, item, s.n);
  const bool has_residual = p.residual.data != nullptr;
#pragma unroll 1
  for (int local = s.first; local < S::kRows; local += kBatch * S::kRowsPerPass) {
    Unit added[kBatch] = {};
    Unit old[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = s.row(local + i * S::kRowsPerPass);
      if (row >= s.rows) continue;
      if (has_residual) added[i] = *reinterpret_cast<const Unit*>(residual + row * p.residual.row_stride);
      if (p.accumulate) old[i] = *reinterpret_cast<const Unit*>(out + row * p.out.row_stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = s.row(local + i * S::kRowsPerPass);
      if (row >= s.rows) continue;
      Sum v[S::kCount];
      s.read(p, local + i * S::kRowsPerPass, v);
      const auto add = [&](const Unit& unit) {
        Sum x[S::kCount];
        unpack(p.out_kind, unit, x);
#pragma unroll
        for (int j = 0; j < S::kCount; ++j) v[j] += x[j];
      };
      if (has_residual) add(added[i]);
      if (p.accumulate) add(old[i]);
      pack(p.out_kind, v, reinterpret_cast<Unit*>(out + row * p.out.row_stride));
    }
  }
}

// Everything, a row at a time.
template <class Tile>
__device__ __forceinline__ void store_any(const GemmParams& p, const WorkItem& item,
                                          const StoredPart<Tile>& s, int count) {
  using S = StoredPart<Tile>;
  using Sum = typename Tile::Sum;
  char* const out = start_of(p.out, item, s.n);
  char* const preact = start_of(p.preact, item, s.n);
  const char* const residual = start_of(p.residual, item, s.n);
  const char* const mul = start_of(p.mul, item, s.n);
#pragma unroll 1
  for (int local = s.first; local < S::kRows; local += S::kRowsPerPass) {
    const int row = s.row(local);
    if (row >= s.rows) break;
    Sum v[S::kCount];
    s.read(p, local, v);
    if (p.preact.data != nullptr) {
      store_columns(p.out_kind, p.preact, preact + row * p.preact.row_stride, count, v);
    }
    if (p.mul.data != nullptr) {
      Sum gate[S::kCount];
      load_columns(kWide<Sum>, p.mul, mul + row * p.mul.row_stride, count, gate);
#pragma unroll
      for (int j = 0; j < S::kCount; ++j) v[j] *= activate(p.activation, gate[j]);
    } else if (p.activation != Activation::kNone) {
#pragma unroll
      for (int j = 0; j < S::kCount; ++j) v[j] = activate(p.activation, v[j]);
    }
    if (p.residual.data != nullptr) {
      add_columns(p.residual_kind, p.residual, residual + row * p.residual.row_stride, count, v);
    }
    char* const to = out + row * p.out.row_stride;
    if (p.accumulate) add_columns(p.out_kind, p.out, to, count, v);
    store_columns(p.out_kind, p.out, to, count, v);
  }
}

// A staged part to global memory.
template <class Tile>
__device__ __forceinline__ void store_part(const GemmParams& p, const WorkItem& item,
                                           const typename Tile::Sum* staged, int part) {
  using S = StoredPart<Tile>;
  const int thread = thread_index_anew();
  S s{staged, part, thread / S::kThreadsPerRow, thread % S::kThreadsPerRow * S::kCount, 0, 0, {}};
  s.n = item.n + s.col;
  s.rows = static_cast<int>(min64(Tile::kBM, p.problem.m - item.m));
  const int count = static_cast<int>(min64(S::kCount, p.problem.n - s.n));
  if (count <= 0) return;
  if (p.bias != nullptr) {
    const char* from = static_cast<const char*>(p.bias) + s.n * p.bias_stride;
#pragma unroll
    for (int j = 0; j < S::kCount; ++j) {
      if (j < count) s.bias[j] = load_scalar<typename S::Sum>(p.bias_kind, from + j * p.bias_stride);
    }
  }
  using Sum = typename S::Sum;
  if (!p.only_adds || count < S::kCount) {
    store_any<Tile>(p, item, s, count);
  } else if (p.out_kind == kWide<Sum>) {
    store_sums<Tile, typename WideUnit<Sum>::Type>(p, item, s);
  } else if constexpr (S::kCount == 4) {
    store_sums<Tile, uint2>(p, item, s);
  }
}

// The tile by way of shared memory, where no thread may still read anything.
template <class Tile>
__device__ __forceinline__ void store_staged(const GemmParams& p, const WorkItem& item,
                                             const Accumulators<Tile>& acc, typename Tile::Sum* staged) {
#pragma unroll 1
  for (int part = 0; part < Tile::kParts; ++part) {
    if (part == 0) {
      stage_part<Tile>(acc, staged, 0);
    } else {
      __syncthreads();  // all warps have read the part before
      stage_part<Tile>(acc, staged, Tile::kParts - 1);
    }
    __syncthreads();
    store_part<Tile>(p, item, staged, part);
  }
}

// Where nothing follows and sums are not rounded: from registers, in whole sectors of 32 bytes.
template <class Tile>
__device__ __forceinline__ void store_plain(const GemmParams& p, const WorkItem& item,
                                            const Accumulators<Tile>& acc) {
  using Sum = typename Tile::Sum;
  const int thread = thread_index_anew();
  const int lane = thread % 32;
  const int first_row = thread / 32 % Tile::kWarpsM * Tile::kWarpM + accumulator_row(lane, 0);
  const int first_col = thread / 32 / Tile::kWarpsM * Tile::kWarpN + accumulator_col(lane, 0);
  const int64_t rows = p.problem.m - item.m - first_row;
  const int64_t cols = p.problem.n - item.n - first_col;
  const auto alpha = static_cast<Sum>(p.alpha);
  char* const first = start_of(p.out, item, item.n + first_col) + first_row * p.out.row_stride;
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half;
      if (row >= rows) continue;
      auto* const to = reinterpret_cast<Sum*>(first + row * p.out.row_stride);
#pragma unroll
      for (int j = 0; j < Tile::kFragmentsN; ++j) {
        const Sum x = alpha * acc[i][j][2 * half];
        if (8 * j + 1 < cols) {
          store_pair(to + 8 * j, x, alpha * acc[i][j][2 * half + 1]);
        } else if (8 * j < cols) {
          to[8 * j] = x;
        }
      }
    }
  }
}

}  // namespace tpk::sm80

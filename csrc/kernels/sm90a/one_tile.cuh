// The kernel for products of less than a few waves: a cluster computes one tile of the product and ends.
//
// No schedule is walked, no ticket drawn, no flag cleared: what decides here is how soon a CTA loads and how
// soon it has stored. Tiles are 64 or 128 columns wide and 16 to 128 rows high, in steps of 16, as the
// launcher says, so that a few kernels fit every shape to the multiprocessors.
//
// The kernel computes the transpose: the 64 rows of wgmma are columns of the product, its columns rows of the
// product, of which there may be few.
//
// Roles. One or two warpgroups multiply, 64 columns of the product each; one thread of the last warp loads.
// CTAs of a cluster along M share weights and those along N tokens, by multicast. Those along K work on one
// tile: each takes every k-th iteration, sends the others what it has of their units of 16 rows, and finishes
// its own, adding in the order of CTAs, so that the bits depend on the plan alone.
//
// Nobody waits at the end. A CTA has gone only when all is here that others send it: operands of its stages,
// sums of its units. Stages that nobody loads into again are not released.
#pragma once

#include "kernels/sm90a/columns.cuh"
#include "kernels/sm90a/launch.hpp"
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

// acc = the products of this CTA's iterations.
template <Element kElement, int kColumns, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply_tile(const OneTileParams& p, const OneTileShared& s, int iterations,
                                              uint32_t release_to, TileSums<kN>& acc) {
  const int row = static_cast<int>(threadIdx.x) / kWarpgroup;
  uint32_t stage_a = shared_address(s.stages) + row * 64 * kSwizzleBytes;
  const uint32_t first_a = stage_a;
  int stage = 0;
  int previous = 0;
  uint32_t phase = 0;
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) cute::warpgroup_fence_operand(acc[j]);
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    s.full(stage).wait(phase);
    const uint64_t a = descriptor<kMajorA>(stage_a);
    const uint64_t b = descriptor<kMajorB>(stage_a + (kColumns - row * 64) * kSwizzleBytes);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBK / 16; ++k) {
      wgmma<kElement, kN, kMajorA, kMajorB>(acc, a + k * kStepK16<kMajorA>, b + k * kStepK16<kMajorB>,
                                            i > 0 || k > 0);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    // The stage before has been read; who waits to load into it again?
    if (i > 0 && release_to != 0 && i - 1 + p.stages < iterations)
      arrive_remote(release_to + previous * static_cast<uint32_t>(sizeof(uint64_t)));
    previous = stage;
    stage_a += p.stage_bytes;
    if (++stage == p.stages) {
      stage = 0;
      stage_a = first_a;
      phase ^= 1;
    }
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) cute::warpgroup_fence_operand(acc[j]);
}

// Where 16 bytes lie in a tile of rows of kBytes, so that 8 lanes with neighbouring rows, or 8 with
// neighbouring chunks, meet no bank twice. Of fp32, pairs of chunks stay together.
template <int kBytes>
__device__ __forceinline__ uint32_t chunk_at(uint32_t base, int row, int chunk, int mask = 7) {
  return base + row * kBytes + ((chunk ^ (row & mask)) << 4);
}
constexpr int kPairs = 6;

// Rounded, turned round in shared memory, and out in whole lines.
template <int kColumns, int kN>
__device__ __forceinline__ void store_tile(const OneTileParams& p, const OneTileShared& s,
                                           const OneTilePlace& at, const TileSums<kN>& acc) {
  constexpr int kRowBytes = kColumns * 2;
  constexpr int kChunks = kRowBytes / 16;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const uint32_t base = shared_address(s.stages);
  const ScalarKind kind = p.out_kind;
  named_sync(kConsumersBarrier, 2 * kColumns);  // all have read all stages
  const uint32_t to = chunk_at<kRowBytes>(base, lane / 16 * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2);
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u) {
    float v[8];
    unit_of<kN>(acc, u, v);
    store_matrix_x4_transposed(to + u * kUnit * kRowBytes, pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                               pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
  }
  named_sync(kConsumersBarrier, 2 * kColumns);
  const int row = thread / kChunks;  // one of each unit's
  const int column = at.column + thread % kChunks * 8;
  if (column >= p.problem.n) return;
  const uint32_t from = chunk_at<kRowBytes>(base, row, thread % kChunks);
  const int rows = min(kN, static_cast<int>(p.problem.m) - at.token) - row;
  char* out = static_cast<char*>(p.out.data) + blockIdx.z * p.out.batch_stride +
              (at.token + row) * p.out.row_stride + static_cast<int64_t>(column) * 2;
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u, out += kUnit * p.out.row_stride) {
    if (u * kUnit >= rows) return;
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from + u * kUnit * kRowBytes)
                 : "memory");
    *reinterpret_cast<uint4*>(out) = x;
  }
}

// A unit of the sums, as wgmma leaves it, to the tile of rows in fp32 that finish_rows() reads.
template <int kColumns>
__device__ __forceinline__ void lay_down(uint32_t base, int unit, const float (&v)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = unit * kUnit + i / 4 * 8 + 2 * (lane & 3) + i % 2;
    const int column = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const uint32_t to = chunk_at<4 * kColumns>(base, row, column / 4, kPairs) + column % 4 * 4;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[i]) : "memory");
  }
}

// What the CTA at `depth` has of the u-th unit that this one finishes: 1 KB of each warp, in fragments.
template <int kColumns>
__device__ __forceinline__ unsigned char* met_at(const OneTileParams& p, const OneTileShared& s, int depth,
                                                 int u) {
  const int thread = static_cast<int>(threadIdx.x);
  return s.met + ((depth * p.most_units + u) * (kColumns / 16) + thread / 32) * 1024 + thread % 32 * 16;
}

// Every unit to the CTA along K that finishes it.
template <int kColumns, int kN>
__device__ __forceinline__ void send_tile(const OneTileParams& p, const OneTileShared& s,
                                          const OneTilePlace& at, const TileSums<kN>& acc) {
  constexpr int kUnits = kN / kUnit;
  const int in_plane = at.m + (at.n << p.log_m);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int owner = owner_of_unit(u, kUnits, p.log_k);
    const unsigned char* to = met_at<kColumns>(p, s, at.k, u - first_unit(owner, kUnits, p.log_k));
    float v[8];
    unit_of<kN>(acc, u, v);
    if (at.iterations == 0) {
#pragma unroll
      for (float& x : v) x = 0.0f;
    }
    if (owner == at.k) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to) + j * 128),
                     "f"(v[j]), "f"(v[j + 1]), "f"(v[j + 2]), "f"(v[j + 3])
                     : "memory");
      }
    } else {
      const uint32_t rank = (owner << (p.log_m + p.log_n)) + in_plane;
      const uint32_t remote = remote_address(to, rank);
      const uint32_t barrier = remote_address(&s.barriers->met, rank);
      store_remote(remote, barrier, v[0], v[1], v[2], v[3]);
      store_remote(remote + 512, barrier, v[4], v[5], v[6], v[7]);
    }
  }
}

// The sums over the CTAs along K of this one's units.
template <int kColumns>
__device__ __forceinline__ void add_units(const OneTileParams& p, const OneTileShared& s, int units) {
  wait_for_cluster(&s.barriers->met, 0);
#pragma unroll 1
  for (int u = 0; u < units; ++u) {
    float sum[8] = {};
#pragma unroll 1
    for (int depth = 0; depth < p.cluster_k; ++depth) {
      const uint32_t from = shared_address(met_at<kColumns>(p, s, depth, u));
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(from + j * 128)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j + i] += x[i];
      }
    }
    lay_down<kColumns>(shared_address(s.stages), u, sum);
  }
}

// Epilogues of all kinds, on `units` units that lie in fp32 where stages were, the first of them at row
// `first` of the product.
template <int kColumns>
__device__ __forceinline__ void finish_rows(const OneTileParams& p, const OneTileShared& s,
                                            const OneTilePlace& at, int first, int units) {
  named_sync(kConsumersBarrier, 2 * kColumns);  // all of it lies there
  const int thread = static_cast<int>(threadIdx.x);
  const int chunks = (p.gated ? kColumns / 2 : kColumns) / kLaneColumns;
  const int log_chunks = 31 - __clz(chunks);
  const int chunk = thread & (chunks - 1);
  LaneColumns columns{at.column + chunk * kLaneColumns, 0};
  columns.count = min(kLaneColumns, static_cast<int>(p.problem.n) - columns.first);
  if (columns.count <= 0) return;
  const int batch = static_cast<int>(blockIdx.z);
  float bias[kLaneColumns];
  load_column_bias(p, batch, columns, bias);
  const uint32_t base = shared_address(s.stages);
  const int rows = min(units * kUnit, static_cast<int>(p.problem.m) - first);
#pragma unroll 1
  for (int row = thread >> log_chunks; row < rows; row += 2 * kColumns >> log_chunks) {
    const auto take = [&](int from, float (&v)[kLaneColumns]) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += 4) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                     : "r"(chunk_at<4 * kColumns>(base, row, 2 * from + i / 4, kPairs))
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
    finish_columns(p, batch, first + row, columns, bias, v);
  }
}

// All of a multiplying warpgroup's work on a tile of kN rows, up to where finish_rows() goes on. Returns
// whether it does.
template <Element kElement, int kColumns, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ bool compute_tile(const OneTileParams& p, const OneTileShared& s,
                                             const OneTilePlace& at, int units) {
  TileSums<kN> acc;
  multiply_tile<kElement, kColumns, kN, kMajorA, kMajorB>(p, s, at.iterations, release_address(p, s, at),
                                                          acc);
  if (p.cluster_k > 1) {
    send_tile<kColumns, kN>(p, s, at, acc);
    if (units == 0) return false;
    named_sync(kConsumersBarrier, 2 * kColumns);  // all have read all stages
    return true;
  }
  if (p.plain) {
    store_tile<kColumns, kN>(p, s, at, acc);
    return false;
  }
  named_sync(kConsumersBarrier, 2 * kColumns);  // all have read all stages
#pragma unroll
  for (int u = 0; u < kN / kUnit; ++u) {
    float v[8];
    unit_of<kN>(acc, u, v);
    lay_down<kColumns>(shared_address(s.stages), u, v);
  }
  return true;
}

template <Element kElement, int kColumns, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(2 * kColumns + 32, 2)
    one_tile_kernel(const __grid_constant__ OneTileParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  constexpr int kConsumers = 2 * kColumns;  // threads
  const OneTileShared s(p, dynamic_shared);
  const OneTilePlace at = place_of_cta<kColumns>(p);
  const int all_units = p.tile_rows / kUnit;
  const int first = first_unit(at.k, all_units, p.log_k);
  const int units = first_unit(at.k + 1, all_units, p.log_k) - first;
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < p.stages; ++i) {
      s.full(i).init(1);
      s.empty(i).init(kConsumers / 32 * (p.cluster_m + p.cluster_n - 1));
    }
    s.met_barrier().init(1);
    cutlass::arch::fence_barrier_init();
    s.met_barrier().arrive_and_expect_tx((p.cluster_k - 1) * units * kUnit * kColumns * sizeof(float));
    prefetch_map(p.gated ? &p.map_gate : &p.pairs[0].a);
    prefetch_map(&p.pairs[0].b);
  }
  if (p.log_m + p.log_n + p.log_k > 0) {
    cute::cluster_sync();  // nobody signals another's barriers before they are ready
  } else {
    __syncthreads();
  }
  allow_later_kernels();
  wait_for_earlier_kernels();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) load_tile<kColumns, kMajorA, kMajorB>(p, s, at);
    return;
  }
  const auto compute = [&](auto rows) {
    return compute_tile<kElement, kColumns, decltype(rows)::value, kMajorA, kMajorB>(p, s, at, units);
  };
  bool goes_on = false;
  switch (p.tile_rows) {
#define TPK_ROWS(n)                                      \
  case n:                                                \
    goes_on = compute(std::integral_constant<int, n>{}); \
    break;
    TPK_ROWS(16)
    TPK_ROWS(32)
    TPK_ROWS(48)
    TPK_ROWS(64)
    TPK_ROWS(80)
    TPK_ROWS(96)
    TPK_ROWS(112)
    TPK_ROWS(128)
#undef TPK_ROWS
  }
  if (!goes_on) return;
  if (p.cluster_k > 1) add_units<kColumns>(p, s, units);
  finish_rows<kColumns>(p, s, at, at.token + first * kUnit, units);
}

template <Element kElement, int kColumns, Major kMajorA, Major kMajorB>
KernelInfo describe_one_tile() {
  return {reinterpret_cast<const void*>(&one_tile_kernel<kElement, kColumns, kMajorA, kMajorB>),
          kOneTileSharedLimit, 2 * kColumns + 32};
}

template <Element kElement, int kColumns>
KernelInfo one_tile_kernel_info(Major a, Major b) {
  if (a == Major::kK) {
    return b == Major::kK ? describe_one_tile<kElement, kColumns, Major::kK, Major::kK>()
                          : describe_one_tile<kElement, kColumns, Major::kK, Major::kOuter>();
  }
  return b == Major::kK ? describe_one_tile<kElement, kColumns, Major::kOuter, Major::kK>()
                        : describe_one_tile<kElement, kColumns, Major::kOuter, Major::kOuter>();
}

}  // namespace tpk::sm90a

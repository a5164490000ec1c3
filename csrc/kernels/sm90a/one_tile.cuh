// The kernel for products of less than a few waves: a cluster computes a tile and ends, or walks to another.
//
// No schedule is walked, no ticket drawn, no flag cleared: what decides here is how soon a CTA loads and how
// soon it has stored. Tiles have 64 to 192 rows and 16 to 256 columns of wgmma, those in steps of 16, so that
// a few kernels fit every shape to the multiprocessors.
//
// Rows and columns are wgmma's unless the product's are named. Swapped, the kernel computes the transpose:
// its rows are columns of the product, its columns rows of it, of which there may be few. Nothing but the end
// of a tile knows.
//
// Roles. One to three warpgroups multiply, 64 rows each; the first thread behind them loads. CTAs of a
// cluster share rows, or columns, by multicast. Those along K work on one tile: each takes a run of its
// iterations, sends the others what it has of their units of 16 columns, and finishes its own, adding in the
// order of CTAs, so that the bits depend on the plan alone.
//
// Nobody waits at the end. A CTA has gone only when all is here that others send it: operands of its stages,
// sums of its units. Stages that nobody loads into again are not released.
#pragma once

#include "kernels/sm90a/launch.hpp"
#include "kernels/sm90a/one_tile_load.cuh"
#include "kernels/sm90a/one_tile_store.cuh"

namespace tpk::sm90a {

// Where a multiplying warpgroup stands in the ring of stages.
struct OneTileRing {
  int stage = 0;
  uint32_t phase = 0;
  int left;  // iterations of all the CTA's tiles that are still to come
};

// acc = the products of this CTA's iterations for a tile.
template <Element kElement, int kRows, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply_tile(const OneTileParams& p, const OneTileShared& s, int iterations,
                                              uint32_t release_to, OneTileRing& ring, TileSums<kN>& acc) {
  // From one lane, so that the compiler keeps what descriptors are made of in registers of the warp.
  const int row = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const uint32_t first_a = shared_address(s.stages) + row * 64 * kSwizzleBytes;
  uint32_t stage_a = first_a + ring.stage * p.stage_bytes;
  int stage = ring.stage;
  uint32_t phase = ring.phase;
  int previous = 0;
  // The stage of iteration i has been read. Who waits to load into it again?
  const auto release = [&](int i) {
    if (release_to != 0 && i + p.stages < ring.left)
      arrive_remote(release_to + previous * static_cast<uint32_t>(sizeof(uint64_t)));
  };
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) cute::warpgroup_fence_operand(acc[j]);
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    s.full(stage).wait(phase);
    const uint64_t a = descriptor<kMajorA>(stage_a);
    const uint64_t b = descriptor<kMajorB>(stage_a + (kRows - row * 64) * kSwizzleBytes);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBK / 16; ++k) {
      wgmma<kElement, kN, kMajorA, kMajorB>(acc, a + k * kStepK16<kMajorA>, b + k * kStepK16<kMajorB>,
                                            i > 0 || k > 0);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (i > 0) release(i - 1);
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
  release(iterations - 1);
  ring = {stage, phase, ring.left - iterations};
}

// What the CTA at `depth` has of the u-th unit that this one finishes: 1 KB of each warp, in fragments.
template <int kRows>
__device__ __forceinline__ unsigned char* met_at(const OneTileParams& p, const OneTileShared& s, int depth,
                                                 int u) {
  const int thread = static_cast<int>(threadIdx.x);
  return s.met + ((depth * p.most_units + u) * (kRows / 16) + thread / 32) * 1024 + thread % 32 * 16;
}

// Every unit to the CTA along K that finishes it. empty: this CTA has no products.
template <int kRows, int kN>
__device__ __forceinline__ void send_tile(const OneTileParams& p, const OneTileShared& s, bool empty,
                                          const TileSums<kN>& acc) {
  constexpr int kUnits = kN / kUnit;
  const OneTileRank at = rank_of_cta(p);
  const int in_plane = at.i + (at.j << p.log_rows);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int owner = owner_of_unit(u, kUnits, p.log_depth);
    const unsigned char* to = met_at<kRows>(p, s, at.k, u - first_unit(owner, kUnits, p.log_depth));
    float v[8];
    unit_of<kN>(acc, u, v);
    if (empty) {
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
      const uint32_t rank = (owner << (p.log_rows + p.log_columns)) + in_plane;
      const uint32_t remote = remote_address(to, rank);
      const uint32_t barrier = remote_address(&s.barriers->met, rank);
      store_remote(remote, barrier, v[0], v[1], v[2], v[3]);
      store_remote(remote + 512, barrier, v[4], v[5], v[6], v[7]);
    }
  }
}

// The sums over the CTAs along K of this one's units.
template <int kRows>
__device__ __forceinline__ void add_units(const OneTileParams& p, const OneTileShared& s, int units) {
  wait_for_cluster(&s.barriers->met, 0);
  const LaidDown lay = lay_at<kRows>(p, s, units);
#pragma unroll 1
  for (int u = 0; u < units; ++u) {
    float sum[8] = {};
#pragma unroll 1
    for (int depth = 0; depth < p.depth; ++depth) {
      const uint32_t from = shared_address(met_at<kRows>(p, s, depth, u));
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
    lay_down(p, lay, u, sum);
  }
}

// All of a multiplying warpgroup's work on tiles of kN columns, up to where finish_tile() goes on. Returns
// whether it does.
template <Element kElement, int kRows, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ bool compute_tiles(const OneTileParams& p, const OneTileShared& s) {
  OneTileRing ring;
  ring.left = iterations_of_cta(p) * tiles_of_cluster(p);
  int tile = cluster_along_x(p);
  while (true) {
    TileSums<kN> acc;
    const int iterations = iterations_of_cta(p);
    multiply_tile<kElement, kRows, kN, kMajorA, kMajorB>(p, s, iterations, release_address(p, s), ring, acc);
    if (p.depth > 1) {
      // Tiles that CTAs along K may share: takes_cluster().
      if constexpr (kRows * kN <= kMostOfDepth) send_tile<kRows, kN>(p, s, iterations == 0, acc);
      if (units_of_cta(p).count == 0) return false;
      named_sync(kConsumersBarrier, 2 * kRows);  // all have read all stages
      return true;
    }
    if (!p.plain) {
      named_sync(kConsumersBarrier, 2 * kRows);  // all have read all stages
      const LaidDown lay = lay_at<kRows>(p, s, kN / kUnit);
#pragma unroll
      for (int u = 0; u < kN / kUnit; ++u) {
        float v[8];
        unit_of<kN>(acc, u, v);
        lay_down(p, lay, u, v);
      }
      return true;
    }
    // Only now: registers are scarce beside the sums.
    const OneTilePlace at = p.walks ? place_of_tile<kRows>(p, tile) : first_place<kRows>(p);
    const auto store = [&](auto scales) {
      if (p.swapped) {
        store_swapped<kRows, kN, scales>(p, s, at, acc);
      } else {
        store_straight<kRows, kN, scales>(p, s, at, acc);
      }
    };
    if (p.scales) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
    if (ring.left == 0) return false;
    tile += clusters_along_x(p);
  }
}

// compute(n) for the n between kFirst and kLast that is `columns`, n known to the compiler.
template <int kFirst, int kLast, class Compute>
__device__ __forceinline__ bool with_columns(int columns, const Compute& compute) {
  if constexpr (kFirst < kLast) {
    if (columns != kFirst) return with_columns<kFirst + kColumnStep, kLast>(columns, compute);
  }
  return compute(std::integral_constant<int, kFirst>{});
}

template <Element kElement, int kKernel, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(kOneTileKernels[kKernel].threads(), kOneTileKernels[kKernel].sharers)
    one_tile_kernel(const __grid_constant__ OneTileParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  constexpr OneTileKernel kShapes = kOneTileKernels[kKernel];
  constexpr int kRows = kShapes.rows;
  constexpr int kConsumers = 2 * kRows;  // threads
  const OneTileShared s(p, dynamic_shared);
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < p.stages; ++i) {
      s.full(i).init(1);
      s.empty(i).init(kConsumers / 32 * (p.share_rows + p.share_columns - 1));
    }
    s.met_barrier().init(1);
    cutlass::arch::fence_barrier_init();
    s.met_barrier().arrive_and_expect_tx((p.depth - 1) * units_of_cta(p).count * kUnit * kRows *
                                         sizeof(float));
    prefetch_map(p.gated ? &p.map_gate : &p.pairs[0].a);
    prefetch_map(&p.pairs[0].b);
  }
  if (p.log_rows + p.log_columns + p.log_depth > 0) {
    cute::cluster_sync();  // nobody signals another's barriers before they are ready
  } else {
    __syncthreads();
  }
  if (threadIdx.x >= kConsumers) {
    if constexpr (kShapes.gives_registers()) cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x / 32 == kConsumers / 32) run_one_tile_loader<kRows, kMajorA, kMajorB>(p, s);
    return;
  }
  begin_after_earlier_kernels();
  if constexpr (kShapes.gives_registers()) cutlass::arch::warpgroup_reg_alloc<152>();
  const bool goes_on = with_columns<kShapes.first, kShapes.last>(p.columns, [&](auto columns) {
    return compute_tiles<kElement, kRows, decltype(columns)::value, kMajorA, kMajorB>(p, s);
  });
  if (!goes_on) return;
  const OneTilePlace at = first_place<kRows>(p);
  const OneTileUnits units = units_of_cta(p);
  if (p.depth > 1) add_units<kRows>(p, s, units.count);
  finish_tile<kRows>(p, s, at, at.column + units.first * kUnit, units.count);
}

template <Element kElement, int kKernel, Major kMajorA, Major kMajorB>
KernelInfo describe_one_tile() {
  return {reinterpret_cast<const void*>(&one_tile_kernel<kElement, kKernel, kMajorA, kMajorB>),
          kOneTileSharedLimit, kOneTileKernels[kKernel].threads()};
}

template <Element kElement, int kKernel>
KernelInfo one_tile_kernel_info(Major a, Major b) {
  if (a == Major::kK) {
    return b == Major::kK ? describe_one_tile<kElement, kKernel, Major::kK, Major::kK>()
                          : describe_one_tile<kElement, kKernel, Major::kK, Major::kOuter>();
  }
  return b == Major::kK ? describe_one_tile<kElement, kKernel, Major::kOuter, Major::kK>()
                        : describe_one_tile<kElement, kKernel, Major::kOuter, Major::kOuter>();
}

}  // namespace tpk::sm90a

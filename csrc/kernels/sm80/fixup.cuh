// Fix-up: partial tiles go from the CTAs that computed them to the tile's finisher, through slots of sums in
// global memory. A slot is written once and read once per launch, in fragment order: thread t's i-th 16 bytes
// of accumulators are the unit i * kThreads + t, so every access of a warp is 512 contiguous bytes.
//
// Flags need not be cleared in front of a launch. A flag is raised once it has the launch's mark, 64 bits
// that no other launch of the process has, and the finisher, its only reader, takes the mark away again: so
// none is found by a replay of the same launch, and what else lies in this memory is a mark once in 2^64
// times.
#pragma once

#include <cstdio>

#include "comm/flags.cuh"
#include "kernels/sm80/mainloop.cuh"

namespace tpk::sm80 {

// 16 bytes of sums.
__device__ __forceinline__ void store_unit(float4* to, const float* v) {
  __stcg(to, make_float4(v[0], v[1], v[2], v[3]));
}
__device__ __forceinline__ void store_unit(double2* to, const double* v) {
  __stcg(to, make_double2(v[0], v[1]));
}
__device__ __forceinline__ void load_unit(float* v, const float4* from) {
  const float4 x = __ldcg(from);
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}
__device__ __forceinline__ void load_unit(double* v, const double2* from) {
  const double2 x = __ldcg(from);
  v[0] = x.x, v[1] = x.y;
}

template <class Tile>
struct Slot {
  using Sum = typename Tile::Sum;
  using Unit = std::conditional_t<sizeof(Sum) == 8, double2, float4>;
  static constexpr int kPerUnit = kChunkBytes / static_cast<int>(sizeof(Sum));
  static constexpr int kRow = Tile::kFragmentsN * 4;  // sums of a thread in a row of fragments
  static constexpr int kUnits = kRow / kPerUnit;
  static constexpr int kUnitsOfSlot = Tile::kBM * Tile::kBN / kPerUnit;

  static __device__ __forceinline__ Unit* at(const GemmParams& p, int64_t slot) {
    return static_cast<Unit*>(p.partials) + slot * kUnitsOfSlot + threadIdx.x;
  }
};

// Writes the CTA's accumulators to the slot, then raises its flag (release at gpu scope). All threads call
// it.
template <class Tile>
__device__ __forceinline__ void publish_partial(const GemmParams& p, int64_t slot,
                                                const Accumulators<Tile>& acc) {
  using S = Slot<Tile>;
  auto* to = S::at(p, slot);
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      store_unit(to + (i * S::kUnits + u) * Tile::kThreads,
                 &acc[i][u * S::kPerUnit / 4][u * S::kPerUnit % 4]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.flags + slot, p.mark);
}

// Out of line, so that its stack frame and registers do not burden the kernel.
[[noreturn]] static __device__ __noinline__ void report_late_partial(long long slot, long long end,
                                                                     unsigned long long timeout_ns) {
  printf(
      "tpkernels streamk_gemm: CTA %d waited %llu ms for partial tile %lld of those before %lld. "
      "The CTA that computes it did not finish: the device is held by another kernel, or this is a bug. "
      "The launch is stopped; its output must not be used.\n",
      static_cast<int>(blockIdx.x), timeout_ns / 1000000ull, slot, end);
  __trap();
  while (true) {
  }
}

// Waits until the slot's flag is raised, and takes it down. One thread calls it. False: time is up.
__device__ __forceinline__ bool wait_for_partial(const GemmParams& p, int64_t slot) {
  uint64_t* const flag = p.flags + slot;
  if (load_acquire(flag) != p.mark) {
    comm::Patience patience(p.timeout_ns, comm::now_ns());
    bool late;
    bool there;
    do {
      __nanosleep(20);
      late =
          patience.ends(comm::now_ns());  // then one more look: this CTA may have been off the multiprocessor
      there = load_acquire(flag) == p.mark;
    } while (!there && !late);
    if (!there) return false;
  }
  *flag = 0;
  return true;
}

// acc = slot[first] + ... + slot[end - 1] + acc, in this order: the order of K, whoever finishes when. Waits
// (bounded) for each slot's flag. All threads call it.
template <class Tile>
__device__ __forceinline__ void add_partials(const GemmParams& p, int64_t first, int64_t end,
                                             Accumulators<Tile>& acc) {
  using S = Slot<Tile>;
  for (int64_t slot = first + threadIdx.x; slot < end; slot += Tile::kThreads) {
    if (!wait_for_partial(p, slot)) report_late_partial(slot, end, p.timeout_ns);
  }
  __syncthreads();  // each waiting thread's acquire, before every thread's reads
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
    // One row of fragments at a time: its independent loads are in flight together.
    typename S::Sum sum[S::kRow];
    const auto* from = S::at(p, first) + i * S::kUnits * Tile::kThreads;
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) load_unit(sum + u * S::kPerUnit, from + u * Tile::kThreads);
#pragma unroll 1
    for (int64_t slot = first + 1; slot < end; ++slot) {
      from += S::kUnitsOfSlot;
      typename S::Sum more[S::kRow];
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) load_unit(more + u * S::kPerUnit, from + u * Tile::kThreads);
#pragma unroll
      for (int r = 0; r < S::kRow; ++r) sum[r] += more[r];
    }
#pragma unroll
    for (int r = 0; r < S::kRow; ++r) acc[i][r / 4][r % 4] = sum[r] + acc[i][r / 4][r % 4];
  }
}

}  // namespace tpk::sm80

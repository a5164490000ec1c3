// Fix-up: partial tiles go from the CTAs that computed them to the tile's finisher, through fp32 slots in
// global memory. A slot is written once and read once per launch, in fragment order: thread t's i-th group
// of four accumulators is the float4 at i * kThreads + t, so every access of a warp is 512 contiguous bytes.
#pragma once

#include <cstdio>

#include "comm/flags.cuh"
#include "kernels/sm80/mainloop.cuh"

namespace tpk::sm80 {

constexpr uint32_t kPartialReady = 1;

template <class Tile>
__device__ __forceinline__ float4* slot_of(const GemmParams& p, int64_t slot) {
  return reinterpret_cast<float4*>(p.partials + slot * (Tile::kBM * Tile::kBN)) + threadIdx.x;
}

// Writes the CTA's accumulators to the slot, then raises its flag (release at gpu scope). All threads call
// it.
template <class Tile>
__device__ __forceinline__ void publish_partial(const GemmParams& p, int64_t slot,
                                                const Accumulators<Tile>& acc) {
  float4* to = slot_of<Tile>(p, slot);
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) {
      __stcg(to + (i * Tile::kFragmentsN + j) * Tile::kThreads,
             make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) comm::store_release<comm::Scope::kGpu>(p.flags + slot, kPartialReady);
}

// Out of line, so that its stack frame and registers do not burden the kernel.
[[noreturn]] static __device__ __noinline__ void report_late_partial(long long slot, long long end,
                                                                     unsigned seen,
                                                                     unsigned long long timeout_ns) {
  printf(
      "tpkernels streamk_gemm: CTA %d waited %llu ms for partial tile %lld of those before %lld, flag %u, "
      "expected %u. "
      "The CTA that computes it did not finish: the device is held by another kernel, or this is a bug. "
      "The launch is stopped; its output must not be used.\n",
      static_cast<int>(blockIdx.x), timeout_ns / 1000000ull, slot, end, seen, kPartialReady);
  __trap();
  while (true) {
  }
}

// acc = slot[first] + ... + slot[end - 1] + acc, in this order: the order of K, whoever finishes when. Waits
// (bounded) for each slot's flag. All threads call it.
template <class Tile>
__device__ __forceinline__ void add_partials(const GemmParams& p, int64_t first, int64_t end,
                                             Accumulators<Tile>& acc) {
  for (int64_t slot = first + threadIdx.x; slot < end; slot += Tile::kThreads) {
    uint32_t seen;
    if (!comm::wait_epoch<comm::Scope::kGpu>(p.flags + slot, kPartialReady, p.timeout_ns, &seen)) {
      report_late_partial(slot, end, seen, p.timeout_ns);
    }
  }
  __syncthreads();  // each waiting thread's acquire, before every thread's reads
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
    // One row of fragments at a time: kFragmentsN independent loads in flight per slot.
    float4 sum[Tile::kFragmentsN];
    const float4* from = slot_of<Tile>(p, first) + i * Tile::kFragmentsN * Tile::kThreads;
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) sum[j] = __ldcg(from + j * Tile::kThreads);
#pragma unroll 1
    for (int64_t slot = first + 1; slot < end; ++slot) {
      from += Tile::kBM * Tile::kBN / 4;
#pragma unroll
      for (int j = 0; j < Tile::kFragmentsN; ++j) {
        const float4 x = __ldcg(from + j * Tile::kThreads);
        sum[j].x += x.x;
        sum[j].y += x.y;
        sum[j].z += x.z;
        sum[j].w += x.w;
      }
    }
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) {
      acc[i][j][0] = sum[j].x + acc[i][j][0];
      acc[i][j][1] = sum[j].y + acc[i][j][1];
      acc[i][j][2] = sum[j].z + acc[i][j][2];
      acc[i][j][3] = sum[j].w + acc[i][j][3];
    }
  }
}

}  // namespace tpk::sm80

// The Stream-K GEMM for Hopper: D = A * B with wgmma and TMA, fp32 accumulate.
//
// Contract. The kernel follows tpk::Schedule. A worker is a cluster of one or two CTAs: it takes a ticket,
// walks that worker's segments in time order, and takes the next ticket when it is done, so any number of
// clusters finishes any schedule. A segment that does not end its tile leaves its fp32 partial in a slot; the
// segment with the tile's last K adds the partials in K order and runs the epilogue, or all of the tile's
// workers do so together (divided.cuh). Waits are for lower tickets only, or for what has started (or for
// other ranks: kernels/gemm_hooks.hpp), and bounded. The result depends on the schedule,
// not on timing.
//
// Roles. Warpgroup 0: one thread schedules, one loads, one rings doorbells. Warpgroups 1
// and 2 multiply and store, together (cooperative) or in turn (pingpong).
#pragma once

#include <cstddef>

#include "kernels/sm90a/divided.cuh"
#include "kernels/sm90a/launch.hpp"
#include "kernels/sm90a/loader.cuh"
#include "kernels/sm90a/owner.cuh"

namespace tpk::sm90a {

// Named barriers: one of each consumer warpgroup (at most three), and the pingpong pair's turns in the main
// loop.
constexpr int kOwnBarrier = 1;
constexpr int kTurnBarrier = 4;

// Of tiles of 8-bit operands; scaled.cuh defines them, for the sources that have such tiles.
template <class Tile>
__device__ void request_scales(const GemmParams& p, SharedStorage<Tile>& s, const WorkItem& item, int row,
                               int consumer, int barrier);
template <class Tile>
__device__ void scaled_mainloop(const GemmParams& p, Accumulators<Tile>& acc, SharedStorage<Tile>& s,
                                RingPosition<Tile::kStages>& stage, int iters, int consumer, int barrier);
template <class Tile>
__device__ void store_biased(const GemmParams& p, const WorkItem& item, int row, Accumulators<Tile>& acc,
                             const float* bias, const StagingBuffer& staging);
template <class Tile>
__device__ void run_scale_loader(const GemmParams& p, SharedStorage<Tile>& s);

template <class Tile, Element kElement, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void run_consumer(const GemmParams& p, SharedStorage<Tile>& s,
                                             const ClusterPlace& at, int consumer) {
  // The warpgroup's first row in the CTA's tile.
  const int row = Tile::kPingpong ? 0 : consumer * Tile::kRows;
  ItemReader<Tile> items{s, {}};
  Accumulators<Tile> acc;

  wait_for_earlier_kernels();
  if (Tile::kPingpong && consumer == 1) named_arrive(kTurnBarrier, 2 * kWarpgroup);  // the first turn is 0's
  const auto release = [&] {
    __syncwarp();
    items.release(threadIdx.x % 32 == 0);
  };
  const auto finish = [&] {
    __syncwarp();
    if (p.hooks.doorbell.counters != nullptr && threadIdx.x % 32 == 0) items.say_stored();
    items.release(threadIdx.x % 32 == 0);
  };
  while (true) {
    const WorkItem& item = items.next();
    const int iters = item.iters;
    if (iters == 0) break;
    if (Tile::kPingpong && static_cast<int>(items.count % Tile::kConsumers) != consumer) {
      release();
      continue;
    }
    if (p.bias != nullptr)
      load_bias<Tile::kBN>(p, item.batch, item.n, s.bias[consumer], kOwnBarrier + consumer);
    if constexpr (Tile::kScaled) request_scales<Tile>(p, s, item, row, consumer, kOwnBarrier + consumer);
    if (Tile::kPingpong) named_sync(kTurnBarrier + consumer, 2 * kWarpgroup);
    const int slots = item.partials();
    const int addends = item.addends;
    RingPosition<Tile::kStages> stage{item.stage, item.phase};
    const auto end_turn = [&] {
      if (Tile::kPingpong) named_arrive(kTurnBarrier + 1 - consumer, 2 * kWarpgroup);
    };
    if constexpr (Tile::kScaled) {
      scaled_mainloop<Tile>(p, acc, s, stage, iters, consumer, kOwnBarrier + consumer);
    } else {
      mainloop<Tile, kElement, kMajorA, kMajorB>(acc, s, stage, iters, row, [&] {
        if (slots + addends == 0) end_turn();
      });
    }

    const int part = Tile::kPingpong ? 0 : consumer;
    if (item.slot >= 0) {
      if (p.shares > 0) {
        finish_divided<Tile>(p, s, at, item, part, row, consumer, kOwnBarrier + consumer, acc);
      } else {
        publish_partial<Tile>(SlotView<Tile>(p, at), item.slot, part, acc, kOwnBarrier + consumer);
      }
      finish();
      continue;
    }
    if (slots > 0) add_partials<Tile>(s, slots, part, stage, acc);
    if (addends > 0) add_addends<Tile>(p, s, addends, part, stage, s.bias[consumer], acc);
    // Not before: the other's first stage comes behind these, and a barrier tells one phase from the next
    // only.
    if (slots + addends > 0) end_turn();
    const StagingBuffer staging(s.staging[4 * consumer]);
    const int first = item.m + row + 16 * staging.warp;
    if (p.departs) {  // code of its own: a loop around the plain one slows tiles of 192 columns by up to 5 %
      store_departing<Tile>(p, item, first, acc, staging);
    } else if (p.plain) {
      store_plain<Tile>(p, p.out, item, first, acc, staging);
    } else if constexpr (Tile::kScaled) {
      store_biased<Tile>(p, item, first, acc, s.bias[consumer], staging);
    } else {
      store_finished<Tile>(p, item, first, acc, s.bias[consumer], staging);
    }
    finish();
  }
}

template <class Tile, Element kElement, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    streamk_gemm_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  auto& s = *reinterpret_cast<SharedStorage<Tile>*>(dynamic_shared);

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const uint32_t rank = cute::block_rank_in_cluster();
  const int cluster_m = p.cluster_m;
  const ClusterPlace at{rank,
                        static_cast<uint32_t>(cluster_m * p.cluster_n),
                        static_cast<int>(rank) % cluster_m,
                        static_cast<int>(rank) / cluster_m,
                        cluster_m,
                        p.cluster_n};
  const bool bells = p.hooks.doorbell.counters != nullptr;
  const bool block_scales = Tile::kScaled && p.scaled.blocks;
  if (threadIdx.x == 0) init_barriers(s, at, bells, block_scales);
  if (warp == 1) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    s.release_to[lane] =
        lane < static_cast<int>(at.sharers()) ? remote_address(&s.empty[0], at.sharer(lane)) : 0;
  }
  // No CTA may signal another's barriers, or multicast into its stages, before they are ready.
  if (at.size > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }

  allow_later_kernels();
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::kProducerRegisters>();
    // Elected: of another single thread the compiler does not know that it is alone, and wraps each of its
    // loads in a loop over those who ask.
    if (warp == 0 && cute::elect_one_sync()) run_loader<Tile, kMajorA, kMajorB>(p, s, at);
    if (warp == 1 && cute::elect_one_sync()) run_scheduler<Tile>(p, s, at);
    if (warp == 2 && bells && cute::elect_one_sync()) run_ringer<Tile>(p, s);
    if constexpr (Tile::kScaled) {
      if (warp == 3 && block_scales) run_scale_loader<Tile>(p, s);
    }
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    run_consumer<Tile, kElement, kMajorA, kMajorB>(p, s, at, warp / 4 - 1);
  }
  if (at.size > 1) cute::cluster_sync();  // the other may still signal barriers here
}

template <class Tile, Element kElement, Major kMajorA, Major kMajorB>
KernelInfo describe() {
  static_assert(sizeof(SharedStorage<Tile>) <= kSharedLimit, "A CTA has 227 KiB of shared memory.");
  static_assert(offsetof(SharedStorage<Tile>, staging) % 128 == 0,
                "Chunks of 16 bytes, swizzled in lines of 128.");
  static_assert(offsetof(SharedStorage<Tile>, bias) % 16 == 0, "The bias is read two values at a time.");
  return {reinterpret_cast<const void*>(&streamk_gemm_kernel<Tile, kElement, kMajorA, kMajorB>),
          sizeof(SharedStorage<Tile>), Tile::kThreads};
}

template <class Tile>
KernelInfo scaled_kernel_info() {
  return describe<Tile, Element::kFp8, Major::kK, Major::kK>();
}

template <class Tile, Element kElement>
KernelInfo kernel_info(Major a, Major b) {
  if (a == Major::kK) {
    return b == Major::kK ? describe<Tile, kElement, Major::kK, Major::kK>()
                          : describe<Tile, kElement, Major::kK, Major::kOuter>();
  }
  return b == Major::kK ? describe<Tile, kElement, Major::kOuter, Major::kK>()
                        : describe<Tile, kElement, Major::kOuter, Major::kOuter>();
}

}  // namespace tpk::sm90a

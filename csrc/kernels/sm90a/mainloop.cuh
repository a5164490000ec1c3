// Main loop of a consumer warpgroup: wait for a stage, multiply, release the stage before.
#pragma once

#include "kernels/sm90a/shared.cuh"

namespace tpk::sm90a {

template <class Tile>
using Accumulators = float[Tile::kBlocks][Tile::kBlockAccumulators];

// Keeps the compiler from moving uses of the accumulators across wgmma's asynchronous ones.
template <class Tile>
__device__ __forceinline__ void pin(Accumulators<Tile>& acc) {
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kBlockAccumulators; ++j) cute::warpgroup_fence_operand(acc[i][j]);
  }
}

// Tells the loaders of every CTA that writes a stage that a warp has done with it. Lane i tells the i-th of
// them: the addresses lie in shared memory, because registers are scarce here.
template <class Tile>
__device__ __forceinline__ void release_stage(SharedStorage<Tile>& s, int stage) {
  const uint32_t first = *static_cast<volatile uint32_t*>(&s.release_to[thread_number() % 32]);
  if (first != 0) arrive_remote(first + stage * static_cast<uint32_t>(sizeof(uint64_t)));
}

// acc = the products of `iters` stages from `stage` on. row: the warpgroup's first row in the CTA's tile.
// on_issued() is called when the last product is under way.
//
// Cooperating warpgroups wait for each stage's products before they issue the next: the other one's keep the
// tensor cores busy meanwhile, and a stage is free again one iteration earlier. A warpgroup that multiplies
// alone (pingpong) keeps two stages' products in flight.
template <class Tile, Element kElement, Major kMajorA, Major kMajorB, class OnIssued>
__device__ __forceinline__ void mainloop(Accumulators<Tile>& acc, SharedStorage<Tile>& s,
                                         RingPosition<Tile::kStages>& stage, int iters, int row,
                                         OnIssued on_issued) {
  int previous = -1;
  pin<Tile>(acc);
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    s.full_barrier(stage.index).wait(stage.phase);
    const uint64_t a = descriptor<kMajorA>(shared_address(s.stages[stage.index].a)) + row / 64 * kStep64;
    const uint64_t b = descriptor<kMajorB>(shared_address(s.stages[stage.index].b));
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBK / 16; ++k) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        wgmma<kElement, Tile::kBN, kMajorA, kMajorB>(acc[block], a + block * kStep64 + k * kStepK16<kMajorA>,
                                                     b + k * kStepK16<kMajorB>, i > 0 || k > 0);
      }
    }
    cute::warpgroup_commit_batch();
    if constexpr (Tile::kPingpong) {
      if (previous >= 0) {
        cute::warpgroup_wait<1>();
        release_stage(s, previous);
      }
      previous = stage.index;
    } else {
      cute::warpgroup_wait<0>();
      release_stage(s, stage.index);
    }
    stage.advance();
  }
  on_issued();
  if constexpr (Tile::kPingpong) {
    cute::warpgroup_wait<0>();
    release_stage(s, previous);
  }
  pin<Tile>(acc);
}

}  // namespace tpk::sm90a

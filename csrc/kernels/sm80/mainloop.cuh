// Main loop: multiplies and accumulates one segment (a run of K iterations of one output tile).
//
// A ring of kStages shared-memory stages is filled by cp.async, kStages - 1 of them ahead; fragments
// are read one K step ahead into a second set of registers, so that the tensor cores need not wait for
// either. In pairs (Tile::kInPairs) both sets are multiplied at once, and read again as they become free:
// while a warp waits for its own, another one multiplies.
#pragma once

#include "kernels/sm80/fragments.cuh"
#include "kernels/sm80/loader.cuh"
#include "kernels/sm80/scheduler.cuh"

namespace tpk::sm80 {

template <class Tile>
using Accumulators = typename Tile::Sum[Tile::kFragmentsM][Tile::kFragmentsN][4];

template <class Tile>
__device__ __forceinline__ void clear(Accumulators<Tile>& acc) {
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kFragmentsN; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] = 0;
    }
  }
}

// Brings stage number `stage` of a segment to shared memory, if there is one. A group is committed in any
// case, so that counting groups stays counting stages.
template <class Tile, class LoaderA, class LoaderB>
__device__ __forceinline__ void load_stage(const GemmParams& p, LoaderA& a, LoaderB& b, uint32_t to,
                                           int stage, int count, int last_stage) {
  if (stage < count) {
    const int elements = stage == count - 1 ? last_stage : Tile::kStageK;
    a.load(p.a, to, elements);
    b.load(p.b, to + Tile::kBytesA, elements);
  }
  cp_async_commit();
}

// Loads a segment's first stages, as many as can be under way. No thread may still read any.
template <class Tile, class LoaderA, class LoaderB>
__device__ __forceinline__ void start_segment(const GemmParams& p, const WorkItem& item, LoaderA& a,
                                              LoaderB& b, uint32_t stages) {
  a.start(p.a, item.a_offset, static_cast<int>(min64(Tile::kBM, p.problem.m - item.m)));
  b.start(p.b, item.b_offset, static_cast<int>(min64(Tile::kBN, p.problem.n - item.n)));
#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    load_stage<Tile>(p, a, b, stages + static_cast<uint32_t>(s * Tile::kStageBytes), s, item.stages,
                     item.last_stage);
  }
}

// Adds a segment that was started, of `count` stages with last_stage elements of K in the last, to acc. On
// return other threads may still be reading stages.
template <class Tile, class LoaderA, class LoaderB, class ReaderA, class ReaderB>
__device__ __forceinline__ void mainloop(Accumulators<Tile>& acc, const GemmParams& p, LoaderA& loader_a,
                                         LoaderB& loader_b, const ReaderA& reader_a, const ReaderB& reader_b,
                                         uint32_t stages, int count, int last_stage) {
  // Loads stand among the products of the tensor cores, which are under way while addresses are worked out.
  // Those of B come a step later, but before groups are counted in the last step.
  constexpr bool kAmong = Tile::kElement != Element::kFp32;
  constexpr int kStepOfB = kAmong && Tile::kKSteps > 2 ? 1 : 0;
  const uint32_t end = stages + Tile::kRingBytes;
  uint32_t write = end - Tile::kStageBytes;
  const auto load_next = [&](int step, int left) {
    const bool loads = left >= Tile::kStages;
    const int elements = left == Tile::kStages ? last_stage : Tile::kStageK;
    if (step == 0 && loads) loader_a.load(p.a, write, elements);
    if (step != kStepOfB) return;
    if (loads) loader_b.load(p.b, write + Tile::kBytesA, elements);
    cp_async_commit();
    write += Tile::kStageBytes;
    if (write == end) write = stages;
  };
  uint32_t read = stages;
  // The next stage is complete for this thread, after the barrier for all; and all have read the one before
  // it, which is loaded next.
  const auto wait_for_stage = [&] {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
  };
  const auto advance = [&] {
    wait_for_stage();
    read += Tile::kStageBytes;
    if (read == end) read = stages;
  };
  wait_for_stage();

  typename ReaderA::Fragments fa[2];
  typename ReaderB::Fragments fb[2];
  reader_a.read(fa[0], read, 0);
  reader_b.read(fb[0], read + Tile::kBytesA, 0);

  constexpr int kSteps = Tile::kKSteps;
  // After the last stage a stale stage is read, into registers that nobody uses.
  if constexpr (Tile::kInPairs && kHasPairs) {
    reader_a.read(fa[1], read, 1);
    reader_b.read(fb[1], read + Tile::kBytesA, 1);
#pragma unroll 1
    for (int left = count; left > 0; --left) {
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        if (step == kSteps - 2) advance();
        const int next = (step + 2) % kSteps;
#pragma unroll
        for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
          for (int j = 0; j < Tile::kFragmentsN; ++j) {
            mma<Tile::kElement>(acc[i][j], fa[0][i], fa[1][i], fb[0][j / 2][j % 2], fb[1][j / 2][j % 2]);
          }
          reader_a.read(fa[0], read, next, i);
          reader_a.read(fa[1], read, next + 1, i);
          if (i == 0) {
            load_next(step, left);
            load_next(step + 1, left);
          }
        }
        reader_b.read(fb[0], read + Tile::kBytesA, next);
        reader_b.read(fb[1], read + Tile::kBytesA, next + 1);
      }
    }
  } else {
#pragma unroll 1
    for (int left = count; left > 0; --left) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) advance();
        reader_a.read(fa[(step + 1) % 2], read, (step + 1) % kSteps);
        reader_b.read(fb[(step + 1) % 2], read + Tile::kBytesA, (step + 1) % kSteps);
        if (!kAmong) load_next(step, left);
#pragma unroll
        for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
          for (int j = 0; j < Tile::kFragmentsN; ++j) {
            multiply<Tile::kElement>(acc[i][j], fa[step % 2][i], fb[step % 2][j / 2], j % 2);
          }
          if (kAmong && i == 0) load_next(step, left);
        }
      }
    }
  }
}

}  // namespace tpk::sm80

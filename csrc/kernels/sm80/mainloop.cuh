// Main loop: multiplies and accumulates one segment (a run of K iterations of one output tile).
//
// A ring of kStages shared-memory stages is filled by cp.async, kStages - 1 of them ahead; fragments
// are read one K step ahead into a second set of registers, so that the tensor cores need not wait for
// either.
#pragma once

#include "kernels/sm80/fragments.cuh"
#include "kernels/sm80/loader.cuh"

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

// Adds a segment of k_left elements of K, which come in `count` stages, to acc. No thread may still use the
// stages; on return others may still be reading them.
template <class Tile, class LoaderA, class LoaderB, class ReaderA, class ReaderB>
__device__ __forceinline__ void mainloop(Accumulators<Tile>& acc, LoaderA& loader_a, LoaderB& loader_b,
                                         const ReaderA& reader_a, const ReaderB& reader_b, const Operand& a,
                                         const Operand& b, uint32_t stages, int count, int64_t k_left) {
  uint32_t write = stages;
  const uint32_t end = stages + Tile::kStages * Tile::kStageBytes;
  int to_load = count;

  // An empty group is committed when nothing is left to load, so that counting groups stays counting stages.
  auto load_next = [&] {
    if (to_load > 0) {
      const int left = k_left < Tile::kStageK ? static_cast<int>(k_left) : Tile::kStageK;
      loader_a.load(a, write, left);
      loader_b.load(b, write + Tile::kBytesA, left);
      k_left -= Tile::kStageK;
      --to_load;
    }
    cp_async_commit();
    write += Tile::kStageBytes;
    if (write == end) write = stages;
  };

#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; ++s) load_next();
  cp_async_wait<Tile::kStages - 2>();
  __syncthreads();

  uint32_t read = stages;
  typename ReaderA::Fragments fa[2];
  typename ReaderB::Fragments fb[2];
  reader_a.read(fa[0], read, 0);
  reader_b.read(fb[0], read + Tile::kBytesA, 0);

#pragma unroll 1
  for (int done = 0; done < count; ++done) {
#pragma unroll
    for (int step = 0; step < Tile::kKSteps; ++step) {
      if (step == Tile::kKSteps - 1) {
        // The next stage is complete for this thread, after the barrier for all; and all have read this one,
        // which the next load_next overwrites.
        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();
        read += Tile::kStageBytes;
        if (read == end) read = stages;
      }
      // After the last stage this reads a stale stage into registers that nobody uses.
      constexpr int kSteps = Tile::kKSteps;
      reader_a.read(fa[(step + 1) % 2], read, (step + 1) % kSteps);
      reader_b.read(fb[(step + 1) % 2], read + Tile::kBytesA, (step + 1) % kSteps);
      if (step == 0) load_next();
#pragma unroll
      for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::kFragmentsN; ++j) {
          multiply<Tile::kElement>(acc[i][j], fa[step % 2][i], fb[step % 2][j / 2], j % 2);
        }
      }
    }
  }
  cp_async_wait<0>();
}

}  // namespace tpk::sm80

// Scheduler: hands a CTA its segments, one after another, by walking the plan.
//
// One thread walks and the CTA reads the result from shared memory, so that the state of the walk costs no
// registers during the main loop.
#pragma once

#include <new>

#include "kernels/sm80/params.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::sm80 {

// One segment, with everything that is the same for all threads worked out.
struct WorkItem {
  int64_t a_offset;  // bytes from A's start to the segment's first element
  int64_t b_offset;
  int64_t batch;
  int64_t m;  // first row and column of the tile
  int64_t n;
  int64_t slot;
  int64_t first_slot;
  int64_t end_slot;
  int32_t stages;      // in which the elements of K come; 0: no work is left
  int32_t last_stage;  // elements of the last one
};

// Three segments: the next one is fetched while some threads are still at the end of the one before.
struct WorkerState {
  WorkItem item[3];
  alignas(Walker) unsigned char walker[sizeof(Walker)];
};

template <class Tile>
__device__ __forceinline__ WorkItem make_item(const GemmParams& p, const Step& s) {
  const TileCoord tile = p.walk.tile_at(s.position);
  const int64_t k = s.k_begin * Tile::kBK;
  const int64_t length = (s.k_end - s.k_begin) * Tile::kBK;
  WorkItem item;
  item.batch = tile.batch;
  item.m = tile.m * Tile::kBM;
  item.n = tile.n * Tile::kBN;
  item.a_offset = item.batch * p.a.batch_stride + item.m * p.a.outer_stride + k * p.a.k_stride;
  item.b_offset = item.batch * p.b.batch_stride + item.n * p.b.outer_stride + k * p.b.k_stride;
  item.slot = s.slot;
  item.first_slot = s.first_slot;
  item.end_slot = s.end_slot;
  item.stages = static_cast<int32_t>((length + Tile::kStageK - 1) / Tile::kStageK);
  item.last_stage =
      static_cast<int32_t>(min64(length, p.problem.k - k) - int64_t{item.stages - 1} * Tile::kStageK);
  return item;
}

// Out of line: the walk would otherwise be weighed against the main loop's registers.
template <class Tile>
__device__ __forceinline__ void fetch(const GemmParams& p, WorkerState* state, int place) {
  Step step;
  if (reinterpret_cast<Walker*>(state->walker)->next(p.walk, &step)) {
    state->item[place] = make_item<Tile>(p, step);
  } else {
    state->item[place].stages = 0;
  }
}

// The CTA's next segment into state->item[place], for all threads behind the next barrier. 0 stages: there is
// none.
template <class Tile>
__device__ __forceinline__ void fetch_segment(const GemmParams& p, WorkerState* state, int place) {
  if (threadIdx.x == 0) fetch<Tile>(p, state, place);
}

}  // namespace tpk::sm80

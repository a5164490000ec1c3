// Scheduler: hands a CTA its segments, one after another, by walking tpk::Schedule.
//
// One thread walks and the CTA reads the result from shared memory, so that the 64-bit state of the walk
// costs no registers during the main loop.
#pragma once

#include <new>

#include "comm/flags.cuh"
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
  int64_t k_left;  // elements of K
  int64_t slot;
  int64_t first_slot;
  int64_t end_slot;
  int32_t stages;  // in which the elements of K come; 0: no work is left
};

struct WorkerState {
  WorkItem item;
  alignas(SegmentCursor) unsigned char cursor[sizeof(SegmentCursor)];
  bool has_ticket;
  int64_t next_tile;  // position, where whole tiles are dealt out
};

template <class Tile>
__device__ __forceinline__ WorkItem make_item(const GemmParams& p, const Segment& s) {
  const TileCoord tile = p.order.at(s.position);
  const int64_t k = s.k_begin * Tile::kBK;
  const int64_t length = (s.k_end - s.k_begin) * Tile::kBK;
  WorkItem item;
  item.batch = tile.batch;
  item.m = tile.m * Tile::kBM;
  item.n = tile.n * Tile::kBN;
  item.a_offset = item.batch * p.a.batch_stride + item.m * p.a.outer_stride + k * p.a.k_stride;
  item.b_offset = item.batch * p.b.batch_stride + item.n * p.b.outer_stride + k * p.b.k_stride;
  item.k_left = min64(length, p.problem.k - k);
  item.slot = s.slot;
  item.first_slot = s.first_slot;
  item.end_slot = s.end_slot;
  item.stages = static_cast<int32_t>((length + Tile::kStageK - 1) / Tile::kStageK);
  return item;
}

// Out of line: 64-bit divisions and the walk would otherwise be weighed against the main loop's registers.
template <class Tile>
static __device__ __noinline__ void fetch(const GemmParams& p, WorkerState* state) {
  auto* cursor = reinterpret_cast<SegmentCursor*>(state->cursor);
  while (true) {
    if (!state->has_ticket) {
      const uint32_t ticket = comm::take_ticket(p.ticket);
      if (ticket >= p.schedule.workers) {
        state->item.stages = 0;
        return;
      }
      ::new (cursor) SegmentCursor(p.schedule, ticket);
      state->has_ticket = true;
    }
    Segment s;
    if (cursor->next(&s)) {
      state->item = make_item<Tile>(p, s);
      return;
    }
    state->has_ticket = false;
  }
}

// The next tile, where whole tiles are dealt out to the CTAs in turn.
template <class Tile>
__device__ __forceinline__ void next_tile(const GemmParams& p, WorkerState* state) {
  const int64_t position = state->next_tile;
  state->item.stages = 0;
  if (position >= p.order.size()) return;
  state->next_tile += ctas_of_grid();
  state->item = make_item<Tile>(p, Segment{position, 0, p.schedule.k_iters, 0, -1, -1, -1});
}

// The CTA's next segment into state->item; false when there is none. All threads call it. It is also the
// barrier between segments: shared memory may be reused afterwards.
template <class Tile>
__device__ __forceinline__ bool next_segment(const GemmParams& p, WorkerState* state) {
  __syncthreads();
  if (threadIdx.x == 0) {
    if (p.ticket == nullptr) {
      next_tile<Tile>(p, state);
    } else {
      fetch<Tile>(p, state);
    }
  }
  __syncthreads();
  return state->item.stages > 0;
}

}  // namespace tpk::sm80

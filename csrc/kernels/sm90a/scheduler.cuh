// Scheduler: one thread of the loading warpgroup walks tpk::Schedule and hands segments to the loading thread
// and to the consumers through a small ring, so that 64-bit divisions cost the main loop neither time nor
// registers.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/shared.cuh"
#include "kernels/sm90a/work.hpp"

namespace tpk::sm90a {

template <class Tile>
__device__ __forceinline__ WorkItem make_item(const GemmParams& p, const Work& w, const ClusterPlace& at) {
  WorkItem item;
  int row = 0;
  int tile_m = w.tile_m;
  item.m_end = static_cast<int32_t>(p.problem.m);
  item.batch = w.batch;
  if (p.blocks.count > 0) {
    int block = 0;
    for (int high = p.blocks.count - 1; block < high;) {
      const int middle = (block + high) / 2;
      if (tile_m < p.blocks.first_tile[middle + 1]) {
        high = middle;
      } else {
        block = middle + 1;
      }
    }
    tile_m -= p.blocks.first_tile[block];
    row = p.blocks.rows[block].begin;
    item.m_end = p.blocks.rows[block].end;
    item.batch = p.blocks.matrix[block];
  }
  item.m = row + (tile_m * p.cluster_m + at.m) * Tile::kBM;
  item.n = (w.tile_n * p.cluster_n + at.n) * (p.gated ? Tile::kBN / 2 : Tile::kBN);
  item.k = w.k_begin * Tile::kBK;
  item.iters = w.iters;
  item.slot = w.slot;
  item.first_slot = w.first_slot;
  item.end_slot = w.end_slot;
  // By the tile's rows, not its first one: a CTA of the cluster may have none of them, beyond their end.
  const bool stays = p.departs && item.m_end > p.own_rows.begin && item.m_end <= p.own_rows.end;
  item.addends = stays && w.slot < 0 ? p.own_rows.addends : 0;
  return item;
}

// The cluster's next ticket, the same for all of its CTAs. The leader draws it and sends it round.
template <class Tile>
struct TicketSource {
  const GemmParams& p;
  SharedStorage<Tile>& s;
  const ClusterPlace& at;
  uint32_t phase = 0;
  int64_t next_static;

  __device__ TicketSource(const GemmParams& params, SharedStorage<Tile>& shared, const ClusterPlace& place)
      : p(params), s(shared), at(place), next_static(blockIdx.x / place.size) {}

  __device__ int64_t next() {
    if (p.ticket == nullptr || p.shares > 0) {
      const int64_t worker = next_static;
      next_static += gridDim.x / at.size;
      return worker;
    }
    if (at.size == 1) return comm::take_ticket(p.ticket);
    uint32_t ticket;
    if (at.rank == 0) {
      ticket = comm::take_ticket(p.ticket);
      s.ticket_empty_barrier().wait(phase ^ 1);  // the others have read the one before
      for (uint32_t cta = 1; cta < at.size; ++cta) {
        store_remote(&s.ticket, ticket, &s.ticket_full_barrier(), cta);
      }
    } else {
      s.ticket_full_barrier().arrive_and_expect_tx(sizeof(uint32_t));
      s.ticket_full_barrier().wait(phase);
      ticket = *static_cast<volatile uint32_t*>(&s.ticket);
      arrive_remote_after_reads(remote_address(&s.ticket_empty, 0));
    }
    phase ^= 1;
    return ticket;
  }
};

template <class Tile>
__device__ __forceinline__ void run_scheduler(const GemmParams& p, SharedStorage<Tile>& s,
                                              const ClusterPlace& at) {
  RingPosition<kItems> ring;
  RingPosition<Tile::kStages> stage;
  TicketSource<Tile> tickets(p, s, at);
  const auto push = [&](WorkItem item) {
    item.stage = stage.index;
    item.phase = stage.phase;
    stage.advance(item.iters + fixup_stages<Tile>(item.partials()) +
                  addend_stages<Tile>(item.addends, p.out_kind == ScalarKind::kFp32));
    s.item_empty_barrier(ring.index).wait(ring.phase ^ 1);
    s.items[ring.index] = item;
    s.item_full_barrier(ring.index).arrive();
    ring.advance();
  };
  if (p.ticket != nullptr && p.shares == 0) wait_for_earlier_kernels();
  while (true) {
    const int64_t worker = tickets.next();
    if (worker >= p.schedule.tickets()) break;
    bool is_out = worker < p.opening.count && p.opening.work[worker].iters > 0;
    if (is_out) push(make_item<Tile>(p, p.opening.work[worker], at));
    SegmentCursor cursor(p.schedule, worker);
    Segment segment;
#pragma unroll 1
    for (; cursor.next(&segment); is_out = false) {
      if (!is_out) push(make_item<Tile>(p, describe_work(p.schedule, p.order, p.shares, segment), at));
    }
  }
  WorkItem end{};
  push(end);
}

// A reader's view of the ring. Every reader reads every item.
template <class Tile>
struct ItemReader {
  SharedStorage<Tile>& s;
  uint32_t count = 0;

  // The next item, valid until it is released. All threads of a consumer warp, or the loading thread, call
  // it, or who rings.
  __device__ __forceinline__ const WorkItem& next() {
    s.item_full_barrier(count % kItems).wait(count / kItems & 1);
    return s.items[count % kItems];
  }
  // What a warp stored of the item is in memory, as far as this CTA sees. One thread of it calls.
  __device__ __forceinline__ void say_stored() { s.stored_barrier(count % kItems).arrive(); }
  // Waits until all warps have said so.
  __device__ __forceinline__ void wait_stored() { s.stored_barrier(count % kItems).wait(count / kItems & 1); }
  // One thread of each reader says that the item is no longer needed.
  __device__ __forceinline__ void release(bool signals) {
    if (signals) s.item_empty_barrier(count % kItems).arrive();
    ++count;
  }
};

}  // namespace tpk::sm90a

// Scheduler: one thread of the loading warpgroup walks tpk::Schedule and hands segments to the loading thread
// and to the consumers through a small ring, so that 64-bit divisions cost the main loop neither time nor
// registers.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/shared.cuh"

namespace tpk::sm90a {

template <class Tile>
__device__ __forceinline__ WorkItem make_item(const GemmParams& p, const Segment& s, const ClusterPlace& at) {
  const TileCoord tile = p.order.at(s.position);
  WorkItem item;
  item.m = static_cast<int32_t>((tile.m * p.cluster_m + at.m) * Tile::kBM);
  item.n = static_cast<int32_t>((tile.n * p.cluster_n + at.n) * (p.gated ? Tile::kBN / 2 : Tile::kBN));
  item.batch = static_cast<int32_t>(tile.batch);
  item.k = static_cast<int32_t>(s.k_begin * kBK);
  item.iters = static_cast<int32_t>(s.k_end - s.k_begin);
  item.slot = static_cast<int32_t>(s.slot);
  item.first_slot = static_cast<int32_t>(s.first_slot);
  item.end_slot = static_cast<int32_t>(s.end_slot);
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
    if (p.ticket == nullptr) {
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
      s.ticket_empty_barrier().arrive(0u);
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
  if (p.ticket != nullptr) wait_for_earlier_kernels();
  const auto push = [&](WorkItem item) {
    item.stage = stage.index;
    item.phase = stage.phase;
    stage.advance(item.iters + fixup_stages<Tile>(item.partials()));
    s.item_empty_barrier(ring.index).wait(ring.phase ^ 1);
    s.items[ring.index] = item;
    s.item_full_barrier(ring.index).arrive();
    ring.advance();
  };
  while (true) {
    const int64_t worker = tickets.next();
    if (worker >= p.schedule.workers) break;
    SegmentCursor cursor(p.schedule, worker);
    Segment segment;
    while (cursor.next(&segment)) push(make_item<Tile>(p, segment, at));
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
  // it.
  __device__ __forceinline__ const WorkItem& next() {
    s.item_full_barrier(count % kItems).wait(count / kItems & 1);
    return s.items[count % kItems];
  }
  // One thread of each reader says that the item is no longer needed.
  __device__ __forceinline__ void release(bool signals) {
    if (signals) s.item_empty_barrier(count % kItems).arrive();
    ++count;
  }
};

}  // namespace tpk::sm90a

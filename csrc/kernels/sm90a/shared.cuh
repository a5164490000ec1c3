// Shared memory of a CTA, and the barriers in it.
#pragma once

#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

constexpr int kItems = 4;  // segments that the scheduler may be ahead

// One segment of this CTA's tile, worked out by the scheduler.
struct WorkItem {
  int32_t m;  // first row and column of the tile in the output
  int32_t n;
  int32_t batch;
  int32_t k;      // first element of K
  int32_t iters;  // 0: no work is left
  int32_t slot;   // see tpk::Segment
  int32_t first_slot;
  int32_t end_slot;
};

template <class Tile>
struct alignas(1024) SharedStorage {
  struct Stage {
    unsigned char a[Tile::kBytesA];
    unsigned char b[Tile::kBytesB];
  };
  Stage stages[Tile::kStages];
  unsigned char staging[kConsumers * 4][kStagingBytes];  // per consumer warp
  uint64_t full[Tile::kStages];                          // loaded by TMA, of this CTA and its cluster peer
  uint64_t empty[Tile::kStages];                         // released by the consumers that multicast reaches
  uint64_t item_full[kItems];
  uint64_t item_empty[kItems];
  uint64_t ticket_full;
  uint64_t ticket_empty;
  WorkItem items[kItems];
  uint32_t ticket;

  __device__ LoadBarrier& full_barrier(int i) { return *reinterpret_cast<LoadBarrier*>(&full[i]); }
  __device__ Barrier& empty_barrier(int i) { return *reinterpret_cast<Barrier*>(&empty[i]); }
  __device__ Barrier& item_full_barrier(int i) { return *reinterpret_cast<Barrier*>(&item_full[i]); }
  __device__ Barrier& item_empty_barrier(int i) { return *reinterpret_cast<Barrier*>(&item_empty[i]); }
  __device__ LoadBarrier& ticket_full_barrier() { return *reinterpret_cast<LoadBarrier*>(&ticket_full); }
  __device__ Barrier& ticket_empty_barrier() { return *reinterpret_cast<Barrier*>(&ticket_empty); }
};

// A place in a ring of kSize entries and how often the ring was gone round, modulo 2.
template <int kSize>
struct RingPosition {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int count) {
    const int sum = index + count;
    index = sum % kSize;
    phase ^= (sum / kSize) & 1;
  }
};

// Where this CTA stands in its cluster.
struct ClusterPlace {
  uint32_t rank;
  uint32_t size;
  int m;  // row and column of CTAs
  int n;
};

template <class Tile>
__device__ __forceinline__ void init_barriers(SharedStorage<Tile>& s, uint32_t cluster_size) {
  // Consumer warps that read one stage: of both warpgroups, or in turn of one.
  constexpr uint32_t kReaders = Tile::kPingpong ? 4 : 4 * kConsumers;
  for (int i = 0; i < Tile::kStages; ++i) {
    s.full_barrier(i).init(1);
    s.empty_barrier(i).init(kReaders * cluster_size);
  }
  for (int i = 0; i < kItems; ++i) {
    s.item_full_barrier(i).init(1);
    s.item_empty_barrier(i).init(1 + 4 * kConsumers);  // the loading thread and every consumer warp
  }
  s.ticket_full_barrier().init(1);
  s.ticket_empty_barrier().init(1);
  cutlass::arch::fence_barrier_init();
}

}  // namespace tpk::sm90a

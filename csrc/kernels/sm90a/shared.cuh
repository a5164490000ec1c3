// Shared memory of a CTA, and the barriers in it.
#pragma once

#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

constexpr int kItems = 4;  // segments that the scheduler may be ahead

// One segment of this CTA's tile, worked out by the scheduler.
struct WorkItem {
  int32_t m;  // first row and column of the tile in the output
  int32_t n;
  int32_t m_end;  // rows of the output from here on are no part of the tile
  int32_t batch;
  int32_t k;      // first element of K
  int32_t iters;  // 0: no work is left
  int32_t slot;   // see tpk::Segment
  int32_t first_slot;
  int32_t end_slot;
  int32_t stage;  // where its first stage stands in the ring, so that consumers keep no count of their own
  uint32_t phase;
  int32_t addends;  // departure: matrices that an own tile is given; see owner.cuh

  // Finishes its tile by adding so many partials.
  __device__ __forceinline__ int partials() const {
    return slot < 0 && first_slot >= 0 ? end_slot - first_slot : 0;
  }
};

// Scales of 8-bit operands: see scaled.cuh.
template <class Tile, bool kScaled = Tile::kScaled>
struct ScaleStorage {};
template <class Tile>
struct ScaleStorage<Tile, true> {
  struct Stage {
    float a[Tile::kBM];
    float b[Tile::kBN];  // of every column, or of every 128
  };
  Stage stages[Tile::kStages];                // of blocks
  float rows[Tile::kConsumers][Tile::kRows];  // else, of the tile that each warpgroup works on
  float columns[Tile::kConsumers][Tile::kBN];
};

template <class Tile>
struct alignas(1024) SharedStorage {
  struct Stage {
    unsigned char a[Tile::kBytesA];
    unsigned char b[Tile::kBytesB];
  };
  Stage stages[Tile::kStages];
  unsigned char staging[Tile::kConsumers * 4][kStagingBytes];  // per consumer warp
  float bias[Tile::kConsumers][Tile::kBN];                     // of the tile that each warpgroup works on
  uint64_t full[Tile::kStages];   // loaded by TMA, of this CTA and its cluster peer
  uint64_t empty[Tile::kStages];  // released by the consumers that multicast reaches
  uint64_t item_full[kItems];
  uint64_t item_empty[kItems];
  uint64_t stored[kItems];  // the item's tile is in memory, as far as this CTA's consumers see
  uint64_t ticket_full;
  uint64_t ticket_empty;
  WorkItem items[kItems];
  uint32_t release_to[32];  // whom lanes tell of a stage that was read: barriers of stage 0, 0 for nobody
  uint32_t ticket;
  uint32_t fixup_waits[Tile::kConsumers];   // divided.cuh: the warpgroup finishes its share itself
  uint64_t fixup_before[Tile::kConsumers];  // who had written a partial of its tile before it
  ScaleStorage<Tile> scales;

  __device__ LoadBarrier& full_barrier(int i) { return *reinterpret_cast<LoadBarrier*>(&full[i]); }
  __device__ Barrier& empty_barrier(int i) { return *reinterpret_cast<Barrier*>(&empty[i]); }
  __device__ Barrier& item_full_barrier(int i) { return *reinterpret_cast<Barrier*>(&item_full[i]); }
  __device__ Barrier& item_empty_barrier(int i) { return *reinterpret_cast<Barrier*>(&item_empty[i]); }
  __device__ Barrier& stored_barrier(int i) { return *reinterpret_cast<Barrier*>(&stored[i]); }
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

// Fix-up: accumulators of a thread that travel together. Chunk by chunk, and of each chunk partial by
// partial, as many as fit into a stage.
constexpr int kChunkValues = 16;
constexpr int kChunkBytes = kChunkValues * kWarpgroup * static_cast<int>(sizeof(float));
template <class Tile>
constexpr int kChunks = Tile::kAccumulators / kChunkValues;
// Parts of a partial: one for every warpgroup that works on the tile, of every CTA of the cluster.
template <class Tile>
constexpr int kPartsPerCta = Tile::kPingpong ? 1 : Tile::kConsumers;
template <class Tile>
constexpr int kChunksPerStage = Tile::kStageBytes / (kPartsPerCta<Tile> * kChunkBytes);
// Stages that adding so many partials takes.
template <class Tile>
__device__ __forceinline__ int fixup_stages(int partials) {
  return (kChunks<Tile> * partials + kChunksPerStage<Tile> - 1) / kChunksPerStage<Tile>;
}

// Where this CTA stands in its cluster.
struct ClusterPlace {
  uint32_t rank;
  uint32_t size;
  int m;  // row and column of CTAs
  int n;
  int rows;  // of CTAs
  int columns;

  // CTAs whose stages this one's loads reach, itself included: its column and its row.
  __device__ __forceinline__ uint32_t sharers() const { return static_cast<uint32_t>(rows + columns - 1); }
  // The i-th of them, 0 <= i < sharers().
  __device__ __forceinline__ uint32_t sharer(int i) const {
    if (i < rows) return static_cast<uint32_t>(i + rows * n);
    const int column = i - rows + (i - rows >= n ? 1 : 0);
    return static_cast<uint32_t>(m + rows * column);
  }
};

// Addends of an own tile come as blocks of 64 rows and 128 bytes, as large as a chunk. How many of the tile's
// columns that is, and how many blocks of one addend a part of the tile has.
constexpr int addend_columns(bool wide) { return wide ? 32 : 64; }
template <class Tile>
constexpr int addend_blocks(bool wide) {
  return Tile::kBlocks * Tile::kBN / addend_columns(wide);
}
// Stages that adding so many takes.
template <class Tile>
__device__ __forceinline__ int addend_stages(int addends, bool wide) {
  return (addend_blocks<Tile>(wide) * addends + kChunksPerStage<Tile> - 1) / kChunksPerStage<Tile>;
}

// bells: a warp of the loading warpgroup reads items, too. block_scales: another one does, and all of its
// threads load into stages.
template <class Tile>
__device__ __forceinline__ void init_barriers(SharedStorage<Tile>& s, const ClusterPlace& at, bool bells,
                                              bool block_scales) {
  // Consumer warps that read one stage: of both warpgroups, or in turn of one.
  constexpr uint32_t kReaders = Tile::kPingpong ? 4 : 4 * Tile::kConsumers;
  for (int i = 0; i < Tile::kStages; ++i) {
    s.full_barrier(i).init(block_scales ? 33 : 1);
    s.empty_barrier(i).init(kReaders * at.sharers());
  }
  for (int i = 0; i < kItems; ++i) {
    s.item_full_barrier(i).init(1);
    s.item_empty_barrier(i).init(1 + 4 * Tile::kConsumers + (bells ? 1 : 0) + (block_scales ? 1 : 0));
    s.stored_barrier(i).init(kReaders);
  }
  s.ticket_full_barrier().init(1);
  s.ticket_empty_barrier().init(at.size > 1 ? at.size - 1 : 1);
  cutlass::arch::fence_barrier_init();
}

}  // namespace tpk::sm90a

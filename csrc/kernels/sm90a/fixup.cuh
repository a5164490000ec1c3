// Fix-up: partial tiles go from the clusters that computed them to the tile's finisher, through fp32 slots in
// global memory. Warpgroup by warpgroup: each needs only its counterparts. A slot is written once and read
// once per launch, in fragment order: thread t's i-th group of four accumulators is the float4 at i * 128 +
// t, so every access of a warp is 512 contiguous bytes.
//
// The finisher's loading thread waits for the flags and brings the partials in through the stages of the main
// loop, as if they were further iterations: chunks of 16 accumulators a thread, each from all slots in turn,
// several to a stage. Loads from the consumers' own threads, a few registers' worth at a time, took 4 to 19
// us a tile.
#pragma once

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/mainloop.cuh"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/scheduler.cuh"

namespace tpk::sm90a {

constexpr uint32_t kPartialReady = 1;
template <class Tile>
struct SlotView {
  static constexpr int64_t kPartFloats = int64_t{Tile::kRows} * Tile::kBN;
  uint32_t* flags;
  float* data;
  int64_t parts;

  // Of a CTA's first part.
  __device__ __forceinline__ SlotView(const GemmParams& p, const ClusterPlace& at) {
    const int part = static_cast<int>(at.rank) * kPartsPerCta<Tile>;
    parts = at.size * kPartsPerCta<Tile>;
    flags = p.flags + part;
    data = p.partials + part * kPartFloats;
  }
  __device__ __forceinline__ uint32_t* flag(int64_t slot, int part) const {
    return flags + slot * parts + part;
  }
  __device__ __forceinline__ float* slot(int64_t slot, int part) const {
    return data + (slot * parts + part) * kPartFloats;
  }
};

// Writes the warpgroup's accumulators to its part of the slot. All 128 threads call it.
template <class Tile>
__device__ __forceinline__ void write_partial(const SlotView<Tile>& view, int64_t slot, int part,
                                              const Accumulators<Tile>& acc) {
  float4* to = reinterpret_cast<float4*>(view.slot(slot, part)) + thread_number() % kWarpgroup;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kBlockAccumulators; j += 4) {
      __stcg(to + (i * Tile::kBlockAccumulators + j) / 4 * kWarpgroup,
             make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]));
    }
  }
}

// Then raises the flag (release at gpu scope). barrier: a named barrier of this warpgroup.
template <class Tile>
__device__ __forceinline__ void publish_partial(const SlotView<Tile>& view, int64_t slot, int part,
                                                const Accumulators<Tile>& acc, int barrier) {
  write_partial<Tile>(view, slot, part, acc);
  named_sync(barrier, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0)
    comm::store_release<comm::Scope::kGpu>(view.flag(slot, part), kPartialReady);
}

// The loading thread's part: waits (bounded) for each slot's flags, then loads its chunks into the stages.
template <class Tile>
__device__ __forceinline__ void load_partials(const GemmParams& p, SharedStorage<Tile>& s,
                                              const ClusterPlace& at, const WorkItem& item,
                                              RingPosition<Tile::kStages>& stage) {
  const SlotView<Tile> view(p, at);
  for (int slot = item.first_slot; slot < item.end_slot; ++slot) {
    for (int part = 0; part < kPartsPerCta<Tile>; ++part) {
      wait_or_fail<comm::Scope::kGpu>(view.flag(slot, part), kPartialReady, {p.timeout_ns, p.fault},
                                      FaultKind::kPartial, slot, item.end_slot, no_peer);
    }
  }
  fence_async_proxy();  // what was acquired, before the bulk copies read it
  const int slots = item.partials();
  const int total = kChunks<Tile> * slots;
  int chunk = 0;
  int slot = 0;
#pragma unroll 1
  for (int done = 0; done < total; done += kChunksPerStage<Tile>) {
    const int count = min(kChunksPerStage<Tile>, total - done);
    s.empty_barrier(stage.index).wait(stage.phase ^ 1);
    LoadBarrier& full = s.full_barrier(stage.index);
    full.arrive_and_expect_tx(count * kPartsPerCta<Tile> * kChunkBytes);
    auto* to = reinterpret_cast<unsigned char*>(&s.stages[stage.index]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      for (int part = 0; part < kPartsPerCta<Tile>; ++part, to += kChunkBytes) {
        bulk_load(to, view.slot(item.first_slot + slot, part) + chunk * (kChunkBytes / 4), kChunkBytes,
                  &full);
      }
      if (++slot == slots) {
        slot = 0;
        ++chunk;
      }
    }
    stage.advance();
  }
}

// The consumers' part: acc = slot[first] + ... + slot[end - 1] + acc, in this order: the order of K, whoever
// finishes when. All 128 threads of a warpgroup call it.
template <class Tile>
__device__ __forceinline__ void add_partials(SharedStorage<Tile>& s, int slots, int part,
                                             RingPosition<Tile::kStages>& stage, Accumulators<Tile>& acc) {
  static_assert(Tile::kBlockAccumulators % kChunkValues == 0, "A chunk lies in one block.");
  int left = kChunks<Tile> * slots;  // chunks of partials
  int in_stage = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks<Tile>; ++chunk) {
    float sum[kChunkValues] = {};
#pragma unroll 1
    for (int i = 0; i < slots; ++i) {
      if (in_stage == 0) s.full_barrier(stage.index).wait(stage.phase);
      const uint32_t from = shared_address(&s.stages[stage.index]) +
                            (in_stage * kPartsPerCta<Tile> + part) * kChunkBytes +
                            threadIdx.x % kWarpgroup * 16;
#pragma unroll
      for (int j = 0; j < kChunkValues; j += 4) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(from + j / 4 * kWarpgroup * 16)
                     : "memory");
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[j + n] += x[n];
      }
      --left;
      if (++in_stage == kChunksPerStage<Tile> || left == 0) {
        fence_async_proxy_shared();  // these reads, before the loads that TMA puts there
        __syncwarp();
        release_stage(s, stage.index);
        stage.advance();
        in_stage = 0;
      }
    }
    constexpr int kPerBlock = Tile::kBlockAccumulators / kChunkValues;
    float* to = &acc[chunk / kPerBlock][chunk % kPerBlock * kChunkValues];
#pragma unroll
    for (int j = 0; j < kChunkValues; ++j) to[j] = sum[j] + to[j];
  }
}

}  // namespace tpk::sm90a

// Divided fix-up: where every worker has at most one piece of a split tile, its last, the workers of a tile
// write all their partials, and then each finishes a share of it: adds the partials of a few units in K order
// and runs the epilogue on them. One finisher alone has to read the whole tile from every other worker: with
// eleven of them 2.5 MB by one cluster, while the others stand idle.
//
// Progress. Nobody waits before it has written all that others wait for. A worker waits for its tile's others
// only if every cluster of the launch has started by then, so it will be served whatever else the device
// does. If not, it leaves its share, and says so with its flag; the last worker to have written, which needs
// to wait for nobody, does what was left. Sums are in K order whoever makes them: the same bits.
#pragma once

#include "kernels/sm90a/epilogue.cuh"
#include "kernels/sm90a/fixup.cuh"

namespace tpk::sm90a {

// The sums over a tile's slots, unit by unit.
struct PartialSums {
  static constexpr int kValues = kChunkValues;  // a unit is a chunk of a partial
  const char* from;                             // this thread's values of the first slot
  int64_t slot_bytes;
  int slots;
  float scale;

  __device__ __forceinline__ void operator()(int unit, bool multiply, float (&v)[kValues]) const {
    const char* p = from + static_cast<int64_t>(unit) * kChunkBytes;
    float sum[kValues] = {};
#pragma unroll 4
    for (int i = 0; i < slots; ++i, p += slot_bytes) {
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(p) + j * kWarpgroup);
        sum[4 * j] += x.x;
        sum[4 * j + 1] += x.y;
        sum[4 * j + 2] += x.z;
        sum[4 * j + 3] += x.w;
      }
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) v[j] = multiply ? v[j] * (scale * sum[j]) : scale * sum[j];
  }
};

// Who of a tile's workers has written its partial: worker i sets bit i, and bit 32 + i too if it leaves its
// share.
static_assert(tpk::kMostShares == 32, "A worker has two bits of 64.");
struct Arrivals {
  comm::u64* word;
  int count;

  __device__ __forceinline__ uint64_t all() const { return (uint64_t{1} << count) - 1; }
  static __device__ __forceinline__ uint64_t bits(int worker, bool leaves) {
    return uint64_t{1} << worker | (leaves ? uint64_t{1} << (32 + worker) : 0);
  }
  static __device__ __forceinline__ uint32_t left(uint64_t seen) { return static_cast<uint32_t>(seen >> 32); }
};

// Every thread of a consumer warpgroup calls it, with the accumulators of its part of item's tile. row: the
// part's first row in the CTA's tile.
template <class Tile>
__device__ __forceinline__ void finish_divided(const GemmParams& p, SharedStorage<Tile>& s,
                                               const ClusterPlace& at, const WorkItem& item, int part,
                                               int row, int consumer, int barrier, Accumulators<Tile>& acc) {
  const SlotView<Tile> view(p, at);
  const int count = p.shares;
  const int own = item.slot - item.first_slot;
  const Arrivals arrivals{reinterpret_cast<comm::u64*>(p.flags) + item.first_slot / count * view.parts +
                              at.rank * kPartsPerCta<Tile> + part,
                          count};
  const bool leads = threadIdx.x % kWarpgroup == 0;
  uint32_t started = 0;
  if (leads) started = comm::load_relaxed(p.ticket);
  write_partial<Tile>(view, item.slot, part, acc);
  if (leads) s.fixup_waits[consumer] = started == p.clusters_started;
  named_sync(barrier, kWarpgroup);
  const bool waits = s.fixup_waits[consumer];
  if (leads) s.fixup_before[consumer] = comm::set_bits(arrivals.word, arrivals.bits(own, !waits));

  uint32_t left = 0;  // shares that nobody does yet
  if (waits) {
    comm::u64 seen;
    if (!comm::wait_bits(arrivals.word, arrivals.all(), p.timeout_ns, &seen)) {
      const int missing = __ffs(static_cast<int>(~seen & arrivals.all())) - 1;
      report_late({p.timeout_ns, p.fault}, FaultKind::kPartial, item.first_slot + missing, item.end_slot, 0,
                  kPartialReady);
    }
    left = arrivals.left(seen);
  }
  if (!waits || left != 0) {  // the last to write one takes what was left: all of it is there
    named_sync(barrier, kWarpgroup);
    const uint64_t seen = s.fixup_before[consumer] | arrivals.bits(own, !waits);
    left = (seen & arrivals.all()) == arrivals.all() ? arrivals.left(seen) : 0;
    __threadfence();
  }
  if (waits) left |= 1u << own;

  const StagingBuffer staging(s.staging[4 * consumer]);
  const PartialSums sums{
      reinterpret_cast<const char*>(view.slot(item.first_slot, part)) + threadIdx.x % kWarpgroup * 16,
      view.parts * SlotView<Tile>::kPartFloats * static_cast<int64_t>(sizeof(float)), count, p.alpha};
  const int units = units_of<Tile, PartialSums::kValues>(p);
#pragma unroll 1
  for (; left != 0; left &= left - 1) {
    const int share = __ffs(static_cast<int>(left)) - 1;
    const int begin = share * units / count;
    const int end = (share + 1) * units / count;
    if (begin == end) continue;
    const int first_row = item.m + row + 16 * staging.warp;
    if (p.fast) {
      store_units<Tile, true, PartialSums::kValues>(p, item, first_row, begin, end, s.bias[consumer], staging,
                                                    sums);
    } else {
      store_units<Tile, false, PartialSums::kValues>(p, item, first_row, begin, end, s.bias[consumer],
                                                     staging, sums);
    }
    if (p.hooks.doorbell.counters != nullptr) {
      ring_doorbells(p, item, Tile::kBM, (end - begin) * (kBellUnits<Tile> / units), staging.lane);
    }
  }
  named_sync(barrier, kWarpgroup);  // all have read the words in shared memory
  // Nothing of the accumulators is needed any more: their registers were free for loads.
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kBlockAccumulators; ++j) acc[i][j] = 0.0f;
  }
}

}  // namespace tpk::sm90a

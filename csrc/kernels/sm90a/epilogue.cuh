// Epilogue of a consumer warp: 16 rows of a block of 64, in units of 32 or 64 columns, so that few registers
// are needed beside the accumulators. Units go through a small swizzled buffer of the warp's own, so that
// whole lines are stored. Ordinary stores, not TMA: its queue is full of the next tile's loads then, and
// waiting for it to read buffers cost 3 us a tile.
#pragma once

#include "kernels/sm90a/mainloop.cuh"
#include "kernels/sm90a/scheduler.cuh"
#include "kernels/sm90a/staging.cuh"

namespace tpk::sm90a {

// A warp's part of the tile to memory, nothing but rounded, or added to what is there. row: its first row in
// the output.
template <class Tile>
__device__ __forceinline__ void store_plain(const GemmParams& p, const Output& to, const WorkItem& item,
                                            int row, const Accumulators<Tile>& acc,
                                            const StagingBuffer& staging) {
  const int rows = item.m_end;
  const int cols = static_cast<int>(p.problem.n);
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block, row += 64) {
    if (row >= rows) break;
#pragma unroll
    for (int col = 0; col < Tile::kBN; col += 64) {
      if (item.n + col >= cols) break;
      const UnitPlace at{row, item.n + col, item.batch, rows, cols};
      store_whole<32>(to, p.out_kind, p.reduce, at, &acc[block][col / 2], staging);
    }
  }
}

// The same in a departure: rows of others to where they are summed, sums of own ones to all that want them.
template <class Tile>
__device__ __forceinline__ void store_departing(const GemmParams& p, const WorkItem& item, int row,
                                                const Accumulators<Tile>& acc, const StagingBuffer& staging) {
  const StoredHook& stored = p.hooks.departure.stored;
  const bool stays = item.addends > 0;
  Output to = stays ? p.own_rows.out : p.out;
  if (!stays && stored.on) {
    int owner = 0;
    while (p.hooks.departure.ranks.row_end[owner] < item.m_end) ++owner;
    to.data = stored.slots[owner];
  }
  const int more = stays ? stored.num_sums : 0;
#pragma unroll 1
  for (int i = 0;; ++i) {  // one copy of the code: it is long
    store_plain<Tile>(p, to, item, row, acc, staging);
    if (i == more) break;
    to.data = stored.sums[i];
  }
}

// v = unit number `unit` of the accumulators, or v *= scale * it. A run-time index would put the accumulators
// into local memory: select instead.
template <class Tile, bool kMultiply, int kValues>
__device__ __forceinline__ void take_unit(const Accumulators<Tile>& acc, int unit, float scale,
                                          float (&v)[kValues]) {
  constexpr int kPerBlock = Tile::kBN / (2 * kValues);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks * kPerBlock; ++i) {
    if (i != unit) continue;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const float x = scale * acc[i / kPerBlock][i % kPerBlock * kValues + j];
      v[j] = kMultiply ? v[j] * x : x;
    }
  }
}

// Units of a warp's part of a tile that is finished: half as many where there is a gate.
template <class Tile, int kValues>
__device__ __forceinline__ int units_of(const GemmParams& p) {
  constexpr int kPerBlock = Tile::kBN / (2 * kValues);
  return Tile::kBlocks * (p.gated ? kPerBlock / 2 : kPerBlock);
}

// Units [begin, end) of a warp's part of the tile to memory. row: the part's first row in the output. bias:
// of the tile's columns, in shared memory. sums(unit, multiply, v) gives
// the products, or multiplies v by them. One copy of the code for all units,
// and kFast without what is rare and long, since a single warp has to run through it: one output in whole
// lines, and of what is added late nothing but a staged residual.
template <class Tile, bool kFast, int kValues, class Sums>
__device__ __forceinline__ void store_units(const GemmParams& p, const WorkItem& item, int row, int begin,
                                            int end, const float* bias, const StagingBuffer& staging,
                                            const Sums& sums) {
  constexpr int kColumns = 2 * kValues;
  constexpr int kPerBlock = Tile::kBN / kColumns;
  const int units = units_of<Tile, kValues>(p) / Tile::kBlocks;
  const int rows = item.m_end;
  const int cols = static_cast<int>(p.problem.n);
  int block = begin / units;
  int unit = begin - block * units;
#pragma unroll 1
  for (int i = begin; i < end; ++i, ++unit) {
    if (unit == units) {
      unit = 0;
      ++block;
    }
    const UnitPlace at{row + 64 * block, item.n + unit * kColumns, item.batch, rows, cols};
    if (at.row >= rows || at.col >= cols) continue;
    if (p.late_staged) load_staged<kValues>(p.late[0], at, staging);  // under way while the rest is computed
    float v[kValues];
    sums(block * kPerBlock + unit, false, v);
    if (p.bias != nullptr) add_bias(bias + unit * kColumns, v, staging.lane);
    if constexpr (!kFast) {
      if (p.preact.data != nullptr) write_unit(p, p.preact, false, at, v, staging);
    }
    activate(p.activation, v);
    if (p.gated) sums(block * kPerBlock + units + unit, true, v);
    if (p.late_staged) add_staged(p.late[0].kind, v, staging);
    if constexpr (kFast) {
      store_whole<kValues>(p.out, p.out_kind, p.reduce, at, v, staging);
    } else {
#pragma unroll 1
      for (int a = p.late_staged ? 1 : 0; a < p.num_late; ++a) add_strided(p.late[a], at, v, staging);
      write_unit(p, p.out, p.reduce, at, v, staging);
    }
  }
}

// The usual epilogues of a whole tile: bias, activation, a staged residual, one output in whole lines.
// Straight-line code for all units would be run through once a tile, at the speed at which instructions come
// from L2; this loop is small and always at work on the first accumulators, a few units of them, the others
// moving up. Every instruction counts: beside a main loop that runs at the power limit they cost their
// energy.
template <class Tile, Activation kActivation>
__device__ __forceinline__ void store_activated(const GemmParams& p, const WorkItem& item, int row,
                                                Accumulators<Tile>& acc, const float* bias,
                                                const StagingBuffer& staging) {
  // Of a unit: what registers allow.
  constexpr int kValues = Tile::kConsumerRegisters - Tile::kAccumulators >= 80 ? 32 : 16;
  constexpr int kUnits = kValues == 32 ? 2 : 3;
  constexpr int kStep = kUnits * kValues;
  constexpr int kPerBlock = Tile::kBlockAccumulators;
  static_assert(kPerBlock % kStep == 0, "A step lies in one block.");
  const int rows = item.m_end;
  const int cols = static_cast<int>(p.problem.n);
  int col = 0;
#pragma unroll 1
  for (int done = 0; done < Tile::kAccumulators; done += kStep) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i, col += 2 * kValues) {
      const UnitPlace at{row, item.n + col, item.batch, rows, cols};
      if (at.row >= rows || at.col >= cols) continue;
      if (p.late_staged) load_staged<kValues>(p.late[0], at, staging);
      float v[kValues];
#pragma unroll
      for (int j = 0; j < kValues; ++j) v[j] = acc[0][i * kValues + j];
      if (p.bias != nullptr) add_bias(bias + col, v, staging.lane);
      activate<kActivation>(v);
      if (p.late_staged) add_staged(p.late[0].kind, v, staging);
      store_whole<kValues>(p.out, p.out_kind, p.reduce, at, v, staging);
    }
#pragma unroll
    for (int j = kStep; j < Tile::kAccumulators; ++j) {
      acc[(j - kStep) / kPerBlock][(j - kStep) % kPerBlock] = acc[j / kPerBlock][j % kPerBlock];
    }
    if (col == Tile::kBN) {
      col = 0;
      row += 64;
    }
  }
}

// A whole tile that is not plain, from the accumulators.
template <class Tile>
__device__ __forceinline__ void store_finished(const GemmParams& p, const WorkItem& item, int row,
                                               Accumulators<Tile>& acc, const float* bias,
                                               const StagingBuffer& staging) {
  if (p.fast && !p.gated) {
    if (p.alpha != 1.0f) {
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
        for (float& x : acc[i]) x *= p.alpha;
      }
    }
    switch (p.activation) {
      case Activation::kNone:
        return store_activated<Tile, Activation::kNone>(p, item, row, acc, bias, staging);
      case Activation::kRelu:
        return store_activated<Tile, Activation::kRelu>(p, item, row, acc, bias, staging);
      case Activation::kSilu:
        return store_activated<Tile, Activation::kSilu>(p, item, row, acc, bias, staging);
      case Activation::kGelu:
        return store_activated<Tile, Activation::kGelu>(p, item, row, acc, bias, staging);
      case Activation::kGeluTanh:
        return store_activated<Tile, Activation::kGeluTanh>(p, item, row, acc, bias, staging);
    }
  }
  const auto sums = [&](int unit, bool multiply, auto& v) {
    if (multiply) {
      take_unit<Tile, true>(acc, unit, p.alpha, v);
    } else {
      take_unit<Tile, false>(acc, unit, p.alpha, v);
    }
  };
  store_units<Tile, false, 16>(p, item, row, 0, units_of<Tile, 16>(p), bias, staging, sums);
}

// How much of a CTA's part of a tile a warp stores in all, in the unit that doorbells count.
template <class Tile>
constexpr int kBellUnits = Tile::kAccumulators / 16;

// Chunk c is in the memory of those who wait for it. Who counted it has acquired what other CTAs stored.
__device__ __forceinline__ void tell_peers(const PeerWords& w, int c) {
  const uint32_t epoch = comm::load_acquire<comm::Scope::kGpu>(w.epoch);
#pragma unroll 1
  for (int r = w.first[c]; r < w.end[c]; ++r) {
    if (r != w.rank) comm::store_release<comm::Scope::kSys>(w.pages[r] + w.word[c], epoch);
  }
}

// Says that `units` of a tile of so many rows are in memory, after a fence of system scope behind all that
// stored them: the last one of a chunk of rows rings its bell, or tells other ranks. One thread.
__device__ __forceinline__ void count_stored(const GemmParams& p, const WorkItem& item, int rows, int units) {
  const DoorbellHook& h = p.hooks.doorbell;
  const int tile_end = min(item.m + rows, item.m_end);
  int begin = 0;
  for (int c = 0; c < h.num_chunks && begin < tile_end; ++c) {
    const int end = h.row_end[c];
    if (end > item.m && end > begin && (c < h.silent_begin || c >= h.silent_end)) {
      const auto more = static_cast<uint32_t>(units);
      if (comm::add_acq_rel(h.counters + c, more) + more == h.target[c]) {
        h.counters[c] = 0;
        if (h.peers.epoch != nullptr) {
          tell_peers(h.peers, c);
        } else {
          comm::store_release<comm::Scope::kSys>(h.bells + c, 1u);
        }
      }
    }
    begin = end;
  }
}

// For every tile of this CTA: waits until its warps have stored it, and says so to the device. One thread of
// a warp of its own: the fence takes 4 us behind a tile's stores, which no warp that multiplies should wait
// for.
template <class Tile>
__device__ __forceinline__ void run_ringer(const GemmParams& p, SharedStorage<Tile>& s) {
  constexpr int kWarps = 4 * kPartsPerCta<Tile>;
  ItemReader<Tile> items{s, {}};
  while (true) {
    const WorkItem& item = items.next();
    if (item.iters == 0) break;
    items.wait_stored();
    if (item.slot < 0 && item.n < p.problem.n) {  // a CTA of the cluster may have no columns
      __threadfence_system();
      count_stored(p, item, Tile::kBM, kBellUnits<Tile> * kWarps);
    }
    items.release(true);
  }
}

// A warp that has stored `units` of a tile which another one has the rest of rings for itself. All lanes.
__device__ __forceinline__ void ring_doorbells(const GemmParams& p, const WorkItem& item, int rows, int units,
                                               int lane) {
  if (item.n >= p.problem.n) return;
  __threadfence_system();  // every lane's own stores
  __syncwarp();
  if (lane == 0) count_stored(p, item, rows, units);
}

}  // namespace tpk::sm90a

// Loader: one thread fills the stages with TMA, as far ahead of the consumers as there are stages. What a
// cluster's CTAs share is loaded once, a part by each, and multicast into all of them.
#pragma once

#include <climits>

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/fixup.cuh"
#include "kernels/sm90a/owner.cuh"
#include "kernels/sm90a/scheduler.cuh"

namespace tpk::sm90a {

// One operand of a stage. kExtent: its rows (columns for B) in this CTA's tile.
template <Major kMajor, int kExtent>
struct OperandLoader {
  // sharers: CTAs of the cluster that need the same extent, a bit for each, or 0: this one loads half `part`
  // of it. [outer, ...): the extent's start in `map`, for gated B in two maps, half of the extent each.
  static __device__ __forceinline__ void load(const CUtensorMap* map, const CUtensorMap* second_map,
                                              const LoadBarrier& barrier, unsigned char* to, int outer, int k,
                                              int batch, int part, uint16_t sharers) {
    const bool is_shared = sharers != 0;
    if constexpr (kMajor == Major::kK) {
      if (is_shared) {
        // Half of the rows from each CTA; gated: the half of its own map.
        const bool second = second_map != nullptr && part == 1;
        const int row = second_map != nullptr ? outer : outer + part * (kExtent / 2);
        tensor_load_multicast(to + part * (kExtent / 2) * kSwizzleBytes, second ? second_map : map, k, row,
                              batch, barrier, sharers);
      } else if (second_map != nullptr) {
        tensor_load(to, map, k, outer, batch, barrier);
        tensor_load(to + kExtent / 2 * kSwizzleBytes, second_map, k, outer, batch, barrier);
      } else {
        tensor_load(to, map, k, outer, batch, barrier);
      }
    } else {
      constexpr int kBoxes = kExtent / kChunkOuter;
      constexpr int kBoxBytes = kBK * kSwizzleBytes;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const bool second = second_map != nullptr && i >= kBoxes / 2;
        const CUtensorMap* from = second ? second_map : map;
        const int column = outer + (second ? i - kBoxes / 2 : i) * kChunkOuter;
        if (is_shared) {  // half of K from each CTA
          tensor_load_multicast(to + i * kBoxBytes + part * (kBoxBytes / 2), from, column,
                                k + part * (kBK / 2), batch, barrier, sharers);
        } else {
          tensor_load(to + i * kBoxBytes, from, column, k, batch, barrier);
        }
      }
    }
  }
};

// Waits for the chunks that rows [m, m + rows) of A lie in, and slab `slab` of them. Not for what is known:
// that would keep the thread from loading for 2,500 cycles a tile.
__device__ __forceinline__ void wait_for_chunks(const GemmParams& p, int m, int rows, int slab,
                                                RowsHere& here) {
  const ArrivalHook& h = p.hooks.arrival;
  const int rows_end = min(m + rows, static_cast<int>(p.problem.m));
  if (m >= here.begin && rows_end <= here.end) return;
  int first = m;
  int last = m;
  int begin = 0;
  for (int c = 0; c < h.num_chunks && begin < rows_end; ++c) {
    const int end = h.row_end[c];
    if (end > m && end > begin) {
      wait_or_fail<comm::Scope::kSys>(h.flags + c * h.slabs + slab, here.epoch, {p.timeout_ns, p.fault},
                                      FaultKind::kChunk, c, slab, [&] {
                                        int rank = 0;
                                        while (rank < h.ranks.world && h.ranks.row_end[rank] <= begin) ++rank;
                                        return rank < h.ranks.world ? rank : -1;
                                      });
      first = min(first, begin);
      last = end;
    }
    begin = end;
  }
  fence_async_proxy();  // what was acquired, before TMA reads it
  if (h.slab_k > 0) return;
  const bool apart = first > here.end || last < here.begin;
  here.begin = apart ? first : min(first, here.begin);
  here.end = apart ? last : max(last, here.end);
}

// Waits for the blocks that a tile reads of the pair that has k: rows [m, m + rows), columns [n, n +
// columns). The thread has few registers: nothing is kept that can be looked up again.
__device__ __forceinline__ void wait_for_blocks(const GemmParams& p, int m, int rows, int n, int columns,
                                                int k, RowsHere& here) {
  static_assert(kMaxBlocks <= 32, "RowsHere has 32 bits for them.");
  const BlockArrival& h = p.hooks.blocks;
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const int pair = pair_run(p.pair_ends, k, k + 1).pair;
    const BlockWords words = block_words(h, side, pair, side == 0 ? m : n, side == 0 ? rows : columns);
    for (int word = words.begin; word < words.end; ++word) {
      if ((here.begin >> word & 1) != 0) continue;
      wait_or_fail<comm::Scope::kSys>(h.flags + word, here.epoch, {p.timeout_ns, p.fault}, FaultKind::kBlock,
                                      word, k, [&] { return sender_of_block(p.hooks.blocks, word); });
      here.begin |= 1 << word;
      fence_async_proxy();  // what was acquired, before TMA reads it
    }
  }
}

template <class Tile, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void run_loader(const GemmParams& p, SharedStorage<Tile>& s,
                                           const ClusterPlace& at) {
  ItemReader<Tile> items{s, {}};
  RingPosition<Tile::kStages> stage;
  uint16_t share_a = 0;  // the row of CTAs
  uint16_t share_b = 0;  // the column of CTAs
  for (int i = 0; at.columns > 1 && i < at.columns; ++i) share_a |= 1u << (at.m + at.rows * i);
  for (int i = 0; at.rows > 1 && i < at.rows; ++i) share_b |= 1u << (i + at.rows * at.n);
  const bool arrives = p.hooks.arrival.flags != nullptr || p.hooks.blocks.flags != nullptr;
  prefetch_map(&p.pairs[0].a);
  prefetch_map(p.gated ? &p.map_gate : &p.pairs[0].b);
  wait_for_earlier_kernels();
  if (p.shares > 0 && at.rank == 0) comm::take_ticket(p.ticket);  // one more cluster has started
  const auto epoch_at = [](const uint32_t* word) { return *static_cast<const volatile uint32_t*>(word); };
  const uint32_t* const epoch = p.departs                         ? p.hooks.departure.epoch
                                : p.hooks.blocks.flags != nullptr ? p.hooks.blocks.epoch
                                                                  : p.hooks.arrival.epoch;
  RowsHere here{p.departs || arrives ? epoch_at(epoch) : 0};
  while (true) {
    const WorkItem item = items.next();  // a copy
    items.release(true);
    if (item.iters == 0) break;
    const int batch_a = item.batch * p.batch_step_a;
    const int batch_b = item.batch * p.batch_step_b;
    int k = item.k;
    const bool is_own = item.m >= p.own_begin && item.m + Tile::kBM <= p.own_end;
    const int row_a = is_own ? item.m - p.own_begin : item.m;
    // Of own tiles the peers' rows are looked for while they are multiplied: a look takes as long as an
    // iteration.
    constexpr int kLookSteps = 4 * Tile::kBK;
    const int rows_end = item.addends > 0 ? own_end_of<Tile>(p, item) : 0;
    int next_wait = (arrives && !is_own) || here.end < rows_end ? k : INT_MAX;
    const int end = k + item.iters * Tile::kBK;
#pragma unroll 1
    while (k < end) {
      const PairRun run = pair_run(p.pair_ends, k, end);
      const PairMaps& maps = p.pairs[run.pair];
      const CUtensorMap* map_a = is_own ? &p.map_own : &maps.a;
      const CUtensorMap* first_b = p.gated ? &p.map_gate : &maps.b;
      const CUtensorMap* second_b = p.gated ? &maps.b : nullptr;
#pragma unroll 1
      for (; k < run.end; k += Tile::kBK) {
        if (k >= next_wait) {
          if (p.departs) {
            look_for_peers(p, here);
            next_wait = here.end < rows_end ? k + kLookSteps : INT_MAX;
          } else if (p.hooks.blocks.flags != nullptr) {
            wait_for_blocks(p, item.m, Tile::kBM, item.n, Tile::kBN, k, here);
            next_wait = run.end;
          } else {
            const int slab_k = p.hooks.arrival.slab_k;
            const int slab = slab_k > 0 ? k / slab_k : 0;
            wait_for_chunks(p, item.m, Tile::kBM, slab, here);
            next_wait = slab_k > 0 ? (slab + 1) * slab_k : INT_MAX;
          }
        }
        s.empty_barrier(stage.index).wait(stage.phase ^ 1);
        LoadBarrier& full = s.full_barrier(stage.index);
        full.arrive_and_expect_tx(Tile::kStageBytes);
        auto& to = s.stages[stage.index];
        OperandLoader<kMajorA, Tile::kBM>::load(map_a, nullptr, full, to.a, row_a, k - run.begin, batch_a,
                                                at.n, share_a);
        OperandLoader<kMajorB, Tile::kBN>::load(first_b, second_b, full, to.b, item.n, k - run.begin, batch_b,
                                                at.m, share_b);
        stage.advance();
      }
    }
    if (item.partials() > 0) load_partials<Tile>(p, s, at, item, stage);
    if (item.addends > 0) load_addends<Tile>(p, s, item, stage, here);
  }
}

}  // namespace tpk::sm90a

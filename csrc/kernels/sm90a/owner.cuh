// Departure: a tile whose rows stay on this rank is given what the other ranks computed of it. The loading
// thread waits for their rows and brings them in through the stages of the main loop, as it does with partial
// tiles (fixup.cuh): blocks of 64 rows and 128 bytes for every warpgroup, each from all ranks in turn, so
// that the consumers add them in the order of ranks, their own accumulators where their rank stands. Loads
// by the consumers' own threads cost up to 100 us a tile: latency after latency.
#pragma once

#include "kernels/sm90a/finish.cuh"
#include "kernels/sm90a/fixup.cuh"

namespace tpk::sm90a {

// What the loading thread knows to be here: rows of A, or, in a departure, own rows from every peer, or
// blocks of factors. A launch has one of them, and the thread few registers.
struct RowsHere {
  uint32_t epoch;
  int begin = 0;  // departure: the next word that is looked at, chunk * kMaxRanks + peer; blocks: a bit each
  int end = 0;    // departure: counted from the first own row
};

// Looks at the next word, chunk after chunk as peers send them. is_raised(word, rank).
template <class IsRaised>
__device__ __forceinline__ void look_at_peer(const DepartureHook& h, RowsHere& here,
                                             const IsRaised& is_raised) {
  const int chunk = here.begin / kMaxRanks;
  const int peer = here.begin % kMaxRanks;
  const int rank = peer + (peer >= h.ranks.rank ? 1 : 0);
  if (!is_raised(h.arrived + rank * h.own_chunks + chunk, rank)) return;
  ++here.begin;
  if (peer + 1 < h.ranks.world - 1) return;
  fence_async_proxy();  // what was acquired, before TMA reads it
  here.begin = (chunk + 1) * kMaxRanks;
  here.end = h.own_chunk_end[chunk];
}

// Waits (bounded) until own rows are here up to rows_end.
__device__ __forceinline__ void wait_for_peers(const GemmParams& p, int rows_end, RowsHere& here) {
  while (here.end < rows_end) {
    look_at_peer(p.hooks.departure, here, [&](const uint32_t* word, int rank) {
      wait_or_fail<comm::Scope::kSys>(word, here.epoch, {p.timeout_ns, p.fault}, FaultKind::kAddend, rank,
                                      p.own_rows.begin + here.end, [&] { return rank; });
      return true;
    });
  }
}

// Looks at one word, without waiting.
__device__ __forceinline__ void look_for_peers(const GemmParams& p, RowsHere& here) {
  look_at_peer(p.hooks.departure, here, [&](const uint32_t* word, int) {
    return comm::epoch_reached(comm::load_acquire<comm::Scope::kSys>(word), here.epoch);
  });
}

// The end of an own tile's rows, counted from the first own one.
template <class Tile>
__device__ __forceinline__ int own_end_of(const GemmParams& p, const WorkItem& item) {
  return min(item.m + Tile::kBM, p.own_rows.end) - p.own_rows.begin;
}

// The boxes of an own tile's addends, in the order in which blocks are added: of each block those of all
// addends, then the next block to the right, then those below. Counters instead of divisions: one thread
// has to be faster here than all that add.
struct AddendBoxes {
  const GemmParams& p;
  int col;      // of the tile
  int col_end;  // of its columns
  int columns;  // of a block
  int addends;
  int x;
  int y;  // counted from the first own row
  int addend = 0;

  template <class Tile>
  static __device__ __forceinline__ AddendBoxes of(const GemmParams& p, const WorkItem& item) {
    return {p,
            item.n,
            item.n + Tile::kBN,
            addend_columns(p.out_kind == ScalarKind::kFp32),
            item.addends,
            item.n,
            item.m - p.own_rows.begin};
  }
  // box(map, x, y, z) of all parts of the tile at once: all boxes of the next addend's block.
  template <class Tile, class Box>
  __device__ __forceinline__ void next(const Box& box) {
    const RankRows& ranks = p.hooks.departure.ranks;
    const bool of_peer = addend < ranks.world - 1;
    const CUtensorMap* map = of_peer ? &p.map_slots : &p.map_residual;
    const int z = of_peer ? addend + (addend >= ranks.rank ? 1 : 0) : 0;
    // Rows of the parts follow each other where each has one block of 64.
    constexpr int kBoxes = Tile::kBlocks == 1 ? 1 : kPartsPerCta<Tile>;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) box(map, x, y + i * Tile::kRows, z);
    if (++addend < addends) return;
    addend = 0;
    x += columns;
    if (x < col_end) return;
    x = col;
    y += 64;
  }
};

// The loading thread's part.
template <class Tile>
__device__ __forceinline__ void load_addends(const GemmParams& p, SharedStorage<Tile>& s,
                                             const WorkItem& item, RingPosition<Tile::kStages>& stage,
                                             RowsHere& here) {
  wait_for_peers(p, own_end_of<Tile>(p, item), here);
  auto boxes = AddendBoxes::of<Tile>(p, item);
  const int total = addend_blocks<Tile>(p.out_kind == ScalarKind::kFp32) * item.addends;
  constexpr int kBoxBytes = (Tile::kBlocks == 1 ? kPartsPerCta<Tile> : 1) * kChunkBytes;
#pragma unroll 1
  for (int done = 0; done < total; done += kChunksPerStage<Tile>) {
    const int count = min(kChunksPerStage<Tile>, total - done);
    s.empty_barrier(stage.index).wait(stage.phase ^ 1);
    LoadBarrier& full = s.full_barrier(stage.index);
    full.arrive_and_expect_tx(count * kPartsPerCta<Tile> * kChunkBytes);
    auto* to = reinterpret_cast<unsigned char*>(&s.stages[stage.index]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      boxes.template next<Tile>([&](const CUtensorMap* map, int x, int y, int z) {
        tensor_load(to, map, x, y, z, full);
        to += kBoxBytes;
      });
    }
    stage.advance();
  }
}

// Where a lane reads a warp's 16 rows of a block, which is swizzled as TMA's 128-byte mode has it: chunk c of
// 16 bytes of row r lies at c ^ (r % 8). Later chunks of the row: this address ^ what they are further on. By
// ldmatrix, two chunks of all rows at a time, or, fp32, 8 bytes of rows lane / 4 and 8 on.
template <ScalarKind kKind>
__device__ __forceinline__ uint32_t lane_in_block() {
  const int warp = thread_number() / 32 % 4;
  const int lane = thread_number() % 32;
  constexpr bool kWide = kKind == ScalarKind::kFp32;
  const int row = 16 * warp + (kWide ? lane / 4 : lane % 16);
  const int chunk = kWide ? (lane & 3) / 2 : lane / 16;
  return row * kSwizzleBytes + ((chunk ^ (row & 7)) << 4) + (kWide ? (lane & 1) * 8 : 0);
}

// v += a warp's 16 rows of a block: 64 columns of 2-byte elements, or 32 of fp32. at: of this lane. All of it
// is on its way from shared memory before the first is added.
template <ScalarKind kKind, int kValues>
__device__ __forceinline__ void add_block(uint32_t at, float (&v)[kValues]) {
  constexpr int kStep = 32;  // bytes: two chunks
  if constexpr (kKind == ScalarKind::kFp32) {
    float x[kValues];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const uint32_t from = (at ^ (i / 2 * kStep)) + i % 2 * 8 * kSwizzleBytes;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(x[2 * i]), "=f"(x[2 * i + 1])
                   : "r"(from)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] += x[i];
  } else {
    uint32_t bits[kValues / 8][4];
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) load_matrix_x4(at ^ (j * kStep), bits[j]);
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[8 * j + 2 * i] += unpack_low(kKind, bits[j][i]);
        v[8 * j + 2 * i + 1] += unpack_high(kKind, bits[j][i]);
      }
    }
  }
}

// A consumer's place among the blocks that the loading thread brings.
template <class Tile, ScalarKind kKind>
struct BlockReader {
  SharedStorage<Tile>& s;
  RingPosition<Tile::kStages>& stage;
  uint32_t in_block;  // of this lane, in its part of the first block of a stage
  int left;           // blocks
  int in_stage = 0;   // bytes

  // v += the next block.
  template <int kValues>
  __device__ __forceinline__ void add_next(float (&v)[kValues]) {
    constexpr int kBytes = kPartsPerCta<Tile> * kChunkBytes;
    if (in_stage == 0) s.full_barrier(stage.index).wait(stage.phase);
    add_block<kKind>(shared_address(&s.stages[stage.index]) + in_block + in_stage, v);
    in_stage += kBytes;
    --left;
    if (in_stage == kChunksPerStage<Tile> * kBytes || left == 0) {
      fence_async_proxy_shared();  // these reads, before the loads that TMA puts there
      __syncwarp();
      release_stage(s, stage.index);
      stage.advance();
      in_stage = 0;
    }
  }
};

// The consumers' part: acc = the sum over ranks, plus bias, plus residual. All 128 threads of a warpgroup
// call it.
template <class Tile, ScalarKind kKind>
__device__ __forceinline__ void add_addends(const GemmParams& p, SharedStorage<Tile>& s, int addends,
                                            int part, RingPosition<Tile::kStages>& stage, const float* bias,
                                            Accumulators<Tile>& acc) {
  constexpr bool kWide = kKind == ScalarKind::kFp32;
  constexpr int kColumns = addend_columns(kWide);
  constexpr int kValues = kColumns / 2;
  constexpr int kPerRow = Tile::kBN / kColumns;
  const int peers = p.hooks.departure.ranks.world - 1;
  const int before = p.hooks.departure.ranks.rank;
  BlockReader<Tile, kKind> blocks{s, stage, lane_in_block<kKind>() + part * kChunkBytes,
                                  addend_blocks<Tile>(kWide) * addends};
#pragma unroll
  for (int block = 0; block < addend_blocks<Tile>(kWide); ++block) {
    auto& own = *reinterpret_cast<float (*)[kValues]>(&acc[block / kPerRow][block % kPerRow * kValues]);
    const float* its_bias = bias + block % kPerRow * kColumns;
    float sum[kValues] = {};
#pragma unroll 1
    for (int i = 0; i < before; ++i) blocks.add_next(sum);
#pragma unroll
    for (int j = 0; j < kValues; ++j) own[j] = sum[j] + own[j];
#pragma unroll 1
    for (int i = before; i < addends; ++i) {
      if (i == peers && p.bias != nullptr) add_bias(its_bias, own, thread_number() % 32);
      blocks.add_next(own);
    }
    if (addends == peers && p.bias != nullptr) add_bias(its_bias, own, thread_number() % 32);
  }
}

template <class Tile>
__device__ __forceinline__ void add_addends(const GemmParams& p, SharedStorage<Tile>& s, int addends,
                                            int part, RingPosition<Tile::kStages>& stage, const float* bias,
                                            Accumulators<Tile>& acc) {
  switch (p.out_kind) {
    case ScalarKind::kBf16:
      return add_addends<Tile, ScalarKind::kBf16>(p, s, addends, part, stage, bias, acc);
    case ScalarKind::kFp16:
      return add_addends<Tile, ScalarKind::kFp16>(p, s, addends, part, stage, bias, acc);
    default:
      return add_addends<Tile, ScalarKind::kFp32>(p, s, addends, part, stage, bias, acc);
  }
}

}  // namespace tpk::sm90a

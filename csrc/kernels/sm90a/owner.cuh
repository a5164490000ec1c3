// Departure: a tile whose rows stay on this rank is given what the other ranks computed of it. The loading
// thread waits for their rows and brings them in through the stages of the main loop, as it does with partial
// tiles (fixup.cuh): blocks of 64 rows and 128 bytes for every warpgroup, each from all ranks in turn, so
// that the consumers add them in the order of ranks, their own accumulators where their rank stands. Loads
// by the consumers' own threads cost up to 100 us a tile: latency after latency.
#pragma once

#include "kernels/sm90a/finish.cuh"
#include "kernels/sm90a/fixup.cuh"

namespace tpk::sm90a {

// Waits (bounded) until the rows [begin, end) of the own ones are here from every peer. seen: what has been
// waited for, a bit for each word.
__device__ __forceinline__ void wait_for_peers(const GemmParams& p, int begin, int end, uint64_t& seen) {
  const DepartureHook& h = p.hooks.departure;
  const uint32_t epoch = *static_cast<const volatile uint32_t*>(h.epoch);
  int first = 0;
  for (int c = 0; c < h.own_chunks && first < end; ++c) {
    if (h.own_chunk_end[c] > begin) {
      for (int peer = 0; peer < h.ranks.world; ++peer) {
        const int word = peer * h.own_chunks + c;
        if (peer == h.ranks.rank || (seen >> word & 1) != 0) continue;
        wait_or_fail<comm::Scope::kSys>(h.arrived + word, epoch, {p.timeout_ns, p.fault}, FaultKind::kAddend,
                                        peer, p.own_rows.begin + first, [&] { return peer; });
        seen |= uint64_t{1} << word;
      }
    }
    first = h.own_chunk_end[c];
  }
}

// The blocks of an own tile's addends, in the order in which they are added. Rows are counted from the first
// own one.
struct AddendBlocks {
  const GemmParams& p;
  int col;
  int row;
  int columns;  // of a block
  int per_row;  // blocks of a tile's row
  int addends;
  int block = 0;
  int addend = 0;

  template <class Tile>
  static __device__ __forceinline__ AddendBlocks of(const GemmParams& p, const WorkItem& item) {
    const int columns = addend_columns(p.out_kind == ScalarKind::kFp32);
    return {p, item.n, item.m - p.own_rows.begin, columns, Tile::kBN / columns, item.addends};
  }
  // box(map, x, y, z) for every box of the next block, which all parts of the tile have.
  template <class Tile, class Box>
  __device__ __forceinline__ void next(const Box& box) {
    const RankRows& ranks = p.hooks.departure.ranks;
    const bool of_peer = addend < ranks.world - 1;
    const CUtensorMap* map = of_peer ? &p.map_slots : &p.map_residual;
    const int rank = of_peer ? addend + (addend >= ranks.rank ? 1 : 0) : 0;
    const int x = col + block % per_row * columns;
    const int y = row + block / per_row * 64;
    // Rows of the parts follow each other where each has one block of 64.
    constexpr int kBoxes = Tile::kBlocks == 1 ? 1 : kPartsPerCta<Tile>;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) box(map, x, y + i * Tile::kRows, rank);
    if (++addend == addends) {
      addend = 0;
      ++block;
    }
  }
};

// The loading thread's part.
template <class Tile>
__device__ __forceinline__ void load_addends(const GemmParams& p, SharedStorage<Tile>& s,
                                             const WorkItem& item, RingPosition<Tile::kStages>& stage,
                                             uint64_t& seen) {
  const int row = item.m - p.own_rows.begin;
  wait_for_peers(p, row, min(row + Tile::kBM, p.own_rows.end - p.own_rows.begin), seen);
  fence_async_proxy();  // what was acquired, before TMA reads it
  auto blocks = AddendBlocks::of<Tile>(p, item);
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
      blocks.template next<Tile>([&](const CUtensorMap* map, int x, int y, int z) {
        tensor_load(to, map, x, y, z, full);
        to += kBoxBytes;
      });
    }
    stage.advance();
  }
}

// For every own tile: as soon as all peers have sent its rows, asks L2 for them, while the tile is still
// being multiplied. All multiprocessors would else wait for device memory at the same time, at the end of
// each wave of tiles: 25 us a tile with eight ranks. A warp of its own.
template <class Tile>
__device__ __forceinline__ void run_prefetcher(const GemmParams& p, SharedStorage<Tile>& s) {
  const DepartureHook& h = p.hooks.departure;
  const int lane = thread_number() % 32;
  ItemReader<Tile> items{s, {}};
  wait_for_earlier_kernels();  // the epoch
  const uint32_t epoch = *static_cast<const volatile uint32_t*>(h.epoch);
  while (true) {
    const WorkItem& item = items.next();
    if (item.iters == 0) break;
    if (item.addends > 0) {
      const int begin = item.m - p.own_rows.begin;
      int first = 0;
      for (int c = 0; c < h.own_chunks && first < begin + Tile::kBM; first = h.own_chunk_end[c++]) {
        if (h.own_chunk_end[c] <= begin || lane >= h.ranks.world || lane == h.ranks.rank) continue;
        // The loading thread comes to the same wait with a bound, and ends the launch.
        const uint32_t* word = h.arrived + lane * h.own_chunks + c;
        while (static_cast<int32_t>(comm::load_relaxed(word) - epoch) < 0) __nanosleep(500);
      }
      __syncwarp();
      auto blocks = AddendBlocks::of<Tile>(p, item);
      const int total = addend_blocks<Tile>(p.out_kind == ScalarKind::kFp32) * item.addends;
#pragma unroll 1
      for (int i = 0; lane == 0 && i < total; ++i) {
        blocks.template next<Tile>(
            [](const CUtensorMap* map, int x, int y, int z) { tensor_prefetch(map, x, y, z); });
      }
    }
    __syncwarp();
    items.release(lane == 0);
  }
}

// Where 16 bytes number `unit` of a block's row lie: swizzled as TMA's 128-byte mode has it.
__device__ __forceinline__ uint32_t block_unit(uint32_t block, int row, int unit) {
  return block + row * kSwizzleBytes + ((unit ^ (row & 7)) << 4);
}

// v += a warp's 16 rows of a block of 64 columns of 2-byte elements, or of 32 of fp32.
__device__ __forceinline__ void add_block(ScalarKind kind, uint32_t block, int warp, int lane,
                                          float (&v)[32]) {
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t bits[4];
    load_matrix_x4(block_unit(block, row, 2 * j + lane / 16), bits);
    if (kind == ScalarKind::kBf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[8 * j + 2 * i] += unpack_low(ScalarKind::kBf16, bits[i]);
        v[8 * j + 2 * i + 1] += unpack_high(ScalarKind::kBf16, bits[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[8 * j + 2 * i] += unpack_low(ScalarKind::kFp16, bits[i]);
        v[8 * j + 2 * i + 1] += unpack_high(ScalarKind::kFp16, bits[i]);
      }
    }
  }
}
__device__ __forceinline__ void add_block(ScalarKind, uint32_t block, int warp, int lane, float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 16 * warp + lane / 4 + i % 2 * 8;
    const uint32_t from = block_unit(block, row, i / 2 * 2 + (lane & 3) / 2) + (lane & 1) * 8;
    float x;
    float y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory");
    v[2 * i] += x;
    v[2 * i + 1] += y;
  }
}

// A consumer's place among the blocks that the loading thread brings.
template <class Tile>
struct BlockReader {
  const GemmParams& p;
  SharedStorage<Tile>& s;
  RingPosition<Tile::kStages>& stage;
  int part;
  int left;
  int in_stage = 0;

  // v += the next block.
  template <int kValues>
  __device__ __forceinline__ void add_next(float (&v)[kValues]) {
    if (in_stage == 0) s.full_barrier(stage.index).wait(stage.phase);
    const uint32_t block =
        shared_address(&s.stages[stage.index]) + (in_stage * kPartsPerCta<Tile> + part) * kChunkBytes;
    add_block(p.out_kind, block, thread_number() / 32 % 4, thread_number() % 32, v);
    --left;
    if (++in_stage == kChunksPerStage<Tile> || left == 0) {
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
template <class Tile, bool kWide>
__device__ __forceinline__ void add_addends(const GemmParams& p, SharedStorage<Tile>& s, int addends,
                                            int part, RingPosition<Tile::kStages>& stage, const float* bias,
                                            Accumulators<Tile>& acc) {
  constexpr int kColumns = addend_columns(kWide);
  constexpr int kValues = kColumns / 2;
  constexpr int kPerRow = Tile::kBN / kColumns;
  const int peers = p.hooks.departure.ranks.world - 1;
  const int before = p.hooks.departure.ranks.rank;
  BlockReader<Tile> blocks{p, s, stage, part, addend_blocks<Tile>(kWide) * addends};
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

}  // namespace tpk::sm90a

// Departure: the epilogue of a tile whose rows stay on this rank. It is the reduction: the accumulators are
// still in registers, the other ranks' partials are added to them in the order of ranks.
#pragma once

#include "kernels/sm90a/epilogue.cuh"

namespace tpk::sm90a {

// Waits (bounded) until every addend is there: what other ranks send arrives rank by rank, not tile by tile.
// All lanes of a warp call it.
__device__ __forceinline__ void wait_for_addends(const GemmParams& p, int row, int lane) {
  const AddendHook& h = p.hooks.sum;
  for (int i = lane; i < h.count; i += 32) {
    const Addend& t = h.addends[i];
    if (t.flags == nullptr) continue;
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(t.epoch);
    wait_or_fail<comm::Scope::kSys>(t.flags, epoch, {p.timeout_ns, p.fault}, FaultKind::kAddend, i, row,
                                    [&] { return i < p.own_rows.addends_before ? i : i + 1; });
  }
  __syncwarp();
}

// Asks for a warp's part of all addends, so that the loads to come find it in L2.
template <class Tile>
__device__ __forceinline__ void prefetch_addends(const GemmParams& p, const WorkItem& item, int row,
                                                 int lane) {
  const AddendHook& h = p.hooks.sum;
  const int bytes = p.out_kind == ScalarKind::kFp32 ? 4 : 2;
  const int lines = Tile::kBN * bytes / 128;  // of a row
  const int end = static_cast<int>(p.problem.n) * bytes;
#pragma unroll 1
  for (int a = 0; a < h.count; ++a) {
#pragma unroll 1
    for (int i = lane; i < Tile::kBlocks * 16 * lines; i += 32) {
      const int r = row + i / lines % 16 + i / (16 * lines) * 64;
      const int at = item.n * bytes + i % lines * 128;
      if (r >= item.m_end || at >= end) continue;
      const char* from = static_cast<const char*>(h.addends[a].data) + r * h.addends[a].row_stride + at;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }
}

// A warp's block of 16 rows and 16 columns, in lines: lane has 8 columns of one row. So what is added comes
// in whole chunks of 16 bytes (in fp32 two), of several addends at once: one after the other their latencies
// took longer than the tile's products.
struct OwnPlace {
  int row;
  int col;
  int rows;
  int cols;

  __device__ __forceinline__ OwnPlace(const UnitPlace& at, int block, int lane)
      : row(at.row + lane / 2), col(at.col + 16 * block + 8 * (lane & 1)), rows(at.rows), cols(at.cols) {}
  __device__ __forceinline__ bool exists() const { return row < rows && col < cols; }
};

using OwnValues = float[8];

// v += the block's accumulators, which stage_fp32 has put into the warp's buffer.
__device__ __forceinline__ void add_own(OwnValues& v, int block, const StagingBuffer& staging) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t from = staging.at(staging.lane / 2, 4 * block + 2 * (staging.lane & 1) + j);
    float x[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
#pragma unroll
    for (int n = 0; n < 4; ++n) v[4 * j + n] += x[n];
  }
}

// Chunks of one addend in flight.
template <bool kWide>
struct OwnChunks {
  static constexpr int kParts = kWide ? 2 : 1;
  uint4 x[kParts];

  // Rows have room for whole chunks.
  __device__ __forceinline__ void load(const char* from, const OwnPlace& at) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (at.exists() && at.col + 4 * i < at.cols) x[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    }
  }
  __device__ __forceinline__ void add_to(ScalarKind kind, OwnValues& sum) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint32_t bits[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kWide) {
          sum[4 * i + j] += __uint_as_float(bits[j]);
        } else {
          sum[2 * j] += unpack_low(kind, bits[j]);
          sum[2 * j + 1] += unpack_high(kind, bits[j]);
        }
      }
    }
  }
};

// The sum over all ranks in their order: the own accumulators where the own rank stands.
template <bool kWide, int kAtOnce>
__device__ __forceinline__ void sum_ranks(const GemmParams& p, const OwnPlace& at, int block, OwnValues& sum,
                                          const StagingBuffer& staging) {
  const AddendHook& h = p.hooks.sum;
  const int64_t offset =
      at.row * h.addends[0].row_stride + at.col * (kWide ? 4 : 2);  // the same in all of them
#pragma unroll 1
  for (int phase = 0; phase < 2; ++phase) {
    const int end = phase == 0 ? p.own_rows.addends_before : h.count;
#pragma unroll 1
    for (int first = phase == 0 ? 0 : p.own_rows.addends_before; first < end; first += kAtOnce) {
      OwnChunks<kWide> chunks[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < end) chunks[i].load(static_cast<const char*>(h.addends[first + i].data) + offset, at);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < end) chunks[i].add_to(p.out_kind, sum);
      }
    }
    if (phase == 0) add_own(sum, block, staging);
  }
}

// v += a buffer whose rows have room for whole chunks.
template <bool kWide>
__device__ __forceinline__ void add_own_late(const Addend& t, ScalarKind kind, const OwnPlace& at,
                                             OwnValues& v) {
  OwnChunks<kWide> chunks;
  chunks.load(static_cast<const char*>(t.data) + at.row * t.row_stride + at.col * (kWide ? 4 : 2), at);
  chunks.add_to(kind, v);
}

// Rows have room for whole chunks.
template <bool kWide>
__device__ __forceinline__ void store_own(const Output& to, ScalarKind kind, const OwnPlace& at,
                                          const OwnValues& v) {
  if (!at.exists()) return;
  char* p = static_cast<char*>(to.data) + at.row * to.row_stride + at.col * (kWide ? 4 : 2);
  if constexpr (kWide) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    if (at.col + 4 < at.cols) *reinterpret_cast<float4*>(p + 16) = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                                              pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
  }
}

// A warp's part of an own tile: sums over all ranks, bias, residual, to memory. row: its first row.
template <class Tile, bool kWide>
__device__ __forceinline__ void store_owned(const GemmParams& p, const WorkItem& item, int row,
                                            const Accumulators<Tile>& acc, const float* bias,
                                            const StagingBuffer& staging) {
  constexpr int kPerBlock = Tile::kBN / 32;
  // Addends on their way at once: what registers allow.
  constexpr int kAtOnce = kWide                                                 ? 1
                          : Tile::kConsumerRegisters - Tile::kAccumulators < 80 ? 1
                          : Tile::kBlocks == 1                                  ? 3
                                                                                : 2;
  wait_for_addends(p, row, staging.lane);
  prefetch_addends<Tile>(p, item, row, staging.lane);
#pragma unroll 1
  for (int i = 0; i < Tile::kBlocks * kPerBlock; ++i) {
    const int unit = i % kPerBlock;
    const UnitPlace unit_at{row + 64 * (i / kPerBlock), item.n + 32 * unit, 0, item.m_end,
                            static_cast<int>(p.problem.n)};
    if (unit_at.row >= unit_at.rows || unit_at.col >= unit_at.cols) continue;
    {
      float fragments[16];
      take_unit<Tile, false>(acc, i, 1.0f, fragments);
      stage_fp32(staging, fragments);
    }
    __syncwarp();
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
      const OwnPlace at(unit_at, block, staging.lane);
      OwnValues sum = {};
      sum_ranks<kWide, kAtOnce>(p, at, block, sum, staging);
      if (p.bias != nullptr) {
        const float* from = bias + 32 * unit + 16 * block + 8 * (staging.lane & 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += from[j];
      }
      if (p.num_late > 0) add_own_late<kWide>(p.late[0], p.out_kind, at, sum);
      store_own<kWide>(p.own_rows.out, p.out_kind, at, sum);
    }
    __syncwarp();  // the buffer may be written again
  }
}

}  // namespace tpk::sm90a

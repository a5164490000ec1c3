// Epilogue of a consumer warp: 16 rows of a block of 64, in slabs of 32 columns, so that few registers are needed
// beside the accumulators. Slabs go through two small swizzled buffers of the warp's own, so that whole lines are
// stored. Ordinary stores, not TMA: its queue is full of the next tile's loads then, and waiting for it to read
// the buffers cost 3 us a tile. Only sums into an fp32 output go by TMA, which adds in L2.
#pragma once

#include "kernels/sm90a/finish.cuh"
#include "kernels/sm90a/mainloop.cuh"
#include "kernels/sm90a/scheduler.cuh"

namespace tpk::sm90a {

// Two buffers of 16 rows x 128 bytes (32 fp32 columns, or 64 of 2 bytes), used in turn. Swizzled as TMA's 128-byte
// mode has it: chunk c of 16 bytes of row r lies at c ^ (r % 8).
struct StagingBuffers {
  int lane;
  int warp;  // of the warpgroup
  uint32_t base;
  int next = 0;

  // buffers: of the warpgroup's first warp.
  __device__ __forceinline__ explicit StagingBuffers(const unsigned char* buffers) {
    const int thread = thread_number();
    lane = thread % 32;
    warp = thread / 32 % 4;
    base = shared_address(buffers) + warp * kStagingBytes;
  }

  // The next buffer. Whoever reads one synchronises the warp between writing and reading it, so the readers of
  // this one have all passed the other's synchronisation.
  __device__ __forceinline__ uint32_t turn() {
    const uint32_t buffer = base + next * (kStagingBytes / 2);
    next ^= 1;
    return buffer;
  }

  // The next buffer, once TMA has finished reading it. All lanes call it.
  __device__ __forceinline__ uint32_t turn_after_tma() {
    if (lane == 0) wait_stores_read<1>();
    __syncwarp();
    return turn();
  }

  // Hands the buffer to TMA, which adds it to the output. All lanes call it.
  __device__ __forceinline__ void add(const CUtensorMap* map, uint32_t buffer, int col, int row, int batch) {
    fence_async_proxy();
    __syncwarp();
    if (lane != 0) return;
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     map),
                 "r"(buffer), "r"(col), "r"(row), "r"(batch)
                 : "memory");
    commit_stores();
  }
};

// 32 fp32 columns to a buffer.
__device__ __forceinline__ void stage_fp32(uint32_t buffer, const float* v, int lane) {
  const int row = lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int chunk = 2 * j + (lane & 3) / 2;
    const uint32_t to = buffer + row * kSwizzleBytes + ((chunk ^ row) << 4) + (lane & 1) * 8;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v[4 * j]), "f"(v[4 * j + 1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * kSwizzleBytes), "f"(v[4 * j + 2]),
                 "f"(v[4 * j + 3])
                 : "memory");
  }
}

// 32 columns, rounded to 2 bytes, to the first or second half of a buffer.
__device__ __forceinline__ void stage_half(ScalarKind kind, uint32_t buffer, int half, const float* v, int lane) {
  const int block = lane / 8;
  const int row = lane % 8 + 8 * (block & 1);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int chunk = 4 * half + 2 * j + block / 2;
    const float* x = v + 8 * j;
    store_matrix_x4(buffer + row * kSwizzleBytes + ((chunk ^ (row & 7)) << 4), pack(kind, x[0], x[1]),
                    pack(kind, x[2], x[3]), pack(kind, x[4], x[5]), pack(kind, x[6], x[7]));
  }
}

// 16 rows of a buffer to memory. row, col: the buffer's first element in the output; 128 / kBytes columns. kWhole: the
// output's columns are whole chunks of 16 bytes.
template <int kBytes, bool kWhole>
__device__ __forceinline__ void store_buffer(const Output& to, uint32_t buffer, int row, int col, int batch,
                                             int rows, int cols, int lane) {
  constexpr int kColumns = 16 / kBytes;  // of a chunk
  __syncwarp();
  const int chunk = lane % 8;
  const int first = lane / 8;
  col += chunk * kColumns;
  char* p = static_cast<char*>(to.data) + batch * to.batch_stride +
            static_cast<int64_t>(row + first) * to.row_stride + static_cast<int64_t>(col) * kBytes;
  const bool whole = col + kColumns <= cols;
#pragma unroll
  for (int i = 0; i < 4; ++i, p += 4 * to.row_stride) {
    const int r = first + 4 * i;
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(buffer + r * kSwizzleBytes + ((chunk ^ (r & 7)) << 4))
                 : "memory");
    if (row + r >= rows) continue;
    if (whole) {
      *reinterpret_cast<uint4*>(p) = x;
    } else if (!kWhole) {  // the last columns of a width that is no multiple of a chunk
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (col + j >= cols) break;
        if (kBytes == 4) {
          *reinterpret_cast<uint32_t*>(p + 4 * j) = words[j % 4];
        } else {
          *reinterpret_cast<unsigned short*>(p + 2 * j) = static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2));
        }
      }
    }
  }
}

// A warp's part of the tile to memory, nothing but rounded. row: its first row in the output.
template <class Tile>
__device__ __forceinline__ void store_plain(const GemmParams& p, const WorkItem& item, int row,
                                            const Accumulators<Tile>& acc, StagingBuffers& staging) {
  const int rows = static_cast<int>(p.problem.m);
  const int cols = static_cast<int>(p.problem.n);
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block, row += 64) {
    if (row >= rows) break;
#pragma unroll
    for (int col = 0; col < Tile::kBN; col += 2 * kSlabColumns) {
      if (item.n + col >= cols) break;
      const float* v = &acc[block][col / 2];
      if (p.out_kind == ScalarKind::kFp32) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t buffer = staging.turn();
          stage_fp32(buffer, v + half * kSlabValues, staging.lane);
          store_buffer<4, true>(p.out, buffer, row, item.n + col + half * kSlabColumns, item.batch, rows, cols, staging.lane);
        }
      } else {
        const uint32_t buffer = staging.turn();
        stage_half(p.out_kind, buffer, 0, v, staging.lane);
        stage_half(p.out_kind, buffer, 1, v + kSlabValues, staging.lane);
        store_buffer<2, true>(p.out, buffer, row, item.n + col, item.batch, rows, cols, staging.lane);
      }
    }
  }
}

// Where finished slabs of one output go. Slabs come in pairs, 64 columns.
struct SlabWriter {
  const Output& to;
  bool add;  // through map_sum
  uint32_t buffer = 0;

  __device__ __forceinline__ void write(const GemmParams& p, const SlabPlace& at, int half,
                                        const float (&v)[kSlabValues], StagingBuffers& staging) {
    const int lane = staging.lane;
    if (add) {
      buffer = staging.turn_after_tma();
      stage_fp32(buffer, v, lane);
      staging.add(&p.map_sum, buffer, at.col, at.row, at.batch);
    } else if (!to.aligned) {
      store_slab_direct(p.out_kind, to, at, v, lane);
    } else if (p.out_kind == ScalarKind::kFp32) {
      buffer = staging.turn();
      stage_fp32(buffer, v, lane);
      store_buffer<4, false>(to, buffer, at.row, at.col, at.batch, at.rows, at.cols, lane);
    } else {
      if (half == 0) buffer = staging.turn();
      stage_half(p.out_kind, buffer, half, v, lane);
      if (half == 1) {
        store_buffer<2, false>(to, buffer, at.row, at.col - kSlabColumns, at.batch, at.rows, at.cols, lane);
      }
    }
  }
};

// v = slab number `slab` of the accumulators, or v *= scale * it. A run-time index would put the accumulators into
// local memory: select instead.
template <class Tile, bool kMultiply>
__device__ __forceinline__ void take_slab(const Accumulators<Tile>& acc, int slab, float scale,
                                          float (&v)[kSlabValues]) {
  constexpr int kSlabs = Tile::kBN / kSlabColumns;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks * kSlabs; ++i) {
    if (i != slab) continue;
#pragma unroll
    for (int j = 0; j < kSlabValues; ++j) {
      const float x = scale * acc[i / kSlabs][i % kSlabs * kSlabValues + j];
      v[j] = kMultiply ? v[j] * x : x;
    }
  }
}

// A warp's part of the tile with everything that may be asked for. One copy of the code for all slabs.
template <class Tile>
__device__ __forceinline__ void store_finished(const GemmParams& p, const WorkItem& item, int row,
                                               const Accumulators<Tile>& acc, StagingBuffers& staging) {
  constexpr int kSlabs = Tile::kBN / kSlabColumns;
  const int slabs = p.gated ? kSlabs / 2 : kSlabs;
  SlabWriter out{p.out, p.reduce};
  SlabWriter preact{p.preact, false};
#pragma unroll 1
  for (int i = 0; i < Tile::kBlocks * slabs; ++i) {
    const int block = i / slabs;
    const int slab = i - block * slabs;
    const SlabPlace at{row + 64 * block, item.n + slab * kSlabColumns, item.batch,
                       static_cast<int>(p.problem.m), static_cast<int>(p.problem.n)};
    // The second of a pair is worked through where it has no columns, so that the first is stored.
    if (at.row >= at.rows || at.col - slab % 2 * kSlabColumns >= at.cols) continue;
    float v[kSlabValues];
    take_slab<Tile, false>(acc, block * kSlabs + slab, p.alpha, v);
    if (p.gated) {
      activate_slab(p.activation, v);
      take_slab<Tile, true>(acc, block * kSlabs + kSlabs / 2 + slab, p.alpha, v);
    } else {
      if (slab == 0 && p.hooks.sum.count > 0) wait_for_addends(p, at.row, staging.lane);
      finish_product(p, at, v, staging.lane);
      if (p.preact.data != nullptr) preact.write(p, at, slab % 2, v, staging);
      activate_slab(p.activation, v);
    }
#pragma unroll 1
    for (int a = 0; a < p.num_late; ++a) add_slab(p.late[a], at, v, staging.lane);
    out.write(p, at, slab % 2, v, staging);
  }
}

// Says that a warp's rows of a tile are in memory: the last one of a chunk rings its bell.
__device__ __forceinline__ void ring_doorbells(const GemmParams& p, const WorkItem& item, int rows, int lane) {
  const DoorbellHook& h = p.hooks.doorbell;
  if (item.n >= p.problem.n) return;  // a CTA of the cluster that has no columns
  if (lane == 0) wait_stores_done();
  __threadfence_system();  // every lane's own stores, where they did not go through TMA
  __syncwarp();
  if (lane != 0) return;
  int begin = 0;
  for (int c = 0; c < h.num_chunks && begin < item.m + rows; ++c) {
    const int end = h.row_end[c];
    if (end > item.m && end > begin) {
      uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(h.counters + c) : "memory");
      if (before + 1 == h.target[c]) {
        h.counters[c] = 0;
        comm::store_release<comm::Scope::kSys>(h.bells + c, 1u);
      }
    }
    begin = end;
  }
}

}  // namespace tpk::sm90a

// Epilogue of a consumer warp: 16 rows of a block of 64, in slabs of 32 columns, so that few registers are
// needed beside the accumulators. Slabs go through a small swizzled buffer of the warp's own, so that whole
// lines are stored. Ordinary stores, not TMA: its queue is full of the next tile's loads then, and waiting
// for it to read buffers cost 3 us a tile.
#pragma once

#include "kernels/sm90a/finish.cuh"
#include "kernels/sm90a/mainloop.cuh"
#include "kernels/sm90a/scheduler.cuh"

namespace tpk::sm90a {

// A buffer of 16 rows x 128 bytes (32 fp32 columns, or 64 of 2 bytes). Swizzled as TMA's 128-byte mode has
// it: chunk c of 16 bytes of row r lies at c ^ (r % 8).
struct StagingBuffer {
  int lane;
  int warp;  // of the warpgroup
  uint32_t address;

  // buffers: of the warpgroup's first warp.
  __device__ __forceinline__ explicit StagingBuffer(const unsigned char* buffers) {
    const int thread = thread_number();
    lane = thread % 32;
    warp = thread / 32 % 4;
    address = shared_address(buffers) + warp * kStagingBytes;
  }

  // All lanes call it before they write: all have read what was there.
  __device__ __forceinline__ void acquire() const { __syncwarp(); }
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
__device__ __forceinline__ void stage_half(ScalarKind kind, uint32_t buffer, int half, const float* v,
                                           int lane) {
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

// 16 rows of a buffer to memory, kChunks of 16 bytes of each. row, col: the buffer's first element in the
// output. kWhole: the output's columns are whole chunks. kAdd (fp32): added to what is there, in L2, each
// element once.
template <int kBytes, int kChunks, bool kWhole, bool kAdd = false>
__device__ __forceinline__ void store_buffer(const Output& to, uint32_t buffer, int row, int col, int batch,
                                             int rows, int cols, int lane) {
  constexpr int kColumns = 16 / kBytes;  // of a chunk
  __syncwarp();
  constexpr int kRows = 32 / kChunks;  // at a time
  const int chunk = lane % kChunks;
  const int first = lane / kChunks;
  col += chunk * kColumns;
  char* p = static_cast<char*>(to.data) + batch * to.batch_stride +
            static_cast<int64_t>(row + first) * to.row_stride + static_cast<int64_t>(col) * kBytes;
  const bool whole = col + kColumns <= cols;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i, p += kRows * to.row_stride) {
    const int r = first + kRows * i;
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(buffer + r * kSwizzleBytes + ((chunk ^ (r & 7)) << 4))
                 : "memory");
    if (row + r >= rows) continue;
    if (whole && kAdd) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p),
                   "f"(__uint_as_float(x.x)), "f"(__uint_as_float(x.y)), "f"(__uint_as_float(x.z)),
                   "f"(__uint_as_float(x.w))
                   : "memory");
    } else if (whole) {
      *reinterpret_cast<uint4*>(p) = x;
    } else if (!kWhole) {  // the last columns of a width that is no multiple of a chunk
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (col + j >= cols) break;
        if (kAdd) {
          atomicAdd(reinterpret_cast<float*>(p + 4 * j), __uint_as_float(words[j % 4]));
        } else if (kBytes == 4) {
          *reinterpret_cast<uint32_t*>(p + 4 * j) = words[j % 4];
        } else {
          *reinterpret_cast<unsigned short*>(p + 2 * j) =
              static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2));
        }
      }
    }
  }
}

// A warp's part of the tile to memory, nothing but rounded. row: its first row in the output.
template <class Tile>
__device__ __forceinline__ void store_plain(const GemmParams& p, const WorkItem& item, int row,
                                            const Accumulators<Tile>& acc, const StagingBuffer& staging) {
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
          staging.acquire();
          stage_fp32(staging.address, v + half * kSlabValues, staging.lane);
          store_buffer<4, 8, true>(p.out, staging.address, row, item.n + col + half * kSlabColumns,
                                   item.batch, rows, cols, staging.lane);
        }
      } else {
        staging.acquire();
        stage_half(p.out_kind, staging.address, 0, v, staging.lane);
        stage_half(p.out_kind, staging.address, 1, v + kSlabValues, staging.lane);
        store_buffer<2, 8, true>(p.out, staging.address, row, item.n + col, item.batch, rows, cols,
                                 staging.lane);
      }
    }
  }
}

// A finished slab to one output.
__device__ __forceinline__ void write_slab(const GemmParams& p, const Output& to, bool add,
                                           const SlabPlace& at, const float (&v)[kSlabValues],
                                           const StagingBuffer& staging) {
  const int lane = staging.lane;
  if (!to.aligned) {
    store_slab_direct(p.out_kind, to, at, v, lane);
  } else if (p.out_kind == ScalarKind::kFp32) {
    staging.acquire();
    stage_fp32(staging.address, v, lane);
    if (add) {
      store_buffer<4, 8, false, true>(to, staging.address, at.row, at.col, at.batch, at.rows, at.cols, lane);
    } else {
      store_buffer<4, 8, false>(to, staging.address, at.row, at.col, at.batch, at.rows, at.cols, lane);
    }
  } else {
    staging.acquire();
    stage_half(p.out_kind, staging.address, 0, v, lane);
    store_buffer<2, 4, false>(to, staging.address, at.row, at.col, at.batch, at.rows, at.cols, lane);
  }
}

// v = slab number `slab` of the accumulators, or v *= scale * it. A run-time index would put the accumulators
// into local memory: select instead.
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

// A warp's part of the tile with everything that may be asked for. One copy of the code for all slabs. bias:
// of the tile's columns, in shared memory.
template <class Tile>
__device__ __forceinline__ void store_finished(const GemmParams& p, const WorkItem& item, int row,
                                               const Accumulators<Tile>& acc, const float* bias,
                                               const StagingBuffer& staging) {
  constexpr int kSlabs = Tile::kBN / kSlabColumns;
  const int slabs = p.gated ? kSlabs / 2 : kSlabs;
  int block = 0;
  int slab = -1;
#pragma unroll 1
  for (int i = 0; i < Tile::kBlocks * slabs; ++i) {
    if (++slab == slabs) {
      slab = 0;
      ++block;
    }
    const SlabPlace at{row + 64 * block, item.n + slab * kSlabColumns, item.batch,
                       static_cast<int>(p.problem.m), static_cast<int>(p.problem.n)};
    if (at.row >= at.rows || at.col >= at.cols) continue;
    float v[kSlabValues];
    take_slab<Tile, false>(acc, block * kSlabs + slab, p.alpha, v);
    if (p.gated) {
      activate_slab(p.activation, v);
      take_slab<Tile, true>(acc, block * kSlabs + kSlabs / 2 + slab, p.alpha, v);
    } else {
      if (slab == 0 && p.hooks.sum.count > 0) wait_for_addends(p, at.row, staging.lane);
      for (int a = 0; a < p.hooks.sum.count; ++a) add_slab(p.hooks.sum.addends[a], at, v, staging.lane);
      if (p.bias != nullptr) add_bias(bias + slab * kSlabColumns, v, staging.lane);
      if (p.preact.data != nullptr) write_slab(p, p.preact, false, at, v, staging);
      activate_slab(p.activation, v);
    }
#pragma unroll 1
    for (int a = 0; a < p.num_late; ++a) add_slab(p.late[a], at, v, staging.lane);
    write_slab(p, p.out, p.reduce, at, v, staging);
  }
}

// Says that a warp's rows of a tile are in memory: the last one of a chunk rings its bell.
__device__ __forceinline__ void ring_doorbells(const GemmParams& p, const WorkItem& item, int rows,
                                               int lane) {
  const DoorbellHook& h = p.hooks.doorbell;
  if (item.n >= p.problem.n) return;  // a CTA of the cluster that has no columns
  __threadfence_system();             // every lane's own stores
  __syncwarp();
  if (lane != 0) return;
  int begin = 0;
  for (int c = 0; c < h.num_chunks && begin < item.m + rows; ++c) {
    const int end = h.row_end[c];
    if (end > item.m && end > begin) {
      uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(h.counters + c)
                   : "memory");
      if (before + 1 == h.target[c]) {
        h.counters[c] = 0;
        comm::store_release<comm::Scope::kSys>(h.bells + c, 1u);
      }
    }
    begin = end;
  }
}

}  // namespace tpk::sm90a

// Swapped tiles, for products of few rows: the kernel's rows are columns of the product (weights), its
// columns rows of the product (tokens). Two things differ from other tiles, both here.
//
// CTAs along K. Up to eight CTAs of a cluster take the iterations of one tile in turn, so that a few tiles
// keep all multiprocessors loading, and every row of weights is read 128 bytes by each. Their sums meet in
// shared memory: warp w of every CTA sends its accumulators to warp w of the CTA that finishes these rows of
// the tile, which adds them in the order of CTAs. No workspace, no flags to clear, no second launch;
// splitting through global memory takes 8 us.
//
// Epilogue. A warp has 16 columns of the product and takes them in units of 16 tokens through its buffer of
// 1 KB, which turns them round: every lane then has 8 adjacent columns of one token, a whole sector with its
// neighbour. What is computed is in kernels/gemm_call.hpp.
#pragma once

#include "kernels/sm90a/kernel.cuh"

namespace tpk::sm90a {

constexpr int kUnitValues = kUnitTokens / 2;  // of a thread
constexpr int kLaneColumns = 8;               // of one token, that a lane finishes

// Columns of the product that this lane finishes. Gated: both warpgroups have the same ones.
struct LaneColumns {
  int first;
  int count;  // 0 to 8 exist

  template <class Tile>
  static __device__ __forceinline__ LaneColumns of(const GemmParams& p, const WorkItem& item, int part) {
    const int thread = thread_number();
    const int first =
        item.m + (p.gated ? 0 : part * Tile::kRows) + thread / 32 % 4 * 16 + (thread & 1) * kLaneColumns;
    return {first, max(0, min(kLaneColumns, static_cast<int>(p.problem.n) - first))};
  }
};

// Before the main loop, which hides most of how long it takes; registers for it are free after it only.
template <class Tile>
__device__ __forceinline__ void prefetch_column_bias(const GemmParams& p, const WorkItem& item, int part) {
  const LaneColumns columns = LaneColumns::of<Tile>(p, item, part);
  if (columns.count == 0) return;
  const char* from = static_cast<const char*>(p.bias) + item.batch * p.bias_batch_stride +
                     static_cast<int64_t>(columns.first) * p.bias_stride;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

__device__ __forceinline__ void load_column_bias(const GemmParams& p, const WorkItem& item,
                                                 const LaneColumns& columns, float (&bias)[kLaneColumns]) {
  const char* from = static_cast<const char*>(p.bias) + item.batch * p.bias_batch_stride +
                     static_cast<int64_t>(columns.first) * p.bias_stride;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    bias[i] =
        p.bias != nullptr && i < columns.count ? load_scalar(p.bias_kind, from + i * p.bias_stride) : 0.0f;
  }
}

// Where a lane's columns of one token begin in a matrix of the output's shape.
template <class Matrix>
__device__ __forceinline__ int64_t offset_in(const Matrix& t, int batch, int token, int column) {
  return batch * t.batch_stride + token * t.row_stride + column * t.col_stride;
}

// v to an output, rounded; add (fp32): to what is there, in L2.
__device__ __forceinline__ void store_columns(const Output& to, ScalarKind kind, bool add, int batch,
                                              int token, const LaneColumns& columns,
                                              const float (&v)[kLaneColumns]) {
  char* p = static_cast<char*>(to.data) + offset_in(to, batch, token, columns.first);
  if (!to.aligned) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (i < columns.count) store_scalar(kind, p + i * to.col_stride, v[i]);
    }
    return;
  }
  if (kind == ScalarKind::kFp32) {  // whole chunks of 4 columns exist
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      if (i >= columns.count) break;
      if (add) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + 4 * i), "f"(v[i]),
                     "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3])
                     : "memory");
      } else {
        *reinterpret_cast<float4*>(p + 4 * i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
      }
    }
    return;
  }
  *reinterpret_cast<uint4*>(p) = make_uint4(pack(kind, v[0], v[1]), pack(kind, v[2], v[3]),
                                            pack(kind, v[4], v[5]), pack(kind, v[6], v[7]));
}

// v += t. whole: 2-byte elements in whole chunks of 8 columns.
__device__ __forceinline__ void add_columns(const Addend& t, bool whole, int batch, int token,
                                            const LaneColumns& columns, float (&v)[kLaneColumns]) {
  const char* p = static_cast<const char*>(t.data) + offset_in(t, batch, token, columns.first);
  if (whole) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    const uint32_t bits[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] += unpack_low(t.kind, bits[i]);
      v[2 * i + 1] += unpack_high(t.kind, bits[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (i < columns.count) v[i] += load_scalar(t.kind, p + i * t.col_stride);
  }
}

// What follows on the products of one token, in this lane's columns.
__device__ __forceinline__ void finish_columns(const GemmParams& p, int batch, int token,
                                               const LaneColumns& columns, const float (&bias)[kLaneColumns],
                                               float (&v)[kLaneColumns]) {
  if (!p.gated) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) v[i] = p.alpha * v[i] + bias[i];
    if (p.preact.data != nullptr) store_columns(p.preact, p.out_kind, false, batch, token, columns, v);
    activate(p.activation, v);
  }
#pragma unroll 1
  for (int i = 0; i < p.num_late; ++i)
    add_columns(p.late[i], p.late_whole >> i & 1, batch, token, columns, v);
  store_columns(p.out, p.out_kind, p.reduce, batch, token, columns, v);
}

// A warp's buffer as 16 tokens of 16 columns, fp32. Chunk c of 4 columns of token t lies at
// c ^ (t / 2 % 4), so that 8 lanes read other banks.
struct TurningBuffer {
  int lane;
  uint32_t address;

  __device__ __forceinline__ uint32_t at(int token, int column) const {
    return address + token * 64 + ((column / 4 ^ (token / 2 & 3)) << 4) + column % 4 * 4;
  }
  // The unit as wgmma leaves it.
  __device__ __forceinline__ void put(const float (&v)[kUnitValues]) const {
#pragma unroll
    for (int i = 0; i < kUnitValues; ++i) {
      const uint32_t to = at(i / 4 * 8 + 2 * (lane & 3) + i % 2, lane / 4 + i / 2 % 2 * 8);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[i]) : "memory");
    }
  }
  __device__ __forceinline__ void take(int token, float (&v)[kLaneColumns]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                   : "r"(at(token, (lane & 1) * kLaneColumns + i))
                   : "memory");
    }
  }
};

// The sums over the CTAs along K of units of 16 columns and 16 tokens, for each of the 8 consumer warps. All
// warps of all CTAs go through the same units, each with a count of its own.
template <class Tile>
struct Exchange {
  SharedStorage<Tile>& s;
  const ClusterPlace& at;
  int depth;  // CTAs along K
  int warp;   // of the 8 consumer warps
  int owner;  // the CTA along K that finishes what this warp has: warps w and w + 4 have the same, but for 8
  uint32_t& count;

  __device__ __forceinline__ Exchange(const GemmParams& p, SharedStorage<Tile>& shared,
                                      const ClusterPlace& place, uint32_t& units)
      : s(shared),
        at(place),
        depth(p.cluster_k),
        warp(thread_number() / 32 - 4),
        owner(depth == kMostDepth ? warp % 4 * 2 + warp / 4 : warp % 4 * depth / 4),
        count(units) {}

  __device__ __forceinline__ bool owns() const { return owner == at.k; }
  __device__ __forceinline__ uint32_t rank_of(int k) const {
    return at.rank + static_cast<uint32_t>((k - at.k) * at.rows * at.columns);
  }
  // Where CTA `from` puts this warp's unit in the owner's memory.
  __device__ __forceinline__ unsigned char* place_of(int from) const {
    const int of_warp = depth == kMostDepth ? 0 : warp % 4 % (4 / depth) * 2 + warp / 4;
    const int unit = of_warp * (depth - 1) + from - (from > owner ? 1 : 0);
    return s.exchange.units[count % kExchangeBuffers][unit];
  }
  __device__ __forceinline__ uint32_t phase() const { return count / kExchangeBuffers & 1; }

  // blocks: of 8 tokens, that the unit has. v: the sum over the CTAs, where this one owns it.
  __device__ __forceinline__ void operator()(int blocks, float (&v)[kUnitValues]) {
    if (depth == 1) return;
    const int lane = thread_number() % 32;
    uint64_t* full = &s.exchange.full[count % kExchangeBuffers][warp];
    uint64_t* free = &s.exchange.free[count % kExchangeBuffers][warp];
    constexpr int kBlockBytes = 32 * 16;
    if (!owns()) {
      wait_for_cluster(free, phase() ^ 1);
      const uint32_t to = remote_address(place_of(at.k), rank_of(owner)) + lane * 16;
      const uint32_t barrier = remote_address(full, rank_of(owner));
#pragma unroll
      for (int j = 0; j < kUnitValues / 4; ++j) {
        if (j < blocks) store_remote(to + j * kBlockBytes, barrier, v + 4 * j);
      }
    } else {
      if (lane == 0) {
        reinterpret_cast<LoadBarrier*>(full)->arrive_and_expect_tx((depth - 1) * blocks * kBlockBytes);
      }
      wait_for_cluster(full, phase());
      float sum[kUnitValues] = {};
#pragma unroll 1
      for (int k = 0; k < depth; ++k) {
        const uint32_t from = shared_address(place_of(k)) + lane * 16;
#pragma unroll
        for (int j = 0; j < kUnitValues; j += 4) {
          float x[4] = {v[j], v[j + 1], v[j + 2], v[j + 3]};
          if (k != owner && j < 4 * blocks) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                         : "r"(from + j / 4 * kBlockBytes)
                         : "memory");
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j + i] += x[i];
        }
      }
#pragma unroll
      for (int j = 0; j < kUnitValues; ++j) v[j] = sum[j];
      __syncwarp();
      if (lane < depth && lane != owner) arrive_remote_after_reads(remote_address(free, rank_of(lane)));
    }
    ++count;
  }
};

// Gated: warps 0 to 3 have the gate's sums, warps 4 to 7 those of b, of the same columns. The former activate
// theirs and lay them down in their buffers; the latter take them from there. Lane by lane.
struct GateExchange {
  uint32_t address;  // of this lane
  int barrier;
  bool gives;

  __device__ __forceinline__ GateExchange(const unsigned char (*buffers)[kUnitBytes], int warp)
      : address(shared_address(buffers[warp % 4]) + thread_number() % 32 * 16),
        barrier(kGateBarrier + warp % 4),
        gives(warp < 4) {}

  __device__ __forceinline__ void operator()(const GemmParams& p, float (&v)[kUnitValues]) const {
#pragma unroll
    for (float& x : v) x *= p.alpha;
    if (gives) {
      activate(p.activation, v);
#pragma unroll
      for (int j = 0; j < kUnitValues; j += 4) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address + j * 128), "f"(v[j]),
                     "f"(v[j + 1]), "f"(v[j + 2]), "f"(v[j + 3])
                     : "memory");
      }
    }
    named_sync(barrier, 64);
    if (!gives) {
#pragma unroll
      for (int j = 0; j < kUnitValues; j += 4) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(address + j * 128)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) v[j + i] *= x[i];
      }
    }
    named_sync(barrier, 64);  // the buffer may be written again
  }
};

// A whole tile, from the accumulators to the outputs. part: the warpgroup. exchanged: units that this warp
// has been through, the caller's to keep from one tile to the next.
template <class Tile>
__device__ __forceinline__ void finish_few_rows(const GemmParams& p, SharedStorage<Tile>& s,
                                                const ClusterPlace& at, const WorkItem& item, int part,
                                                uint32_t& exchanged, Accumulators<Tile>& acc) {
  const int tokens = min(Tile::kBN, static_cast<int>(p.problem.m) - item.n);
  const LaneColumns columns = LaneColumns::of<Tile>(p, item, part);
  float bias[kLaneColumns];
  load_column_bias(p, item, columns, bias);
  Exchange<Tile> exchange(p, s, at, exchanged);
  const int lane = thread_number() % 32;
  const TurningBuffer buffer{lane, shared_address(s.staging[exchange.warp])};
#pragma unroll 1
  for (int done = 0; done < tokens; done += kUnitTokens) {
    float (&v)[kUnitValues] = *reinterpret_cast<float (*)[kUnitValues]>(&acc[0][0]);
    exchange(min(kUnitTokens / 8, (tokens - done + 7) / 8), v);
    if (p.gated && exchange.owns()) GateExchange(s.staging, exchange.warp)(p, v);
    if (exchange.owns() && !(p.gated && exchange.warp < 4)) {
      buffer.put(v);
      __syncwarp();
      const int token = done + lane / 2;
      if (token < tokens && columns.count > 0) {
        float of_token[kLaneColumns];
        buffer.take(lane / 2, of_token);
        finish_columns(p, item.batch, item.n + token, columns, bias, of_token);
      }
      __syncwarp();  // the buffer may be written again
    }
#pragma unroll
    for (int j = kUnitValues; j < Tile::kAccumulators; ++j) acc[0][j - kUnitValues] = acc[0][j];
  }
}

}  // namespace tpk::sm90a

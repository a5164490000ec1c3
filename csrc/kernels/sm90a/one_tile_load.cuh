// The loading thread of one_tile.cuh, and where a CTA stands.
#pragma once

#include "kernels/sm90a/one_tile_params.hpp"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

struct OneTilePlace {
  int m;  // of the CTA in its cluster
  int n;
  int k;
  int base;   // rank of the first CTA at the same K
  int token;  // first of the tile
  int column;
  int iterations;  // of this CTA
};

template <int kColumns>
__device__ __forceinline__ OneTilePlace place_of_cta(const OneTileParams& p) {
  OneTilePlace at;
  const int rank = static_cast<int>(cute::block_rank_in_cluster());
  const int log_plane = p.log_m + p.log_n;
  at.k = rank >> log_plane;
  at.base = at.k << log_plane;
  at.n = (rank - at.base) >> p.log_m;
  at.m = rank - at.base - (at.n << p.log_m);
  const int of_m = static_cast<int>(blockIdx.x) >> (log_plane + p.log_k);
  const int of_n = static_cast<int>(blockIdx.y);
  at.token = ((of_m << p.log_m) + at.m) * p.tile_rows;
  at.column = ((of_n << p.log_n) + at.n) * (p.gated ? kColumns / 2 : kColumns);
  at.iterations = (p.iterations - at.k + p.cluster_k - 1) >> p.log_k;
  return at;
}

struct OneTileShared {
  unsigned char* stages;
  unsigned char* met;
  OneTileBarriers* barriers;

  __device__ __forceinline__ OneTileShared(const OneTileParams& p, unsigned char* base)
      : stages(base),
        met(base + p.stages * p.stage_bytes),
        barriers(reinterpret_cast<OneTileBarriers*>(met + p.meeting_bytes)) {}
  __device__ __forceinline__ LoadBarrier& full(int stage) const {
    return *reinterpret_cast<LoadBarrier*>(&barriers->full[stage]);
  }
  __device__ __forceinline__ Barrier& empty(int stage) const {
    return *reinterpret_cast<Barrier*>(&barriers->empty[stage]);
  }
  __device__ __forceinline__ LoadBarrier& met_barrier() const {
    return *reinterpret_cast<LoadBarrier*>(&barriers->met);
  }
};

// This CTA's part of an operand's stage, and where it goes: all of it, or, of what several CTAs of the
// cluster need, as much as each of them, into all of them. Worked out once: the loop around the loads has 200
// cycles.
template <Major kMajor>
struct OperandPart {
  int extent;  // rows of the operand in a stage (columns, outer-major): boxes of 64 of an outer-major one
  int outer;   // where they begin
  int depth;   // outer-major: where the part begins along K
  int offset;  // of the part, in bytes
  uint16_t sharers;
  bool shared;

  // part: of `rows` rows, or of kBK / parts elements of K.
  __device__ __forceinline__ OperandPart(int extent, int outer, int part, int parts, int rows,
                                         uint16_t sharers)
      : extent(extent), outer(outer), depth(0), offset(0), sharers(sharers), shared(parts > 1) {
    if constexpr (kMajor == Major::kK) {
      this->outer += part * rows;
      offset = part * rows * kSwizzleBytes;
    } else {
      depth = part * (kBK / parts);
      offset = depth * kSwizzleBytes;
    }
  }
  __device__ __forceinline__ void load_box(const CUtensorMap* map, LoadBarrier& full, unsigned char* to,
                                           int x, int y, int batch) const {
    if (shared) {
      tensor_load_multicast(to, map, x, y, batch, full, sharers);
    } else {
      tensor_load(to, map, x, y, batch, full);
    }
  }
  __device__ __forceinline__ void load(const CUtensorMap* map, LoadBarrier& full, unsigned char* to, int k,
                                       int batch) const {
    to += offset;
    if constexpr (kMajor == Major::kK) {
      load_box(map, full, to, k, outer, batch);
    } else {
#pragma unroll 1
      for (int c = 0; c < extent; c += kChunkOuter, to += kBK * kSwizzleBytes)
        load_box(map, full, to, outer + c, k + depth, batch);
    }
  }
};

template <int kColumns, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void load_tile(const OneTileParams& p, const OneTileShared& s,
                                          const OneTilePlace& at) {
  uint16_t share_weights = 0;  // the CTAs along M
  uint16_t share_tokens = 0;
  for (int i = 0; i < p.cluster_m; ++i) share_weights |= 1u << (at.base + at.n * p.cluster_m + i);
  for (int i = 0; i < p.cluster_n; ++i) share_tokens |= 1u << (at.base + i * p.cluster_m + at.m);
  const OperandPart<kMajorA> weights(p.gated ? kColumns / 2 : kColumns, at.column, at.m, p.cluster_m,
                                     p.part_a, share_weights);
  const OperandPart<kMajorB> tokens(p.tile_rows, at.token, at.n, p.cluster_n, p.part_b, share_tokens);
  const int batch = static_cast<int>(blockIdx.z);
  const int batch_a = batch * p.batch_step_a;
  const int batch_b = batch * p.batch_step_b;
  const int step = p.cluster_k * kBK;
  const bool gated = p.gated;
  const PairMaps* maps = p.pairs;
  int pair = 0;
  int pair_begin = 0;
  int pair_end = p.pair_ends.k_end[0];
  int stage = 0;
  uint32_t phase = 1;
  unsigned char* to = s.stages;
  int k = at.k * kBK;
#pragma unroll 1
  for (int i = 0; i < at.iterations; ++i, k += step) {
    while (k >= pair_end) {
      pair_begin = pair_end;
      pair_end = p.pair_ends.k_end[++pair];
      ++maps;
    }
    LoadBarrier& full = s.full(stage);
    s.empty(stage).wait(phase);
    full.arrive_and_expect_tx(p.stage_bytes);
    if (gated) {
      weights.load(&p.map_gate, full, to, k - pair_begin, batch_a);
      weights.load(&maps->a, full, to + kColumns / 2 * kSwizzleBytes, k - pair_begin, batch_a);
    } else {
      weights.load(&maps->a, full, to, k - pair_begin, batch_a);
    }
    tokens.load(&maps->b, full, to + kColumns * kSwizzleBytes, k - pair_begin, batch_b);
    to += p.stage_bytes;
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
      to = s.stages;
    }
  }
}

// Lane i tells the i-th CTA that loads into this one's stages; 0 for nobody.
__device__ __forceinline__ uint32_t release_address(const OneTileParams& p, const OneTileShared& s,
                                                    const OneTilePlace& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane >= p.cluster_m + p.cluster_n - 1) return 0;
  int rank = at.base + at.n * p.cluster_m + lane;
  if (lane >= p.cluster_m) {
    const int other = lane - p.cluster_m;
    rank = at.base + at.m + p.cluster_m * (other + (other >= at.n ? 1 : 0));
  }
  return remote_address(&s.barriers->empty[0], rank);
}

}  // namespace tpk::sm90a

// The loading thread of one_tile.cuh, and where a CTA stands.
#pragma once

#include "kernels/sm90a/one_tile_params.hpp"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {

// A CTA in its cluster: among those that share its rows, those that share its columns, and along K. Worked
// out where it is needed, since registers are scarce beside the sums.
struct OneTileRank {
  int i;
  int j;
  int k;
  int base;  // rank of the first CTA at the same K
};
__device__ __forceinline__ OneTileRank rank_of_cta(const OneTileParams& p) {
  const int rank = static_cast<int>(cute::block_rank_in_cluster());
  const int log_plane = p.log_rows + p.log_columns;
  const int k = rank >> log_plane;
  const int in_plane = rank - (k << log_plane);
  const int j = in_plane >> p.log_rows;
  return {in_plane - (j << p.log_rows), j, k, k << log_plane};
}

// A CTA's run of a tile's iterations, and the units of 16 columns that it finishes. Were they taken in turns,
// 1280x8192 with one row would take 14 % longer, and 455 plans of few rows 1.2 % in the mean.
__device__ __forceinline__ int first_iteration_of_cta(const OneTileParams& p) {
  const int each = p.iterations >> p.log_depth;
  const int k = rank_of_cta(p).k;
  return k * each + min(k, p.iterations - (each << p.log_depth));
}
__device__ __forceinline__ int iterations_of_cta(const OneTileParams& p) {
  return (p.iterations - rank_of_cta(p).k + p.depth - 1) >> p.log_depth;
}
struct OneTileUnits {
  int first;
  int count;
};
__device__ __forceinline__ OneTileUnits units_of_cta(const OneTileParams& p) {
  const int units = p.columns / kUnit;
  const int k = rank_of_cta(p).k;
  const int first = first_unit(k, units, p.log_depth);
  return {first, first_unit(k + 1, units, p.log_depth) - first};
}

// Clusters of the grid along x, and the first of them that is this one's.
__device__ __forceinline__ int clusters_along_x(const OneTileParams& p) {
  return static_cast<int>(gridDim.x) >> (p.log_rows + p.log_columns + p.log_depth);
}
__device__ __forceinline__ int cluster_along_x(const OneTileParams& p) {
  return static_cast<int>(blockIdx.x) >> (p.log_rows + p.log_columns + p.log_depth);
}

// A tile of a CTA: its first row and column.
struct OneTilePlace {
  int row;
  int column;
  int batch;
};

template <int kRows>
__device__ __forceinline__ OneTilePlace place_at(const OneTileParams& p, int m, int n, int batch) {
  const OneTileRank at = rank_of_cta(p);
  const int along_columns = p.swapped ? m : n;
  const int along_rows = p.swapped ? n : m;
  return {((along_rows << p.log_columns) + at.j) * (p.gated ? kRows / 2 : kRows),
          ((along_columns << p.log_rows) + at.i) * p.columns, batch};
}

// A tile by number. Bands of rows of tiles, along N in each, so that those that are computed at the same time
// need little of both operands.
template <int kRows>
__device__ __forceinline__ OneTilePlace place_of_tile(const OneTileParams& p, int tile) {
  constexpr int kBand = 8;
  const int of_matrix = p.tiles_m * p.tiles_n;
  const int batch = tile / of_matrix;
  const int in_matrix = tile - batch * of_matrix;
  const int band = in_matrix / (kBand * p.tiles_n);
  const int in_band = in_matrix - band * kBand * p.tiles_n;
  const int lines = min(kBand, p.tiles_m - band * kBand);
  const int n = in_band / lines;
  return place_at<kRows>(p, band * kBand + in_band - n * lines, n, batch);
}

template <int kRows>
__device__ __forceinline__ OneTilePlace first_place(const OneTileParams& p) {
  const int cluster = cluster_along_x(p);
  return p.walks ? place_of_tile<kRows>(p, cluster)
                 : place_at<kRows>(p, static_cast<int>(blockIdx.y), cluster, static_cast<int>(blockIdx.z));
}

// Tiles that a cluster takes.
__device__ __forceinline__ int tiles_of_cluster(const OneTileParams& p) {
  if (!p.walks) return 1;
  const int clusters = clusters_along_x(p);
  return (p.num_tiles - cluster_along_x(p) + clusters - 1) / clusters;
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

// The loop around the loads decides how long an iteration of a small tile takes. Hence addresses of shared
// memory in one register, nothing looked up that could be known before, and one thread that was elected: of
// another, the compiler does not know that it is alone, and wraps each load in a loop over those who ask.
__device__ __forceinline__ void wait_at(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void expect_at(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// This CTA's part of an operand's stage, and where it goes: all of it, or, of what several CTAs of the
// cluster need (kShared), as much as each of them, into all of them. A multicast to oneself alone would do
// for both, but takes longer: 7 % of products in clusters of 1x2.
template <Major kMajor, bool kShared>
struct OperandPart {
  int extent;  // rows or columns in a stage: boxes of 64 of an outer-major operand
  int part;    // K-major: the first of the part
  int depth;   // outer-major: where the part begins along K
  int offset;  // of the part, in bytes
  uint16_t sharers;

  // part: of `rows` rows, or of kBK / parts elements of K.
  __device__ __forceinline__ OperandPart(int extent, int part, int parts, int rows, uint16_t sharers)
      : extent(extent), part(0), depth(0), offset(0), sharers(sharers) {
    if constexpr (kMajor == Major::kK) {
      this->part = part * rows;
      offset = part * rows * kSwizzleBytes;
    } else {
      depth = part * (kBK / parts);
      offset = depth * kSwizzleBytes;
    }
  }
  __device__ __forceinline__ void load_box(const CUtensorMap* map, uint32_t full, uint32_t to, int x, int y,
                                           int batch) const {
    if constexpr (kShared) {
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
          "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
          "l"(map), "r"(full), "r"(x), "r"(y), "r"(batch), "h"(sharers)
          : "memory");
    } else {
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
          "%5}], [%2];" ::"r"(to),
          "l"(map), "r"(full), "r"(x), "r"(y), "r"(batch)
          : "memory");
    }
  }
  // Into L2, before anybody may read it: what earlier kernels still write there changes in L2, too.
  __device__ __forceinline__ void prefetch(const CUtensorMap* map, int outer, int k, int batch) const {
    const auto box = [&](int x, int y) {
      asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
                   "r"(y), "r"(batch)
                   : "memory");
    };
    if constexpr (kMajor == Major::kK) {
      box(k, outer + part);
    } else {
#pragma unroll 1
      for (int c = 0; c < extent; c += kChunkOuter) box(outer + c, k + depth);
    }
  }
  // outer: the tile's first row or column.
  __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t full, uint32_t to, int outer, int k,
                                       int batch) const {
    to += offset;
    if constexpr (kMajor == Major::kK) {
      load_box(map, full, to, k, outer + part, batch);
    } else {
#pragma unroll 1
      for (int c = 0; c < extent; c += kChunkOuter, to += kBK * kSwizzleBytes)
        load_box(map, full, to, outer + c, k + depth, batch);
    }
  }
};

template <int kRows, Major kMajorA, Major kMajorB, bool kSharesRows, bool kSharesColumns>
__device__ __forceinline__ void load_tiles(const OneTileParams& p, const OneTileShared& s) {
  const OneTileRank rank = rank_of_cta(p);
  uint16_t share_rows = 0;
  uint16_t share_columns = 0;
  for (int i = 0; i < p.share_rows; ++i) share_rows |= 1u << (rank.base + rank.j * p.share_rows + i);
  for (int j = 0; j < p.share_columns; ++j) share_columns |= 1u << (rank.base + j * p.share_rows + rank.i);
  const bool gated = p.gated;
  const OperandPart<kMajorA, kSharesRows> rows(gated ? kRows / 2 : kRows, rank.i, p.share_rows, p.part_a,
                                               share_rows);
  const OperandPart<kMajorB, kSharesColumns> columns(p.columns, rank.j, p.share_columns, p.part_b,
                                                     share_columns);
  const int iterations = iterations_of_cta(p);
  OneTilePlace at = first_place<kRows>(p);
  int tiles = tiles_of_cluster(p);
  int tile = cluster_along_x(p);
  const int begin = first_iteration_of_cta(p) * kBK;
  const int stages = p.stages;
  const int stage_bytes = p.stage_bytes;
  uint32_t first;  // opaque, or it is worked out anew in each iteration, from the CTA's place in its cluster
  asm("mov.u32 %0, %1;" : "=r"(first) : "r"(shared_address(s.stages)));
  const uint32_t first_full = shared_address(&s.barriers->full[0]);
  constexpr uint32_t kEmpty = sizeof(s.barriers->full);  // from a stage's barrier to the other
  uint32_t full = first_full;
  uint32_t to = first;
  uint32_t phase = 1;
  int stage = 0;
  // The first iteration alone: of a second one, what it costs to ask twice is more than what it brings.
  rows.prefetch(&p.pairs[0].a, at.row, begin, at.batch * p.batch_step_a);
  columns.prefetch(&p.pairs[0].b, at.column, begin, at.batch * p.batch_step_b);
  begin_after_earlier_kernels();
  while (true) {
    const int batch_a = at.batch * p.batch_step_a;
    const int batch_b = at.batch * p.batch_step_b;
    const PairMaps* maps = p.pairs;
    int pair = 0;
    int pair_begin = 0;
    int pair_end = p.pair_ends.k_end[0];
    int k = begin;
#pragma unroll 1
    for (int i = 0; i < iterations; ++i, k += kBK) {
      while (k >= pair_end) {
        pair_begin = pair_end;
        pair_end = p.pair_ends.k_end[++pair];
        ++maps;
      }
      wait_at(full + kEmpty, phase);
      expect_at(full, stage_bytes);
      if (gated) {
        rows.load(&p.map_gate, full, to, at.row, k - pair_begin, batch_a);
        rows.load(&maps->a, full, to + kRows / 2 * kSwizzleBytes, at.row, k - pair_begin, batch_a);
      } else {
        rows.load(&maps->a, full, to, at.row, k - pair_begin, batch_a);
      }
      columns.load(&maps->b, full, to + kRows * kSwizzleBytes, at.column, k - pair_begin, batch_b);
      to += stage_bytes;
      full += sizeof(uint64_t);
      if (++stage == stages) {
        stage = 0;
        phase ^= 1;
        to = first;
        full = first_full;
      }
    }
    if (--tiles == 0) return;
    tile += clusters_along_x(p);
    at = place_of_tile<kRows>(p, tile);
  }
}

// All lanes of a warp, one of which loads.
template <int kRows, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void run_one_tile_loader(const OneTileParams& p, const OneTileShared& s) {
  if (!cute::elect_one_sync()) return;
  if (p.share_rows > 1) {
    if (p.share_columns > 1) {
      load_tiles<kRows, kMajorA, kMajorB, true, true>(p, s);
    } else {
      load_tiles<kRows, kMajorA, kMajorB, true, false>(p, s);
    }
  } else if (p.share_columns > 1) {
    load_tiles<kRows, kMajorA, kMajorB, false, true>(p, s);
  } else {
    load_tiles<kRows, kMajorA, kMajorB, false, false>(p, s);
  }
}

// Lane i tells the i-th CTA that loads into this one's stages; 0 for nobody.
__device__ __forceinline__ uint32_t release_address(const OneTileParams& p, const OneTileShared& s) {
  const OneTileRank at = rank_of_cta(p);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane >= p.share_rows + p.share_columns - 1) return 0;
  int rank = at.base + at.j * p.share_rows + lane;
  if (lane >= p.share_rows) {
    const int other = lane - p.share_rows;
    rank = at.base + at.i + p.share_rows * (other + (other >= at.j ? 1 : 0));
  }
  return remote_address(&s.barriers->empty[0], rank);
}

}  // namespace tpk::sm90a

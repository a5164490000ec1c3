// What the kernel of one_tile.cuh is told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90a/one_tile.hpp"
#include "kernels/sm90a/params.hpp"

namespace tpk::sm90a {

// Rows and columns here are those of wgmma. Swapped, its rows are columns of the product (weights) and its
// columns rows of the product (tokens); else they are what they are called. Blocks: x counts the clusters
// along N, y those along M, z the batch; where clusters walk, x counts those that run at once, and each takes
// every so many-th tile.
struct OneTileParams {
  PairMaps pairs[kMaxPairs];  // a: rows, b: columns
  CUtensorMap map_gate;       // gated, swapped: the first half of a tile's weights; pairs[0].a the second
  PairEnds pair_ends;
  int32_t batch_step_a = 1;  // 0: one matrix of rows for all batches
  int32_t batch_step_b = 1;

  Problem problem;
  bool swapped = true;
  bool walks = false;   // plain, depth 1
  int32_t tiles_n = 1;  // of a cluster
  int32_t tiles_m = 1;
  int32_t num_tiles = 1;    // of all the batch
  int32_t columns = kUnit;  // of a tile
  int32_t share_rows = 1;   // CTAs: see Sharers; powers of two, and their logarithms
  int32_t share_columns = 1;
  int32_t depth = 1;
  int32_t log_rows = 0;
  int32_t log_columns = 0;
  int32_t log_depth = 0;
  int32_t iterations = 1;  // of the whole tile
  int32_t part_a = 0;      // rows of each CTA's part of one map, and columns
  int32_t part_b = 0;
  int32_t stages = 0;
  int32_t stage_bytes = 0;
  int32_t meeting_bytes =
      0;                   // behind the stages; where clusters walk, a tile of the output lies there instead
  int32_t most_units = 1;  // that a CTA finishes

  bool gated = false;
  bool plain = true;                        // rounds_alone()
  bool scales = false;                      // plain: alpha or a bias
  bool reduce = false;                      // fp32: out += where it lies
  ScalarKind out_kind = ScalarKind::kBf16;  // of preact too
  ScalarKind bias_kind = ScalarKind::kBf16;
  Activation activation = Activation::kNone;
  float alpha = 1.0f;
  Output out;
  Output preact;
  const void* bias = nullptr;
  int64_t bias_stride = 0;  // bytes
  int64_t bias_batch_stride = 0;
  int32_t num_late = 0;  // added after the activation
  Addend late[2];
  uint32_t late_whole = 0;  // a bit for each of `late`: elements of 2 bytes, in whole chunks of 16
};

}  // namespace tpk::sm90a

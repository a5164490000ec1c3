// What the kernel of one_tile.cuh is told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90a/one_tile.hpp"
#include "kernels/sm90a/params.hpp"

namespace tpk::sm90a {

// The kernel computes the transpose: its rows are columns of the product (weights), its columns rows of the
// product (tokens). Blocks: x counts the clusters along M, y those along N, z the batch.
struct OneTileParams {
  PairMaps pairs[kMaxPairs];  // a: weights, b: tokens
  CUtensorMap map_gate;       // gated: the first half of a tile's weights; pairs[0].a the second
  PairEnds pair_ends;
  int32_t batch_step_a = 1;  // 0: one matrix of weights for all batches
  int32_t batch_step_b = 1;

  Problem problem;
  int32_t tile_rows = kUnit;
  int32_t cluster_m = 1;  // see ClusterShape: powers of two, and their logarithms
  int32_t cluster_n = 1;
  int32_t cluster_k = 1;
  int32_t log_m = 0;
  int32_t log_n = 0;
  int32_t log_k = 0;
  int32_t iterations = 1;  // of the whole tile
  int32_t part_a = 0;      // rows of each CTA's part of the weights (of one map), and of the tokens
  int32_t part_b = 0;
  int32_t stages = 0;
  int32_t stage_bytes = 0;
  int32_t meeting_bytes = 0;
  int32_t most_units = 1;  // that a CTA finishes

  bool gated = false;
  bool plain = true;    // out = A * B in 2-byte elements and whole chunks of 16 bytes, and nothing else
  bool reduce = false;  // fp32: out += where it lies
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

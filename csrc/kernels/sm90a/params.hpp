// What the kernel is told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/schedule.hpp"
#include "host/tile_order.hpp"
#include "kernels/gemm_hooks.hpp"
#include "kernels/scaled_call.hpp"
#include "kernels/sm90a/config.hpp"
#include "kernels/sm90a/fault.hpp"
#include "kernels/sm90a/pairs.hpp"
#include "kernels/sm90a/placement.hpp"
#include "kernels/sm90a/work.hpp"

namespace tpk::sm90a {

// [batch, M, N]; strides in bytes. data is null if there is none.
struct Output {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  bool aligned = false;  // rows are stored in whole 16 bytes; otherwise element by element
};

// Added by the epilogue in fp32, [batch, M, N]; strides in bytes.
struct Addend {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  ScalarKind kind = ScalarKind::kBf16;
};

// Departure: the rows of the result that stay. Tiles of others are stored as they are, to GemmParams::out.
struct OwnRows {
  int32_t begin = 0;
  int32_t end = 0;
  Output out;           // addressed by row of M
  int32_t addends = 0;  // that a tile of them is given: of each peer, and the residual
};

struct PairMaps {
  CUtensorMap a;
  CUtensorMap b;
};

struct GemmParams {
  // Boxes of one stage. Unused ones are zero.
  PairMaps pairs[kMaxPairs];
  CUtensorMap map_gate;
  CUtensorMap map_own;       // arrival: A's own rows
  CUtensorMap map_slots;     // departure: what peers send of the own rows, [rank, own rows, N]
  CUtensorMap map_residual;  // departure: [own rows, N]

  PairEnds pair_ends;
  // 0 where a batch stride is 0 (one matrix for all): the map has one batch then.
  int32_t batch_step_a = 1;
  int32_t batch_step_b = 1;

  int32_t cluster_m = 1;
  int32_t cluster_n = 1;
  bool gated = false;    // the first half of a tile's columns is A * gate, the second A * B
  bool plain = true;     // out = A * B, or out += A * B, and nothing else, in whole chunks of 16 bytes
  bool fast = false;     // out in whole lines, no preact, and nothing late but a staged residual
  bool departs = false;  // see own_rows; then it is plain, too
  bool reduce = false;   // fp32: out += where it lies
  ScalarKind out_kind = ScalarKind::kBf16;  // of preact too
  ScalarKind bias_kind = ScalarKind::kBf16;
  Activation activation = Activation::kNone;
  float alpha = 1.0f;

  int32_t own_begin = INT32_MAX;  // rows of A that map_own holds
  int32_t own_end = 0;

  Problem problem;
  RowBlocks blocks;
  Output out;
  OwnRows own_rows;
  Output preact;
  const void* bias = nullptr;
  int64_t bias_stride = 0;  // bytes
  int64_t bias_batch_stride = 0;
  int32_t num_late = 0;      // added after the activation: the residual, and out where it cannot be added to
  bool late_staged = false;  // the first of them is loaded in lines
  Addend late[2];

  // Above 0: fix-up is divided, each of so many workers finishes a share of a split tile. Workers are dealt
  // out by cluster number then, and `ticket` counts the clusters that have started.
  int32_t shares = 0;
  uint32_t clusters_started = 0;  // when all have; never, where a cluster has more than one worker
  uint32_t* ticket = nullptr;     // null where no tile is split: workers are then dealt out by cluster number
  uint32_t* flags = nullptr;     // a word per slot and part, or, with shares, 64 bits per tile and part. Zero
                                 // before the launch
  float* partials = nullptr;     // slots of a cluster's tile, in fragment order
  uint64_t timeout_ns = 0;       // bound of every wait for another CTA or rank
  FaultRecord* fault = nullptr;  // in host memory: where a wait that took longer is reported

  TileOrder order;
  Schedule schedule;
  Opening opening;
  GemmHooks hooks;
  ScaledOperands scaled;  // of the kernels for 8-bit operands
};

// Launches carry up to 32,764 bytes since CUDA 12.1, on sm_70 and later.
static_assert(sizeof(GemmParams) <= 13312, "Kernel parameters should stay small.");

}  // namespace tpk::sm90a

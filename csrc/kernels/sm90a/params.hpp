// What the kernel is told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/schedule.hpp"
#include "host/tile_order.hpp"
#include "kernels/gemm_hooks.hpp"
#include "kernels/sm90a/config.hpp"
#include "kernels/sm90a/fault.hpp"

namespace tpk::sm90a {

// [batch, M, N]; strides in bytes. data is null if there is none.
struct Output {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  bool aligned = false;  // rows are stored 16 bytes at a time; otherwise element by element
};

struct GemmParams {
  // Boxes of one stage. Unused ones are zero.
  CUtensorMap map_a;
  CUtensorMap map_b;
  CUtensorMap map_gate;

  // 0 where a batch stride is 0 (one matrix for all): the map has one batch then.
  int32_t batch_step_a = 1;
  int32_t batch_step_b = 1;

  int32_t cluster_m = 1;
  int32_t cluster_n = 1;
  bool gated = false;   // the first half of a tile's columns is A * gate, the second A * B
  bool plain = true;    // out = A * B and nothing else, in whole chunks of 16 bytes
  bool reduce = false;  // fp32: out += where it lies
  ScalarKind out_kind = ScalarKind::kBf16;  // of preact too
  ScalarKind bias_kind = ScalarKind::kBf16;
  Activation activation = Activation::kNone;
  float alpha = 1.0f;

  Problem problem;
  Output out;
  Output preact;
  const void* bias = nullptr;
  int64_t bias_stride = 0;  // bytes
  int32_t num_late = 0;     // added after the activation: the residual, and out where it cannot be added to
  Addend late[2];

  uint32_t* ticket = nullptr;    // null where no tile is split: workers are then dealt out by cluster number
  uint32_t* flags = nullptr;     // kFlagsPerCta words per slot and CTA of a cluster, zero before the launch
  float* partials = nullptr;     // slots of a cluster's tile, in fragment order
  uint64_t timeout_ns = 0;       // bound of every wait for another CTA or rank
  FaultRecord* fault = nullptr;  // in host memory

  TileOrder order;
  Schedule schedule;
  GemmHooks hooks;
};

// Launches carry up to 32,764 bytes since CUDA 12.1, on sm_70 and later.
static_assert(sizeof(GemmParams) <= 8192, "Kernel parameters should stay small.");

}  // namespace tpk::sm90a

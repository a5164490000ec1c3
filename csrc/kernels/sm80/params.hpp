// What the kernel is told, by value: less than the 4 KiB that a launch may carry.
#pragma once

#include <cstdint>

#include "host/schedule.hpp"
#include "host/tile_order.hpp"
#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

// Strides in bytes.
struct Operand {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t outer_stride = 0;  // along M for A, along N for B
  int64_t k_stride = 0;
};

// A matrix that the epilogue reads or writes. Strides in bytes. data is null if there is none.
struct Output {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  bool vector = false;  // neighbouring columns are a unit: four of 2 or 4 bytes beside fp32 sums, two of fp64
                        // beside fp64 ones
};

struct GemmParams {
  Operand a;
  Operand b;
  Output out;
  Output preact;
  Output residual;  // read only
  Output mul;       // read only, sums: alpha * (A * gate), whose activation the product is multiplied by
  const void* bias = nullptr;
  int64_t bias_stride = 0;  // bytes
  Problem problem;
  ScalarKind out_kind = ScalarKind::kBf16;  // of preact too
  ScalarKind bias_kind = ScalarKind::kBf16;
  ScalarKind residual_kind = ScalarKind::kBf16;
  double alpha = 1.0;
  Activation activation = Activation::kNone;  // of mul alone, where there is one
  bool accumulate = false;
  bool only_adds = false;  // see adds_only

  uint32_t* ticket = nullptr;  // zero before the launch; null: whole tiles, dealt out to the CTAs in turn
  uint32_t* flags = nullptr;   // one per slot, zero before the launch
  void* partials = nullptr;    // slots of kBM * kBN sums, in fragment order
  uint64_t timeout_ns = 0;     // bound of every wait

  TileOrder order;
  Schedule schedule;
};

// Whether nothing but additions of units follow the product, all of one type.
inline bool adds_only(const GemmParams& p) {
  return p.preact.data == nullptr && p.mul.data == nullptr && p.activation == Activation::kNone &&
         p.out.vector && (p.residual.data == nullptr || (p.residual.vector && p.residual_kind == p.out_kind));
}

static_assert(sizeof(GemmParams) <= 4096, "Kernel parameters are limited to 4 KiB.");

}  // namespace tpk::sm80

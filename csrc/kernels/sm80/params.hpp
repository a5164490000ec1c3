// What the kernel is told, by value: little, as a launch carries it and every CTA begins by reading it.
#pragma once

#include <cstdint>

#include "kernels/sm80/config.hpp"
#include "kernels/sm80/walk.hpp"

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
  ScalarKind sum_kind = ScalarKind::kFp32;
  ScalarKind out_kind = ScalarKind::kBf16;  // of preact too
  ScalarKind bias_kind = ScalarKind::kBf16;
  ScalarKind residual_kind = ScalarKind::kBf16;
  double alpha = 1.0;
  Activation activation = Activation::kNone;  // of mul alone, where there is one
  bool accumulate = false;
  bool only_adds = false;  // see adds_only
  bool plain = false;      // see is_plain

  uint64_t* flags = nullptr;  // one per slot; see fixup.cuh
  uint64_t mark = 0;          // what raised flags are; no other launch has the same
  void* partials = nullptr;   // slots of kBM * kBN sums, in fragment order
  uint64_t timeout_ns = 0;    // bound of every wait

  Walk walk;
};

// Whether nothing but additions of units follow the product, all of one type.
inline bool adds_only(const GemmParams& p) {
  return p.preact.data == nullptr && p.mul.data == nullptr && p.activation == Activation::kNone &&
         p.out.vector && (p.residual.data == nullptr || (p.residual.vector && p.residual_kind == p.out_kind));
}

// Whether alpha times the sums is all there is, in their own type and in units.
inline bool is_plain(const GemmParams& p) {
  return adds_only(p) && p.bias == nullptr && p.residual.data == nullptr && !p.accumulate &&
         p.out_kind == p.sum_kind;
}

static_assert(sizeof(GemmParams) <= 1024,
              "Larger parameters make launches slower; beyond 4 KiB there are none.");

}  // namespace tpk::sm80

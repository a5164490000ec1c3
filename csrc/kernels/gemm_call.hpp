// One call of a GPU product, as the op hands it to the kernels of an architecture. Pure C++: no torch.
//
// clang-format off
//   v   = alpha * (A * B)            in fp32, fp64 of fp64 operands; A * B: the sum of all pairs' products
//   v   = the sum over ranks         own rows of a departure: see kernels/gemm_hooks.hpp
//   v  += bias                       the pre-activation, stored as preact if asked for
//   v   = activation(v)
//   v   = activation(alpha * (A * gate)) * v    where there is a gate, with no bias and no preact
//   v  += residual
//   v  += out                        where accumulate is set
//   out = v                          one rounding
// clang-format on
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "host/problem.hpp"
#include "kernels/gemm_hooks.hpp"
#include "kernels/gemm_types.hpp"
#include "kernels/grouped_rows.hpp"
#include "kernels/scaled_call.hpp"

namespace tpk {

struct Pair {
  Matrix a;  // [batch, M, K]
  Matrix b;  // [batch, K, N]
  int64_t k = 0;
};

struct GemmCall {
  Problem problem;  // k: of a and b; n: columns of out, and of each of b and gate
  Element element = Element::kBf16;
  Matrix a;                  // [batch, M, K]
  Matrix b;                  // [batch, K, N]
  Pair more[kMaxPairs - 1];  // behind a and b; the Hopper kernel alone takes them, and without gate
  int num_more = 0;
  Matrix gate;      // [batch, K, N]
  Matrix bias;      // [batch, N], of groups [matrices, N]: row_stride does not count
  Matrix residual;  // [batch, M, N]
  Matrix out;       // [batch, M, N]
  Matrix preact;    // [batch, M, N], kind of out
  double alpha = 1.0;
  Activation activation = Activation::kNone;
  bool accumulate = false;
  const ScaledOperands* scaled = nullptr;  // Element::kFp8: what a and b are; the Hopper kernel alone

  // The plan that is asked for: see host/schedule_builder.hpp. tile "" means the cheapest.
  std::string_view schedule = "auto";
  std::string_view tile;
  int64_t workers = 0;
  int64_t splits = 1;

  const GemmHooks* hooks = nullptr;  // null: none
  // Not null: a grouped product. problem.batch is 1, problem.m of all rows, b and gate [matrices, K, N]. The
  // Hopper kernel alone takes it, without hooks and more.
  const GroupedRows* groups = nullptr;

  int device = 0;
  int multiprocessors = 0;  // of the device, or fewer to leave some free
  uint64_t timeout_ns = 0;  // bound of every wait inside the kernel
};

// Workspace of one call, on its stream; valid until the kernel has run. Called at most once. Null: no memory.
struct Allocator {
  void* (*allocate)(void* context, int64_t bytes) = nullptr;
  void* context = nullptr;
};

// What became of a call. Refused: nothing was launched, another kernel has to take it. The message is a
// sentence without the op's name.
enum class GemmOutcome : int32_t { kDone = 0, kRefused = 1, kFailed = 2 };

// An architecture's way in. stream is a cudaStream_t. Never throws.
using GemmEntry = GemmOutcome (*)(const GemmCall& call, void* stream, const Allocator& allocator,
                                  char* message, size_t message_bytes);

}  // namespace tpk

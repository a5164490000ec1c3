// What the ops that call the Hopper kernel themselves share: tensors as matrices, workspace, the call. op:
// the name that errors begin with.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/sm90a/entry.hpp"
#include "ops/sentence.hpp"
#include "ops/workspace.hpp"

namespace tpk::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline ScalarKind kind_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float  ? ScalarKind::kFp32
         : t.scalar_type() == ScalarType::Half ? ScalarKind::kFp16
                                               : ScalarKind::kBf16;
}

// [N], [rows, columns] or [batch, rows, columns], any strides.
inline Matrix matrix_of(const Tensor& t) {
  const int64_t dim = t.dim();
  const auto stride = [&](int64_t back) {
    return dim >= back && t.size(dim - back) > 1 ? t.stride(dim - back) : 0;
  };
  return {t.data_ptr(), stride(3), stride(2), stride(1), kind_of(t)};
}

inline Element element_of(std::string_view op, const Tensor& a) {
  const bool bf16 = a.scalar_type() == ScalarType::BFloat16;
  TPK_REQUIRE(bf16 || a.scalar_type() == ScalarType::Half, op, ": a must be bfloat16 or float16, but it is ",
              a.scalar_type(), ".");
  return bf16 ? Element::kBf16 : Element::kFp16;
}

inline cudaStream_t current_stream(std::string_view op, int device) {
  void* stream = nullptr;
  TPK_REQUIRE(aoti_torch_get_current_cuda_stream(device, &stream) == 0, op,
              ": torch could not name the current CUDA stream.");
  return static_cast<cudaStream_t>(stream);
}

using Tensors = std::optional<std::vector<Tensor>>;

// Factors of more products, see GemmCall::more: like those of c, which are set, but for K. a: the first one.
inline void set_more(std::string_view op, GemmCall& c, const Tensor& a, const Tensors& more_a,
                     const Tensors& more_b) {
  const size_t count = more_a ? more_a->size() : 0;
  TPK_REQUIRE(count == (more_b ? more_b->size() : 0) && count < kMaxPairs, op,
              ": more_a and more_b must be as many tensors, at most ", kMaxPairs - 1, ".");
  for (size_t i = 0; i < count; ++i) {
    const Tensor& left = (*more_a)[i];
    const Tensor& right = (*more_b)[i];
    const int64_t d = a.dim();
    const bool fits = left.is_cuda() && right.is_cuda() && left.dim() == d && right.dim() == d &&
                      left.size(d - 2) == c.problem.m && left.size(d - 1) > 0 &&
                      right.size(d - 2) == left.size(d - 1) && right.size(d - 1) == c.problem.n &&
                      (d == 2 || (left.size(0) == c.problem.batch && right.size(0) == c.problem.batch)) &&
                      left.scalar_type() == a.scalar_type() && right.scalar_type() == a.scalar_type();
    TPK_REQUIRE(fits, op, ": more_a and more_b must be of the device, dtype and shape of a and b but for K, ",
                "which is one for both and above 0; those of number ", i, " are not.");
    c.more[i] = {matrix_of(left), matrix_of(right), left.size(d - 1)};
  }
  c.num_more = static_cast<int>(count);
}

// On which device the call runs, and on how many multiprocessors (0: all).
inline void set_device(GemmCall& call, int device, int64_t multiprocessors) {
  int present = 0;
  (void)cudaDeviceGetAttribute(&present, cudaDevAttrMultiProcessorCount, device);
  call.device = device;
  call.multiprocessors =
      multiprocessors > 0 && multiprocessors < present ? static_cast<int>(multiprocessors) : present;
}

// Everything that can go wrong with the call, before other ranks wait for it: checks it, loads its kernel,
// makes its workspace. Returns the rows of a CTA's tile.
inline int64_t prepare_hopper(std::string_view op, const GemmCall& call, Workspace& workspace) {
  sm90a::Needs needs;
  char message[1024] = "";
  const GemmOutcome outcome = sm90a::find_needs(call, &needs, message, sizeof message);
  TPK_REQUIRE(outcome == GemmOutcome::kDone, op, ": ", static_cast<const char*>(message));
  TPK_REQUIRE(workspace.reserve(needs.workspace_bytes), op, ": ", sm90a::no_memory(needs.workspace_bytes));
  return needs.tile_rows;
}

// Runs the call on the stream.
inline void run_hopper(std::string_view op, const GemmCall& call, Workspace& workspace, cudaStream_t stream) {
  char message[1024] = "";
  const GemmOutcome outcome = sm90a::run_gemm(call, stream, workspace.allocator(), message, sizeof message);
  TPK_REQUIRE(outcome == GemmOutcome::kDone, op, ": ", static_cast<const char*>(message));
}

}  // namespace tpk::ops

// torch.ops.tpkernels.sum_ranks: checks, then the kernel. Stable ABI, no host synchronisation.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>

#include "kernels/sm80/device.hpp"
#include "kernels/sm80/sum_ranks.hpp"
#include "ops/arguments.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::ops::View;
using tpk::sm80::kSumThreads;
using tpk::sm80::kUnitBytes;
using tpk::sm80::SumKind;
using tpk::sm80::SumParams;

constexpr const char* kOp = "tpkernels::sum_ranks";

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

SumKind kind_of(const View& v) {
  if (v.type == ScalarType::BFloat16) return SumKind::kBf16;
  if (v.type == ScalarType::Half) return SumKind::kFp16;
  if (v.type == ScalarType::Float) return SumKind::kFp32;
  REQUIRE(v.type == ScalarType::Double, v.name, " must be bfloat16, float16, float32 or float64, but it is ",
          v.type, ".");
  return SumKind::kFp64;
}

int64_t elements_of(const View& v) {
  int64_t count = 1;
  for (int64_t d = 0; d < v.dim; ++d) count *= v.sizes[d];
  return count;
}

View view_of(const char* name, const std::optional<Tensor>& t) {
  return t ? tpk::ops::view_of(name, *t) : View{};
}

void check_place(const Tensor& t, const View& v, const View& pieces) {
  REQUIRE(v.device_type == pieces.device_type && v.device_index == pieces.device_index, v.name,
          " must be on the device of pieces, cuda:", pieces.device_index, ": move it.");
  REQUIRE(t.is_contiguous(), v.name, " must be contiguous: pass ", v.name, ".contiguous().");
}

// own, residual or out.
void check_like_piece(const View& v, const View& pieces, int64_t elements) {
  REQUIRE(v.type == pieces.type, v.name, " must have pieces' dtype, ", pieces.type, ", but it is ", v.type,
          ".");
  REQUIRE(elements_of(v) == elements, v.name, " must have as many elements as a piece, ", elements,
          ", but it has shape ", tpk::ops::shape_text(v), ".");
}

bool aligned(const View& v) { return !v.exists() || reinterpret_cast<uintptr_t>(v.data) % kUnitBytes == 0; }

SumParams params_of(const View& pieces, const View& own, int64_t rank, const View& bias, const View& residual,
                    const View& out, int64_t first_column) {
  SumParams p{};
  p.pieces = pieces.data;
  p.own = own.data;
  p.bias = bias.data;
  p.residual = residual.data;
  p.out = out.data;
  p.elements = elements_of(out);
  p.n = bias.exists() ? bias.sizes[0] : 1;
  p.first_column = first_column;
  p.world = static_cast<int32_t>(pieces.sizes[0]);
  p.own_rank = own.exists() ? static_cast<int32_t>(rank) : -1;
  p.kind = kind_of(pieces);
  p.bias_kind = bias.exists() ? kind_of(bias) : SumKind::kFp32;
  REQUIRE(p.bias_kind != SumKind::kFp64 || p.kind == SumKind::kFp64,
          "bias must be bfloat16, float16 or float32 where pieces are not float64: the sum is float32.");
  const int64_t count = kUnitBytes / tpk::sm80::bytes_of(p.kind);
  p.in_units =
      p.elements % count == 0 && aligned(pieces) && aligned(own) && aligned(residual) && aligned(out);
  p.bias_in_units = p.in_units && p.n % count == 0 && first_column % count == 0 && aligned(bias);
  return p;
}

void launch(const SumParams& p, int device) {
  const int64_t count = p.in_units ? kUnitBytes / tpk::sm80::bytes_of(p.kind) : 1;
  const int64_t ctas = (p.elements / count + kSumThreads - 1) / kSumThreads;
  // All at once: each thread goes on where the grid ends.
  const int64_t most =
      int64_t{tpk::sm80::DeviceCache::instance().facts(device).multiprocessors} * tpk::sm80::kSumCtas;
  void* stream = nullptr;
  REQUIRE(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
          "torch could not name the current CUDA stream.");
  void* arguments[] = {const_cast<SumParams*>(&p)};
  tpk::sm80::check_cuda(
      cudaLaunchKernel(tpk::sm80::sum_ranks_function(p), dim3(static_cast<unsigned>(std::min(ctas, most))),
                       dim3(kSumThreads), arguments, 0, static_cast<cudaStream_t>(stream)),
      "The launch of tpkernels::sum_ranks");
}

void sum_ranks(const Tensor& pieces, const std::optional<Tensor>& own, int64_t rank,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, const Tensor& out,
               int64_t first_column) {
  const View all = tpk::ops::view_of("pieces", pieces);
  REQUIRE(all.device_type == aoti_torch_device_type_cuda() && all.dim > 0 && all.sizes[0] > 0,
          "pieces must be a CUDA tensor [ranks, ...] of 1 rank or more, but it has shape ",
          tpk::ops::shape_text(all), ".");
  const int64_t elements = elements_of(all) / all.sizes[0];
  const View sum = tpk::ops::view_of("out", out);
  const View mine = view_of("own", own);
  const View column = view_of("bias", bias);
  const View last = view_of("residual", residual);
  check_place(pieces, all, all);
  check_place(out, sum, all);
  check_like_piece(sum, all, elements);
  if (own) {
    check_place(*own, mine, all);
    check_like_piece(mine, all, elements);
    REQUIRE(rank >= 0 && rank < all.sizes[0], "rank must lie in [0, ", all.sizes[0], "), but it is ", rank,
            ".");
  }
  if (residual) {
    check_place(*residual, last, all);
    check_like_piece(last, all, elements);
  }
  if (bias) {
    check_place(*bias, column, all);
    REQUIRE(column.dim == 1, "bias must have shape [N], but it has shape ", tpk::ops::shape_text(column),
            ".");
  }
  if (elements == 0) return;
  REQUIRE(!bias || (first_column >= 0 && first_column < column.sizes[0]),
          "first_column must be one of the columns of bias, which has ", bias ? column.sizes[0] : 0,
          ", but it is ", first_column, ".");
  for (const View& read : {all, mine, column, last}) tpk::ops::check_separate(kOp, read, sum);
  const SumParams params = params_of(all, mine, rank, column, last, sum, first_column);
  int current = -1;
  (void)cudaGetDevice(&current);
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (current != all.device_index) guard.emplace(all.device_index);
  launch(params, all.device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) { m.impl("sum_ranks", TORCH_BOX(&sum_ranks)); }

// torch.ops.tpkernels.streamk_gemm_hooked: a plain product on the Hopper kernel tied to flags in device
// memory, see kernels/gemm_hooks.hpp. What the fused operations are made of, one rank at a time; tests play
// the other ranks.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/sm90a/entry.hpp"
#include "ops/sentence.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::Matrix;

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, "tpkernels::streamk_gemm_hooked: ", __VA_ARGS__)

tpk::ScalarKind kind_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float  ? tpk::ScalarKind::kFp32
         : t.scalar_type() == ScalarType::Half ? tpk::ScalarKind::kFp16
                                               : tpk::ScalarKind::kBf16;
}

Matrix matrix_of(const char* name, const Tensor& t) {
  REQUIRE(t.is_cuda() && t.dim() == 3, name, " must be a CUDA tensor [batch, rows, columns].");
  const auto stride = [&](int64_t dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; };
  return {t.data_ptr(), stride(0), stride(1), stride(2), kind_of(t)};
}

// Flags, epochs, counters and bells: 32-bit words, contiguous.
uint32_t* words_of(const char* name, const std::optional<Tensor>& t, int64_t least) {
  REQUIRE(t.has_value() && t->is_cuda() && t->scalar_type() == ScalarType::Int && t->is_contiguous() &&
              t->numel() >= least,
          name, " must be a contiguous int32 CUDA tensor of at least ", least, " words.");
  return static_cast<uint32_t*>(t->data_ptr());
}

// The ends of consecutive blocks of rows.
template <size_t kMost>
int32_t fill_rows(const char* name, const std::vector<int64_t>& ends, int64_t rows, int32_t (&to)[kMost]) {
  REQUIRE(!ends.empty() && ends.size() <= kMost, name, " must name 1 to ", kMost,
          " blocks of rows, but it names ", ends.size(), ".");
  int64_t before = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    REQUIRE(ends[i] >= before && ends[i] <= rows, name, " must grow and end at M = ", rows, ", but entry ", i,
            " is ", ends[i], ".");
    to[i] = static_cast<int32_t>(before = ends[i]);
  }
  REQUIRE(before == rows, name, " must end at M = ", rows, ", but it ends at ", before, ".");
  return static_cast<int32_t>(ends.size());
}

void streamk_gemm_hooked(const Tensor& a, const Tensor& b, const Tensor& out, const std::string& schedule,
                         int64_t workers, int64_t splits, const std::string& tile,
                         const std::optional<Tensor>& arrival_flags,
                         const std::optional<Tensor>& arrival_epoch, const std::vector<int64_t>& arrival_rows,
                         int64_t slab_k, const std::optional<Tensor>& counters,
                         const std::optional<Tensor>& bells, const std::vector<int64_t>& bell_rows,
                         const std::vector<Tensor>& addends, const std::vector<Tensor>& addend_flags,
                         const std::optional<Tensor>& addend_epoch, int64_t flag_rows, double timeout_s) {
  tpk::GemmCall c;
  c.a = matrix_of("a", a);
  c.b = matrix_of("b", b);
  c.out = matrix_of("out", out);
  c.problem = {a.size(1), b.size(2), a.size(2), a.size(0)};
  const bool bf16 = a.scalar_type() == ScalarType::BFloat16;
  REQUIRE(bf16 || a.scalar_type() == ScalarType::Half, "a must be bfloat16 or float16.");
  REQUIRE(b.scalar_type() == a.scalar_type() && b.size(0) == a.size(0) && b.size(1) == a.size(2),
          "b must be [batch, K, N] of the dtype, batch and K of a.");
  REQUIRE(out.size(0) == a.size(0) && out.size(1) == a.size(1) && out.size(2) == b.size(2),
          "out must be [batch, M, N].");
  c.element = bf16 ? tpk::Element::kBf16 : tpk::Element::kFp16;
  c.schedule = schedule;
  c.tile = tile;
  c.workers = workers;
  c.splits = splits;
  c.device = a.get_device_index();
  c.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);

  tpk::GemmHooks hooks;
  if (!arrival_rows.empty()) {
    tpk::ArrivalHook& h = hooks.arrival;
    REQUIRE(slab_k >= 0 && slab_k % 64 == 0, "slab_k must be 0 (all of K) or a multiple of 64, but it is ",
            slab_k, ".");
    h.num_chunks = fill_rows("arrival_rows", arrival_rows, c.problem.m, h.row_end);
    h.slab_k = static_cast<int32_t>(slab_k);
    h.slabs = slab_k > 0 ? static_cast<int32_t>(tpk::ceil_div(c.problem.k, slab_k)) : 1;
    h.flags = words_of("arrival_flags", arrival_flags, int64_t{h.num_chunks} * h.slabs);
    h.epoch = words_of("arrival_epoch", arrival_epoch, 1);
  }
  if (!bell_rows.empty()) {
    tpk::DoorbellHook& h = hooks.doorbell;
    REQUIRE(c.problem.batch == 1, "bells need one batch, but there are ", c.problem.batch, ".");
    h.num_chunks = fill_rows("bell_rows", bell_rows, c.problem.m, h.row_end);
    h.counters = words_of("counters", counters, h.num_chunks);
    h.bells = words_of("bells", bells, h.num_chunks);
  }
  REQUIRE(addends.size() <= tpk::kMaxAddends, "addends must be at most ", tpk::kMaxAddends, ", but they are ",
          addends.size(), ".");
  REQUIRE(addend_flags.empty() || addend_flags.size() == addends.size(),
          "addend_flags must be as many as addends, or none.");
  for (size_t i = 0; i < addends.size(); ++i) {
    const Matrix m = matrix_of("addends", addends[i]);
    REQUIRE(
        addends[i].size(0) == a.size(0) && addends[i].size(1) == a.size(1) && addends[i].size(2) == b.size(2),
        "addends must be [batch, M, N] like out.");
    tpk::Addend& t = hooks.sum.addends[hooks.sum.count++];
    const int64_t bytes = tpk::bytes_of(m.kind);
    t = {m.data, m.batch_stride * bytes, m.row_stride * bytes, m.col_stride * bytes, m.kind, 1, nullptr,
         nullptr};
    if (addend_flags.empty()) continue;
    REQUIRE(flag_rows >= 1, "flag_rows must be at least 1, but it is ", flag_rows, ".");
    t.flag_rows = static_cast<int32_t>(flag_rows);
    t.flags = words_of("addend_flags", addend_flags[i], tpk::ceil_div(c.problem.m, flag_rows));
    t.epoch = words_of("addend_epoch", addend_epoch, 1);
  }
  c.hooks = &hooks;
  if (out.numel() == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(c.device);
  (void)cudaDeviceGetAttribute(&c.multiprocessors, cudaDevAttrMultiProcessorCount, c.device);
  void* stream = nullptr;
  REQUIRE(aoti_torch_get_current_cuda_stream(c.device, &stream) == 0,
          "torch could not name the current CUDA stream.");
  struct Workspace {
    const Tensor& like;
    std::optional<Tensor> memory;
  } workspace{a, std::nullopt};
  const tpk::Allocator allocator{[](void* context, int64_t bytes) -> void* {
                                   auto* w = static_cast<Workspace*>(context);
                                   try {
                                     w->memory = torch::stable::new_empty(w->like, {bytes}, ScalarType::Byte);
                                     return w->memory->data_ptr();
                                   } catch (...) {
                                     return nullptr;
                                   }
                                 },
                                 &workspace};
  char message[1024] = "";
  const tpk::GemmOutcome outcome = tpk::sm90a::run_gemm(c, stream, allocator, message, sizeof message);
  REQUIRE(outcome == tpk::GemmOutcome::kDone, static_cast<const char*>(message));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("streamk_gemm_hooked", TORCH_BOX(&streamk_gemm_hooked));
}

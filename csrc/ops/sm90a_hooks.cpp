// torch.ops.tpkernels.streamk_gemm_hooked: a plain product on the Hopper kernel tied to flags in device
// memory, see kernels/gemm_hooks.hpp. What the fused operations are made of, one rank at a time; tests play
// the other ranks.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "ops/hopper_call.hpp"

namespace {

using tpk::Matrix;
using tpk::ops::ScalarType;
using tpk::ops::Tensor;

constexpr const char* kOp = "tpkernels::streamk_gemm_hooked";

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

Matrix batched(const char* name, const Tensor& t) {
  REQUIRE(t.is_cuda() && t.dim() == 3, name, " must be a CUDA tensor [batch, rows, columns].");
  return tpk::ops::matrix_of(t);
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
                         double timeout_s, const tpk::ops::Tensors& more_a, const tpk::ops::Tensors& more_b) {
  tpk::GemmCall c;
  c.a = batched("a", a);
  c.b = batched("b", b);
  c.out = batched("out", out);
  c.problem = {a.size(1), b.size(2), a.size(2), a.size(0)};
  c.element = tpk::ops::element_of(kOp, a);
  REQUIRE(b.scalar_type() == a.scalar_type() && b.size(0) == a.size(0) && b.size(1) == a.size(2),
          "b must be [batch, K, N] of the dtype, batch and K of a.");
  REQUIRE(out.size(0) == a.size(0) && out.size(1) == a.size(1) && out.size(2) == b.size(2),
          "out must be [batch, M, N].");
  tpk::ops::set_more(kOp, c, a, more_a, more_b);
  c.schedule = schedule;
  c.tile = tile;
  c.workers = workers;
  c.splits = splits;
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
  c.hooks = &hooks;
  if (out.numel() == 0) return;

  const auto device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  tpk::ops::set_device(c, device, 0);
  tpk::ops::Workspace workspace(a);
  tpk::ops::run_hopper(kOp, c, workspace, tpk::ops::current_stream(kOp, device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("streamk_gemm_hooked", TORCH_BOX(&streamk_gemm_hooked));
}

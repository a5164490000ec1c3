// torch.ops.tpkernels.fused_all_reduce: the sum over ranks of a small partial, in one kernel. What it does:
// host/all_reduce.hpp.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/sm90a/all_reduce.hpp"
#include "kernels/sm90a/device.hpp"
#include "ops/hopper_call.hpp"

namespace {

using tpk::all_reduce::Call;
using tpk::all_reduce::kMaxRanks;
using tpk::all_reduce::kUnitBytes;
using tpk::all_reduce::Page;
using tpk::all_reduce::Way;
using tpk::ops::kind_of;
using tpk::ops::Tensor;
using tpk::sm90a::AllReduceParams;

constexpr const char* kOp = "tpkernels::fused_all_reduce";

Way parse_way(const std::string& way) {
  if (way == "packets") return Way::kPackets;
  if (way == "one-shot") return Way::kOneShot;
  TPK_REQUIRE(way == "two-shot", kOp, ": way must be one of packets, one-shot or two-shot, but it is '", way,
              "'.");
  return Way::kTwoShot;
}

// buffer_bytes: of each rank's memory, the page included.
Call call_of(const std::string& way, int64_t bytes, int64_t rank, const std::vector<int64_t>& addresses,
             int64_t buffer_bytes, int64_t ctas) {
  const auto world = static_cast<int64_t>(addresses.size());
  TPK_REQUIRE(world >= 2 && world <= kMaxRanks, kOp, ": addresses must name 2 to ", kMaxRanks,
              " ranks, but it names ", world, ".");
  TPK_REQUIRE(rank >= 0 && rank < world, kOp, ": rank must lie in [0, ", world, "), but it is ", rank, ".");
  TPK_REQUIRE(ctas >= 0 && ctas <= tpk::all_reduce::kMaxCtas, kOp, ": ctas must lie in [0, ",
              tpk::all_reduce::kMaxCtas, "], where 0 leaves the choice to the op, but it is ", ctas, ".");
  const int64_t units = tpk::ceil_div(bytes, kUnitBytes);
  TPK_REQUIRE(units > 0 && units < tpk::all_reduce::kMostUnits, kOp,
              ": partial must have elements, and less than 2 GiB, but it has ", bytes, " bytes.");
  Call c;
  c.world = static_cast<int32_t>(world);
  c.rank = static_cast<int32_t>(rank);
  c.way = parse_way(way);
  c.units = static_cast<int32_t>(units);
  c.ctas = ctas > 0 ? static_cast<int32_t>(ctas)
                    : tpk::all_reduce::ctas_for(c.units, tpk::sm90a::kAllReduceThreads);
  // Whole lines.
  c.half_bytes = (buffer_bytes - static_cast<int64_t>(Page::kBytes)) / 2 / 128 * 128;
  for (int64_t r = 0; r < world; ++r) {
    TPK_REQUIRE(addresses[r] != 0 && addresses[r] % kUnitBytes == 0, kOp,
                ": addresses must be those of symmetric memory, but entry ", r, " is ", addresses[r], ".");
    c.pages[r] = Page::at(static_cast<uint64_t>(addresses[r]));
  }
  c.cut();
  TPK_REQUIRE(c.fits(), kOp, ": ", bytes, " bytes of ", world, " ranks do not fit a buffer of ", buffer_bytes,
              " bytes by way of ", way, ": make the workspace larger.");
  return c;
}

void check_like(const char* name, const Tensor& t, const Tensor& partial) {
  TPK_REQUIRE(t.is_cuda() && t.dim() == 2 && t.size(0) == partial.size(0) && t.size(1) == partial.size(1),
              kOp, ": ", name, " must be a CUDA tensor of partial's shape [", partial.size(0), ", ",
              partial.size(1), "].");
  TPK_REQUIRE(t.is_contiguous() && t.scalar_type() == partial.scalar_type(), kOp, ": ", name,
              " must be contiguous and of partial's dtype, ", partial.scalar_type(), ", but it is ",
              t.scalar_type(), ".");
  TPK_REQUIRE(t.get_device_index() == partial.get_device_index(), kOp, ": ", name,
              " must be on the device of partial.");
}

void launch(const AllReduceParams& params, tpk::ScalarKind kind, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.call.ctas));
  config.blockDim = dim3(tpk::sm90a::kAllReduceThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<AllReduceParams*>(&params)};
  const void* const function = tpk::sm90a::all_reduce_function(params.call.way, kind);
  const cudaError_t error = cudaLaunchKernelExC(&config, function, arguments);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string fault = tpk::sm90a::fault_sentence(*params.fault);
  TPK_REQUIRE(false, kOp, ": ",
              fault.empty() ? std::string("the launch failed: ") + cudaGetErrorString(error) + "."
                            : "an earlier launch was stopped: " + fault);
}

void fused_all_reduce(const Tensor& partial, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, const Tensor& out, const std::string& way,
                      int64_t rank, const std::vector<int64_t>& addresses, int64_t buffer_bytes,
                      double timeout_s, int64_t ctas) {
  using torch::headeronly::ScalarType;
  TPK_REQUIRE(partial.is_cuda() && partial.dim() == 2 && partial.is_contiguous(), kOp,
              ": partial must be a contiguous CUDA tensor [M, N].");
  const auto known = [](const Tensor& t) {
    return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half ||
           t.scalar_type() == ScalarType::Float;
  };
  TPK_REQUIRE(known(partial), kOp, ": partial must be bfloat16, float16 or float32, but it is ",
              partial.scalar_type(), ".");
  check_like("out", out, partial);
  if (residual) check_like("residual", *residual, partial);
  if (bias) {
    TPK_REQUIRE(bias->is_cuda() && bias->dim() == 1 && bias->size(0) == partial.size(1) &&
                    bias->is_contiguous() && known(*bias),
                kOp, ": bias must be a contiguous CUDA tensor [N] of bfloat16, float16 or float32.");
  }
  const auto device = partial.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const tpk::ScalarKind kind = kind_of(partial);
  const int64_t elements = partial.numel();
  AllReduceParams params;
  params.call = call_of(way, elements * tpk::bytes_of(kind), rank, addresses, buffer_bytes, ctas);
  params.partial = partial.data_ptr();
  params.out = out.data_ptr();
  params.residual = residual ? residual->data_ptr() : nullptr;
  params.bias = bias ? bias->data_ptr() : nullptr;
  params.bias_kind = bias ? kind_of(*bias) : tpk::ScalarKind::kFp32;
  params.elements = static_cast<int32_t>(elements);
  params.n = static_cast<int32_t>(partial.size(1));
  params.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  params.fault = tpk::sm90a::DeviceCache::instance().fault();
  launch(params, kind, tpk::ops::current_stream(kOp, device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) { m.impl("fused_all_reduce", TORCH_BOX(&fused_all_reduce)); }

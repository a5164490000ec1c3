// torch.ops.tpkernels.streamk_gemm for CUDA: checks, plan, workspace, launch. Stable ABI; no host
// synchronisation, so that it can be captured into CUDA graphs and used on several streams and devices at
// once.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/sm80/find_kernel.hpp"
#include "kernels/sm80/params.hpp"
#include "kernels/sm80/plan.hpp"
#include "ops/arguments.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::Problem;
using tpk::ops::shape_text;
using tpk::sm80::Activation;
using tpk::sm80::Element;
using tpk::sm80::GemmParams;
using tpk::sm80::GemmPlan;
using tpk::sm80::KernelInfo;
using tpk::sm80::Operand;
using tpk::sm80::OperandLayout;
using tpk::sm80::Output;
using tpk::sm80::Residency;
using tpk::sm80::ScalarKind;
using tpk::sm80::TileId;

constexpr const char* kOp = "tpkernels::streamk_gemm";

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> expected,
                 const char* meaning) {
  tpk::ops::check_shape(kOp, name, t, expected, meaning);
}

void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next launch check would report it against an innocent op
  REQUIRE(error == cudaSuccess, call, " failed: ", cudaGetErrorString(error), ".");
}

void check_device(const char* name, const Tensor& t, const Tensor& a) {
  REQUIRE(t.is_cuda(), name,
          " must be a CUDA tensor like a, but it is on another kind of device: move it there.");
  REQUIRE(t.get_device_index() == a.get_device_index(), name,
          " must be on the device of a, cuda:", a.get_device_index(),
          ", but it is on cuda:", t.get_device_index(), ".");
}

std::optional<ScalarKind> scalar_kind(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return ScalarKind::kBf16;
    case ScalarType::Half:
      return ScalarKind::kFp16;
    case ScalarType::Float:
      return ScalarKind::kFp32;
    default:
      return std::nullopt;
  }
}

Activation parse_activation(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  REQUIRE(false, "activation must be one of none, relu, silu, gelu or gelu_tanh, but it is '", name, "'.");
  return Activation::kNone;
}

// A stride that is never multiplied by anything but 0 does not matter, whatever it says.
int64_t stride_of(const Tensor& t, int64_t dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; }

// Reads the operand's layout; outer_dim is M's or N's, k_dim is K's.
std::pair<Operand, OperandLayout> read_operand(const Tensor& t, int64_t outer_dim, int64_t k_dim) {
  using tpk::sm80::kChunkBytes;
  using tpk::sm80::kChunkElements;
  using tpk::sm80::kElementBytes;
  const int64_t batch = stride_of(t, 0);
  const int64_t outer = stride_of(t, outer_dim);
  const int64_t k = stride_of(t, k_dim);
  Operand o{t.data_ptr(), batch * kElementBytes, outer * kElementBytes, k * kElementBytes};
  const bool aligned = reinterpret_cast<uintptr_t>(o.data) % kChunkBytes == 0 && batch % kChunkElements == 0;
  const auto contiguous = [&](int64_t dim) { return t.size(dim) <= 1 || t.stride(dim) == 1; };
  if (aligned && contiguous(k_dim) && outer % kChunkElements == 0) return {o, OperandLayout::kKMajor};
  if (aligned && contiguous(outer_dim) && k % kChunkElements == 0) return {o, OperandLayout::kOuterMajor};
  return {o, OperandLayout::kStrided};
}

Output read_output(const char* name, const Tensor& t) {
  for (int64_t dim = 0; dim < 3; ++dim) {
    REQUIRE(t.size(dim) <= 1 || t.stride(dim) != 0, name,
            " must not be broadcast (its stride along dimension ", dim,
            " is 0): several results would be written to one element. Pass a tensor with memory of its own.");
  }
  const int64_t bytes = static_cast<int64_t>(t.element_size());
  Output o{t.data_ptr(), stride_of(t, 0) * bytes, stride_of(t, 1) * bytes, stride_of(t, 2) * bytes, false};
  o.vector = t.size(2) > 1 && t.stride(2) == 1 && reinterpret_cast<uintptr_t>(o.data) % (4 * bytes) == 0 &&
             stride_of(t, 0) % 4 == 0 && stride_of(t, 1) % 4 == 0;
  return o;
}

struct DeviceFacts {
  int multiprocessors = 0;
  int major = 0;
};

// Facts of devices and kernels do not change; plans cost up to milliseconds. All are kept for the process.
class Cache {
 public:
  static Cache& instance() {
    static Cache cache;
    return cache;
  }

  DeviceFacts device(int index) {
    const std::lock_guard lock(mutex_);
    const auto found = devices_.find(index);
    if (found != devices_.end()) return found->second;
    DeviceFacts d;
    check_cuda(cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, index),
               "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, index),
               "cudaDeviceGetAttribute");
    REQUIRE(d.major >= 8, "the device must have compute capability 8.0 or later, but cuda:", index, " has ",
            d.major, ".x: use path 'cublas'.");
    return devices_[index] = d;
  }

  // CTAs of the kernel that a multiprocessor of the current device holds. The first call also raises the
  // kernel's shared-memory limit, which CUDA keeps per device.
  int resident(int index, const KernelInfo& kernel) {
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(index, kernel.function);
    const auto found = resident_.find(key);
    if (found != resident_.end()) return found->second;
    check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kernel.shared_bytes)),
               "cudaFuncSetAttribute");
    check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "cudaFuncSetAttribute");
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, kernel.threads,
                                                             kernel.shared_bytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    REQUIRE(count > 0, "the kernel needs ", kernel.shared_bytes,
            " bytes of shared memory, which cuda:", index, " does not have: use path 'cublas'.");
    return resident_[key] = count;
  }

  GemmPlan plan(const Problem& p, const DeviceFacts& d, const Residency& r, const std::string& schedule,
                int64_t workers, int64_t splits, const std::string& tile) {
    const Key key{p.batch,  p.m,     p.n,    p.k, d.multiprocessors, d.major, r.k128x128, r.k64x64,
                  schedule, workers, splits, tile};
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    if (plans_.size() >= kMaxPlans) plans_.clear();
    const tpk::CostConstants& cost = d.major >= 9 ? tpk::kCostSm90 : tpk::kCostSm80;
    try {
      return plans_[key] =
                 tpk::sm80::plan_gemm(p, d.multiprocessors, cost, schedule, workers, splits, tile, r);
    } catch (const std::invalid_argument& error) {
      throw std::runtime_error(tpk::ops::sentence(kOp, ": ", error.what()));
    }
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, std::string, int64_t,
                         int64_t, std::string>;
  static constexpr size_t kMaxPlans = 4096;
  std::mutex mutex_;
  std::map<int, DeviceFacts> devices_;
  std::map<std::pair<int, const void*>, int> resident_;
  std::map<Key, GemmPlan> plans_;
};

// Bound of a wait inside the kernel. Waits are for CTAs that already run, so microseconds are usual.
uint64_t timeout_ns() {
  static const uint64_t ns = [] { return static_cast<uint64_t>(tpk::ops::timeout_seconds(30.0) * 1e9); }();
  return ns;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  REQUIRE(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
          "torch could not name the current CUDA stream.");
  return static_cast<cudaStream_t>(stream);
}

void check_arguments(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& out,
                     const std::optional<Tensor>& preact, int64_t workers, int64_t splits) {
  REQUIRE(a.is_cuda(), "a must be a CUDA tensor, but it is on another kind of device.");
  check_device("b", b, a);
  check_device("out", out, a);
  REQUIRE(a.dim() == 3, "a must have shape [batch, M, K], but it has shape ", shape_text(a), ".");
  REQUIRE(b.dim() == 3, "b must have shape [batch, K, N], but it has shape ", shape_text(b), ".");
  REQUIRE(b.size(0) == a.size(0), "b must have the batch size of a, ", a.size(0), ", but it has ", b.size(0),
          ": expand it (a stride of 0 costs nothing).");
  REQUIRE(b.size(1) == a.size(2), "b must have as many rows as a has columns (K = ", a.size(2),
          "), but it has ", b.size(1), ".");
  check_shape("out", out, {a.size(0), a.size(1), b.size(2)}, "[batch, M, N]");
  REQUIRE(a.scalar_type() == ScalarType::BFloat16 || a.scalar_type() == ScalarType::Half,
          "a must be bfloat16 or float16 for the CUDA kernel, but it is ", a.scalar_type(),
          ": convert it or use path 'cublas'.");
  REQUIRE(b.scalar_type() == a.scalar_type(), "b must have the dtype of a, ", a.scalar_type(), ", but it is ",
          b.scalar_type(), ".");
  REQUIRE(scalar_kind(out).has_value(), "out must be bfloat16, float16 or float32, but it is ",
          out.scalar_type(), ".");
  REQUIRE(a.size(2) <= int64_t{1} << 35, "K must not exceed 2^35, but it is ", a.size(2), ".");
  if (bias.has_value()) {
    check_device("bias", *bias, a);
    check_shape("bias", *bias, {b.size(2)}, "[N]");
    REQUIRE(scalar_kind(*bias).has_value(), "bias must be bfloat16, float16 or float32, but it is ",
            bias->scalar_type(), ".");
  }
  if (preact.has_value()) {
    check_device("preact", *preact, a);
    check_shape("preact", *preact, {a.size(0), a.size(1), b.size(2)}, "[batch, M, N]");
    REQUIRE(preact->scalar_type() == out.scalar_type(), "preact must have the dtype of out, ",
            out.scalar_type(), ", but it is ", preact->scalar_type(), ".");
  }
  REQUIRE(workers >= 0, "workers must be 0 (as many as fit) or more, but it is ", workers, ".");
  REQUIRE(splits >= 1, "splits must be at least 1, but it is ", splits, ".");
  const auto check_separate = [&](const char* name, const Tensor& t, const char* other,
                                  const Tensor& written) {
    tpk::ops::check_separate(kOp, name, t, other, written);
  };
  check_separate("a", a, "out", out);
  check_separate("b", b, "out", out);
  if (bias.has_value()) check_separate("bias", *bias, "out", out);
  if (preact.has_value()) {
    check_separate("out", out, "preact", *preact);
    check_separate("a", a, "preact", *preact);
    check_separate("b", b, "preact", *preact);
  }
}

// Rounds up to what the next array in the workspace is aligned to.
int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

void streamk_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& preact, const std::string& activation, bool accumulate,
                  const std::string& schedule, int64_t workers, int64_t splits, const std::string& tile) {
  check_arguments(a, b, bias, out, preact, workers, splits);
  GemmParams p;
  p.problem = {a.size(1), b.size(2), a.size(2), a.size(0)};
  p.activation = parse_activation(activation);
  if (schedule != "auto") {
    try {
      tpk::parse_schedule_kind(schedule);
    } catch (const std::invalid_argument& error) {
      REQUIRE(false, "schedule must be auto or a name: ", error.what());
    }
  }
  try {
    tpk::tiles_named(tile, tpk::sm80::kTileShapes);
  } catch (const std::invalid_argument& error) {
    REQUIRE(false, error.what());
  }
  p.accumulate = accumulate;
  p.out_kind = *scalar_kind(out);
  p.out = read_output("out", out);
  if (preact.has_value()) p.preact = read_output("preact", *preact);
  if (out.numel() == 0) return;

  auto [operand_a, layout_a] = read_operand(a, 1, 2);
  auto [operand_b, layout_b] = read_operand(b, 2, 1);
  p.a = operand_a;
  p.b = operand_b;
  // Nothing is read when K = 0, but addresses are formed, and an empty tensor may have none.
  if (p.problem.k == 0) p.a.data = p.b.data = p.out.data;
  if (bias.has_value()) {
    p.bias = bias->data_ptr();
    p.bias_stride = stride_of(*bias, 0) * static_cast<int64_t>(bias->element_size());
    p.bias_kind = *scalar_kind(*bias);
  }

  const int device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Cache& cache = Cache::instance();
  const DeviceFacts facts = cache.device(device);
  const Element element = a.scalar_type() == ScalarType::BFloat16 ? Element::kBf16 : Element::kFp16;
  const auto kernel_for = [&, a_is = layout_a, b_is = layout_b](TileId tile) {
    return tpk::sm80::find_kernel(element, a_is, b_is, tile);
  };
  const Residency residency{cache.resident(device, kernel_for(TileId::k128x128)),
                            cache.resident(device, kernel_for(TileId::k64x64))};
  const GemmPlan plan = cache.plan(p.problem, facts, residency, schedule, workers, splits, tile);
  const KernelInfo kernel = kernel_for(plan.tile);
  p.schedule = plan.plan.schedule;
  p.order = plan.plan.order;
  p.timeout_ns = timeout_ns();

  // Workspace of this call, on this stream: [ticket | flags | partials]. The allocator may hand it out again
  // on the same stream as soon as we return, which is after the kernel in stream order.
  const int64_t slots = p.schedule.num_slots;
  const int64_t flags_at = 256;  // the ticket has a line of its own
  const int64_t partials_at = flags_at + aligned(slots * static_cast<int64_t>(sizeof(uint32_t)));
  const int64_t slot_bytes = plan.plan.tile.bm * plan.plan.tile.bn * static_cast<int64_t>(sizeof(float));
  const Tensor workspace = torch::stable::new_empty(a, {partials_at + slots * slot_bytes}, ScalarType::Byte);
  char* base = static_cast<char*>(workspace.data_ptr());
  p.ticket = reinterpret_cast<uint32_t*>(base);
  p.flags = reinterpret_cast<uint32_t*>(base + flags_at);
  p.partials = reinterpret_cast<float*>(base + partials_at);

  const cudaStream_t stream = current_stream(device);
  check_cuda(cudaMemsetAsync(base, 0, static_cast<size_t>(partials_at), stream), "cudaMemsetAsync");
  const int64_t grid = tpk::min64(p.schedule.workers, facts.multiprocessors * residency.of(plan.tile));
  void* arguments[] = {&p};
  check_cuda(
      cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(grid)),
                       dim3(static_cast<unsigned>(kernel.threads)), arguments, kernel.shared_bytes, stream),
      "The launch of the Stream-K kernel");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) { m.impl("streamk_gemm", TORCH_BOX(&streamk_gemm)); }

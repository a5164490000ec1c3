// torch.ops.tpkernels.streamk_gemm on the CPU: checks, plan, executor. Stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <new>
#include <optional>
#include <string>

#include "kernels/cpu/gemm.hpp"
#include "ops/cpu_threads.hpp"
#include "ops/gemm_arguments.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::cpu::DType;
using tpk::cpu::MatrixView;
using tpk::ops::GemmArguments;
using tpk::ops::View;

constexpr const char* kOp = "streamk_gemm";

bool is_float(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
         type == ScalarType::Half;
}

DType dtype_of(ScalarType type) {
  return type == ScalarType::Double     ? DType::kFloat64
         : type == ScalarType::Float    ? DType::kFloat32
         : type == ScalarType::BFloat16 ? DType::kBFloat16
                                        : DType::kFloat16;
}

const tpk::ops::GemmRules& rules() {
  static const tpk::ops::GemmRules rules{kOp,
                                         "CPU",
                                         aoti_torch_device_type_cpu(),
                                         is_float,
                                         is_float,
                                         "float64, float32, bfloat16 or float16",
                                         "float64, float32, bfloat16 or float16"};
  return rules;
}

// Nothing if there is no such tensor. A lone column counts as contiguous.
MatrixView matrix_of(const View& t) {
  MatrixView m;
  if (!t.exists()) return m;
  m.data = t.data;
  m.dtype = dtype_of(t.type);
  const int64_t first = 3 - t.dim;
  for (int64_t i = 0; i < t.dim; ++i) m.stride[first + i] = t.stride(i);
  if (t.sizes[t.dim - 1] <= 1) m.stride[2] = 1;
  return m;
}

std::chrono::milliseconds timeout() {
  return std::chrono::milliseconds(static_cast<int64_t>(tpk::ops::timeout_seconds(600.0) * 1e3));
}

void streamk_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& preact, const std::string& activation, bool accumulate,
                  const std::string& schedule, int64_t workers, int64_t splits, const std::string& tile,
                  const std::optional<Tensor>& gate, const std::optional<Tensor>& residual, double alpha,
                  int64_t multiprocessors, bool /*allow_tf32*/) {
  const GemmArguments g = tpk::ops::check_gemm(rules(), a, b, bias, out, preact, gate, residual, workers,
                                               splits, multiprocessors);
  tpk::cpu::GemmArgs args;
  args.problem = g.problem;
  args.a = matrix_of(g.a);
  args.b = matrix_of(g.b);
  args.gate = matrix_of(g.gate);
  // Nothing is read when K = 0, an empty tensor may have no address, and null means no gate.
  if (g.gate.exists() && g.problem.k == 0) args.gate.data = g.out.data;
  args.bias = matrix_of(g.bias);
  args.residual = matrix_of(g.residual);
  args.out = matrix_of(g.out);
  args.preact = matrix_of(g.preact);
  args.alpha = alpha;
  args.activation = tpk::ops::parse_activation(kOp, activation);
  args.accumulate = accumulate;
  if (g.out.is_empty()) return;

  tpk::cpu::ExecutorOptions options;
  options.threads = tpk::ops::cpu_threads(multiprocessors);
  options.timeout = timeout();
  options.launch = [](int64_t threads, const std::function<void()>& body) {
    // torch's own pool: its threads are awake. Inside another parallel region it runs body() once, which is
    // enough: tickets make a plan finish with any number of threads.
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
  };
  const tpk::Plan plan = tpk::ops::cpu_plan(kOp, g.problem, schedule, workers, splits, tile, multiprocessors);
  try {
    tpk::cpu::streamk_gemm(args, plan, options);
  } catch (const std::bad_alloc&) {
    TPK_REQUIRE(false, kOp, ": there is no memory for ", plan.schedule.num_slots, " partial tiles of ",
                plan.tile.bm, " x ", plan.tile.bn, g.gate.exists() ? " and a copy of the output" : "",
                ": take fewer splits, or schedule 'hybrid_first'.");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CPU, m) { m.impl("streamk_gemm", TORCH_BOX(&streamk_gemm)); }

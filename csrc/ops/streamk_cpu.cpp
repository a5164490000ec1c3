// torch.ops.tpkernels.streamk_gemm on the CPU: checks, plan, executor. Stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/gemm.hpp"
#include "ops/cpu_threads.hpp"
#include "ops/gemm_arguments.hpp"
#include "ops/grouped_arguments.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::cpu::DType;
using tpk::cpu::MatrixView;
using tpk::ops::GemmArguments;
using tpk::ops::GroupedArguments;
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

// The product with its plan.
void run(const char* op, const tpk::cpu::GemmArgs& args, const std::string& schedule, int64_t workers,
         int64_t splits, const std::string& tile, int64_t multiprocessors) {
  tpk::cpu::ExecutorOptions options;
  options.threads = tpk::ops::cpu_threads(multiprocessors);
  options.timeout = timeout();
  options.launch = [](int64_t threads, const std::function<void()>& body) {
    // torch's own pool: its threads are awake. Inside another parallel region it runs body() once, which is
    // enough: tickets make a plan finish with any number of threads.
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
  };
  const tpk::Plan plan =
      tpk::ops::cpu_plan(op, args.problem, schedule, workers, splits, tile, multiprocessors);
  try {
    tpk::cpu::streamk_gemm(args, plan, options);
  } catch (const std::bad_alloc&) {
    TPK_REQUIRE(false, op, ": there is no memory for ", plan.schedule.num_slots, " partial tiles of ",
                plan.tile.bm, " x ", plan.tile.bn,
                args.gate.data != nullptr ? " and a copy of the output" : "",
                ": take fewer splits, or schedule 'hybrid_first'.");
  }
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
  run(kOp, args, schedule, workers, splits, tile, multiprocessors);
}

// m from a row and a matrix of its batch on.
MatrixView part_of(MatrixView m, const View& t, int64_t matrix, int64_t row) {
  if (m.data == nullptr) return m;
  m.data = static_cast<char*>(m.data) + (matrix * m.stride[0] + row * m.stride[1]) * t.element_bytes;
  return m;
}

// A product for each group, on all threads.
void streamk_gemm_grouped(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                          const Tensor& out, const std::optional<Tensor>& preact,
                          const std::string& activation, const std::vector<int64_t>& group_sizes,
                          const std::string& schedule, int64_t workers, int64_t splits,
                          const std::string& tile, int64_t multiprocessors, const std::optional<Tensor>& gate,
                          bool /*allow_tf32*/) {
  tpk::ops::GemmRules rules_of_groups = rules();
  rules_of_groups.op = "streamk_gemm_grouped";
  const GroupedArguments g = tpk::ops::check_grouped(rules_of_groups, a, b, bias, out, preact, gate,
                                                     group_sizes, workers, splits, multiprocessors);
  tpk::cpu::GemmArgs all;
  all.problem = g.problem;
  all.a = matrix_of(g.a);
  all.b = matrix_of(g.b);
  all.gate = matrix_of(g.gate);
  // Nothing is read when K = 0, an empty tensor may have no address, and null means no gate.
  if (g.gate.exists() && g.problem.k == 0) all.gate.data = g.out.data;
  all.bias = matrix_of(g.bias);
  all.out = matrix_of(g.out);
  all.preact = matrix_of(g.preact);
  all.activation = tpk::ops::parse_activation(rules_of_groups.op, activation);
  if (g.out.is_empty()) return;
  tpk::ops::for_each_group(group_sizes, [&](int64_t group, int64_t begin, int64_t rows) {
    tpk::cpu::GemmArgs args = all;
    args.problem.m = rows;
    args.a = part_of(all.a, g.a, 0, begin);
    args.b = part_of(all.b, g.b, group, 0);
    if (g.problem.k > 0) args.gate = part_of(all.gate, g.gate, group, 0);
    args.bias = part_of(all.bias, g.bias, 0, group);
    args.out = part_of(all.out, g.out, 0, begin);
    args.preact = part_of(all.preact, g.preact, 0, begin);
    run(rules_of_groups.op, args, schedule, workers, splits, tile, multiprocessors);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CPU, m) {
  m.impl("streamk_gemm", TORCH_BOX(&streamk_gemm));
  m.impl("streamk_gemm_grouped", TORCH_BOX(&streamk_gemm_grouped));
}

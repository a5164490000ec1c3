// torch.ops.tpkernels.streamk_gemm on the CPU: checks, plan, executor. Stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>

#include "kernels/cpu/gemm.hpp"
#include "ops/arguments.hpp"
#include "ops/cpu_threads.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::cpu::Activation;
using tpk::cpu::DType;
using tpk::cpu::MatrixView;
using tpk::ops::shape_text;

void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> expected,
                 const char* meaning) {
  tpk::ops::check_shape("streamk_gemm", name, t, expected, meaning);
}

DType dtype_of(const char* name, const Tensor& t) {
  TPK_REQUIRE(t.is_cpu(), "streamk_gemm: ", name,
              " must be a CPU tensor like a, but it is on another device.");
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Double) return DType::kFloat64;
  if (type == ScalarType::Float) return DType::kFloat32;
  if (type == ScalarType::BFloat16) return DType::kBFloat16;
  TPK_REQUIRE(type == ScalarType::Half, "streamk_gemm: ", name,
              " must be float64, float32, bfloat16 or float16, but it is ", type, ": convert it.");
  return DType::kFloat16;
}

// Strides in elements; that of a dimension of one element does not matter, whatever it says.
MatrixView view(const char* name, const Tensor& t) {
  MatrixView v{t.data_ptr(), dtype_of(name, t), {0, 0, 0}};
  const int64_t first = 3 - t.dim();
  for (int64_t i = 0; i < t.dim(); ++i) v.stride[first + i] = t.size(i) > 1 ? t.stride(i) : first + i == 2;
  return v;
}

MatrixView output_view(const char* name, const Tensor& t) {
  for (int64_t i = 0; i < t.dim(); ++i) {
    TPK_REQUIRE(t.size(i) <= 1 || t.stride(i) != 0, "streamk_gemm: ", name,
                " must have memory for every element, but its stride along dimension ", i,
                " is 0: pass a tensor that was not expanded.");
  }
  return view(name, t);
}

Activation parse_activation(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TPK_REQUIRE(name == "gelu_tanh",
              "streamk_gemm: activation must be one of none, relu, silu, gelu or gelu_tanh, but it is '",
              name, "'.");
  return Activation::kGeluTanh;
}

std::chrono::milliseconds timeout() {
  return std::chrono::milliseconds(static_cast<int64_t>(tpk::ops::timeout_seconds(600.0) * 1e3));
}

void streamk_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& preact, const std::string& activation, bool accumulate,
                  const std::string& schedule, int64_t workers, int64_t splits, const std::string& tile) {
  TPK_REQUIRE(a.dim() == 3, "streamk_gemm: a must have shape [batch, M, K], but it has shape ", shape_text(a),
              ".");
  TPK_REQUIRE(b.dim() == 3, "streamk_gemm: b must have shape [batch, K, N], but it has shape ", shape_text(b),
              ".");
  tpk::cpu::GemmArgs args;
  args.problem = {a.size(1), b.size(2), a.size(2), a.size(0)};
  const tpk::Problem& p = args.problem;
  check_shape("b", b, {p.batch, p.k, p.n}, "[batch, K, N] (batch and K as in a)");
  check_shape("out", out, {p.batch, p.m, p.n}, "[batch, M, N]");
  args.a = view("a", a);
  args.b = view("b", b);
  TPK_REQUIRE(args.a.dtype == args.b.dtype, "streamk_gemm: b must have the dtype of a, ", a.scalar_type(),
              ", but it is ", b.scalar_type(), ": convert one of them.");
  args.out = output_view("out", out);
  if (bias.has_value()) {
    check_shape("bias", *bias, {p.n}, "[N]");
    args.bias = view("bias", *bias);
  }
  if (preact.has_value()) {
    check_shape("preact", *preact, {p.batch, p.m, p.n}, "[batch, M, N]");
    args.preact = output_view("preact", *preact);
    TPK_REQUIRE(args.preact.dtype == args.out.dtype, "streamk_gemm: preact must have the dtype of out, ",
                out.scalar_type(), ", but it is ", preact->scalar_type(), ".");
  }
  const auto check_separate = [&](const char* name, const Tensor& t, const char* other,
                                  const Tensor& written) {
    tpk::ops::check_separate("streamk_gemm", name, t, other, written);
  };
  check_separate("a", a, "out", out);
  check_separate("b", b, "out", out);
  if (bias.has_value()) check_separate("bias", *bias, "out", out);
  if (preact.has_value()) {
    check_separate("out", out, "preact", *preact);
    check_separate("a", a, "preact", *preact);
    check_separate("b", b, "preact", *preact);
  }
  args.activation = parse_activation(activation);
  args.accumulate = accumulate;
  if (p.batch == 0 || p.m == 0 || p.n == 0) return;

  tpk::cpu::ExecutorOptions options;
  options.threads = tpk::ops::cpu_threads();
  options.timeout = timeout();
  options.launch = [](int64_t threads, const std::function<void()>& body) {
    // torch's own pool: its threads are awake. Inside another parallel region it runs body() once, which is
    // enough: tickets make a plan finish with any number of threads.
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
  };
  const tpk::Plan plan = tpk::ops::cpu_plan("streamk_gemm", p, schedule, workers, splits, tile);
  try {
    tpk::cpu::streamk_gemm(args, plan, options);
  } catch (const std::bad_alloc&) {
    TPK_REQUIRE(false, "streamk_gemm: there is no memory for ", plan.schedule.num_slots, " partial tiles of ",
                plan.tile.bm, " x ", plan.tile.bn, ": take fewer splits, or schedule 'hybrid_first'.");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CPU, m) { m.impl("streamk_gemm", TORCH_BOX(&streamk_gemm)); }

// The CPU Stream-K executor: threads take tickets and follow a schedule literally, as CTAs do.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "host/plan.hpp"
#include "kernels/gemm_types.hpp"

namespace tpk::cpu {

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };
using tpk::Activation;

// A batch of matrices with any strides, in elements; [batch, rows, columns].
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride[3] = {0, 0, 0};
};

// out = activation(alpha a b + bias) [+ residual] [+ out], or, where there is a gate,
// out = activation(alpha a gate) * (alpha a b) [+ residual] [+ out]: see kernels/gemm_call.hpp. a, b and gate
// have one dtype; sums are fp32, or fp64 if that dtype is. data of the optional ones may be null.
struct GemmArgs {
  Problem problem;
  MatrixView a;         // [batch, m, k]
  MatrixView b;         // [batch, k, n]
  MatrixView gate;      // [batch, k, n]; without bias and preact
  MatrixView bias;      // [n] in stride[2]
  MatrixView residual;  // [batch, m, n]; may be out
  MatrixView out;       // [batch, m, n]
  MatrixView preact;    // alpha a b + bias, rounded to its dtype
  double alpha = 1.0;
  Activation activation = Activation::kNone;
  bool accumulate = false;
};

// Runs body() on at most threads threads, and returns when all have returned. One is enough for any plan.
using Launch = std::function<void(int64_t threads, const std::function<void()>& body)>;

// A Launch of std::threads; the calling thread is one of them.
void launch_threads(int64_t threads, const std::function<void()>& body);

struct ExecutorOptions {
  int64_t threads = 1;
  std::chrono::milliseconds timeout{600'000};  // of a wait for another thread's partial
  Launch launch = launch_threads;
};

// Throws std::runtime_error with a sentence if a wait outlasts its timeout.
void streamk_gemm(const GemmArgs& args, const Plan& plan, const ExecutorOptions& options);

// The plan that kind and workers ask for; "auto" is kind = nullptr. workers = 0: one a thread. tile: a name
// such as "64x64x128", "" for the cheapest; std::invalid_argument with a sentence where there is no such
// tile.
Plan plan_gemm(const Problem& problem, const ScheduleKind* kind, int64_t workers, int64_t splits,
               int64_t threads, std::string_view tile = {});

}  // namespace tpk::cpu

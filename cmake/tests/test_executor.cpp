// The CPU executor against a naive product: every kind of schedule, thread count, type, layout and epilogue;
// more workers than threads and more threads than workers; bitwise repeats; a schedule that cannot finish.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/cpu/gemm.hpp"
#include "kernels/cpu/half.hpp"

namespace {

using namespace tpk;
using namespace tpk::cpu;

#if defined(__SANITIZE_THREAD__)
constexpr int kRandomCases = 60;
constexpr int kRepeats = 10;
#else
constexpr int kRandomCases = 500;
constexpr int kRepeats = 100;
#endif

int64_t size_of(DType t) { return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2; }

double get(DType t, const void* p) {
  switch (t) {
    case DType::kFloat64:
      return *static_cast<const double*>(p);
    case DType::kFloat32:
      return *static_cast<const float*>(p);
    case DType::kBFloat16:
      return to_float(*static_cast<const BFloat16*>(p));
    case DType::kFloat16:
      return to_float(*static_cast<const Float16*>(p));
  }
  return 0;
}

void set(DType t, void* p, double x) {
  switch (t) {
    case DType::kFloat64:
      *static_cast<double*>(p) = x;
      break;
    case DType::kFloat32:
      *static_cast<float*>(p) = static_cast<float>(x);
      break;
    case DType::kBFloat16:
      *static_cast<BFloat16*>(p) = convert<BFloat16>(x);
      break;
    case DType::kFloat16:
      *static_cast<Float16*>(p) = convert<Float16>(x);
      break;
  }
}

// A batch of matrices with its own memory, its dimensions in any order, padded; memory between elements is
// NaN.
class Tensor {
 public:
  Tensor(DType dtype, int64_t batch, int64_t rows, int64_t columns, std::mt19937& random, bool fill) {
    view_.dtype = dtype;
    const int64_t extent[3] = {batch, rows, columns};
    int order[3] = {0, 1, 2};
    std::shuffle(order, order + 3, random);
    int64_t elements = 1;
    for (const int dim : order) {
      view_.stride[dim] = elements;
      elements *= extent[dim] + static_cast<int64_t>(random() % 2) * 3;
    }
    bytes_.resize(static_cast<size_t>(max64(1, elements) * size_of(dtype)));
    view_.data = bytes_.data();
    std::fill(bytes_.begin(), bytes_.end(), static_cast<unsigned char>(0xff));  // NaN in all four types
    if (!fill) return;
    std::uniform_real_distribution<double> uniform(-1, 1);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) set(dtype, at(b, i, j), uniform(random));
      }
    }
  }

  void* at(int64_t b, int64_t i, int64_t j) {
    return bytes_.data() +
           (b * view_.stride[0] + i * view_.stride[1] + j * view_.stride[2]) * size_of(view_.dtype);
  }
  double operator()(int64_t b, int64_t i, int64_t j) { return get(view_.dtype, at(b, i, j)); }
  const MatrixView& view() const { return view_; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

 private:
  MatrixView view_;
  std::vector<unsigned char> bytes_;
};

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return std::fmax(x, 0);
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  }
  return x;
}

// Relative to the sum of magnitudes: half a unit in the last place of the output, and fp32 sums.
double tolerance(DType in, DType out) {
  const double rounding[] = {1e-15, 6e-8, 4e-3, 5e-4};
  return rounding[static_cast<int>(out)] * 1.01 + (in == DType::kFloat64 ? 1e-13 : 1e-6);
}

// Any schedule on any tile, so that small problems are split too.
Plan random_plan(const Problem& p, std::mt19937& random) {
  const TileShape tiles[] = {{8, 16, 4}, {24, 8, 16}, {5, 33, 7}, {64, 64, 32}};
  ScheduleOptions o;
  o.workers = 1 + random() % 40;
  o.min_iters = 1 + random() % 3;
  o.splits = 1 + random() % 5;
  const auto kind = static_cast<ScheduleKind>(random() % kNumScheduleKinds);
  return make_plan(p, tiles[random() % 4], kind, o, kCostCpu);
}

// The sum of a b at one place, and of the magnitudes in it.
struct Sum {
  double value = 0;
  double size = 1e-3;
};
Sum multiply(Tensor& a, Tensor& b, int64_t depth, int64_t batch, int64_t i, int64_t j) {
  Sum sum;
  for (int64_t k = 0; k < depth; ++k) {
    const double product = a(batch, i, k) * b(batch, k, j);
    sum.value += product;
    sum.size += std::fabs(product);
  }
  return sum;
}

void check_random_case(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> v) { return v.begin()[random() % v.size()]; };
  const Problem p{pick({0, 1, 3, 17, 64, 100}), pick({0, 1, 5, 40, 130}), pick({0, 1, 6, 32, 100, 250}),
                  pick({0, 1, 1, 1, 3})};
  const auto in = static_cast<DType>(random() % 4);
  const auto out_type = static_cast<DType>(random() % 4);
  const auto bias_type = static_cast<DType>(random() % 4);
  const auto residual_type = static_cast<DType>(random() % 4);
  Tensor a(in, p.batch, p.m, p.k, random, true);
  Tensor b(in, p.batch, p.k, p.n, random, true);
  Tensor gate(in, p.batch, p.k, p.n, random, true);
  Tensor bias(bias_type, 1, 1, p.n, random, true);
  Tensor residual(residual_type, p.batch, p.m, p.n, random, true);
  GemmArgs args;
  args.accumulate = random() % 3 == 0;
  Tensor out(out_type, p.batch, p.m, p.n, random, args.accumulate);
  Tensor old = out;
  Tensor preact(out_type, p.batch, p.m, p.n, random, false);
  args.problem = p;
  args.a = a.view();
  args.b = b.view();
  args.out = out.view();
  args.out.data = out.at(0, 0, 0);
  args.activation = static_cast<Activation>(random() % 5);
  const bool has_gate = random() % 4 == 0;
  const bool has_bias = !has_gate && random() % 2 == 0;
  const bool has_preact = !has_gate && random() % 2 == 0;
  const bool has_residual = random() % 3 == 0;
  const double alpha = random() % 2 == 0 ? 1.0 : -0.75;
  args.alpha = alpha;
  if (has_gate) args.gate = gate.view();
  if (has_residual) args.residual = residual.view();
  if (has_bias) args.bias = bias.view();
  if (has_preact) args.preact = preact.view();
  const Plan plan = random_plan(p, random);
  ExecutorOptions options;
  options.threads = 1 + random() % 12;
  streamk_gemm(args, plan, options);

  const std::string context =
      std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.k) + " batch " +
      std::to_string(p.batch) + " types " + std::to_string(static_cast<int>(in)) +
      std::to_string(static_cast<int>(out_type)) + " activation " +
      std::to_string(static_cast<int>(args.activation)) + " gate, residual " + std::to_string(has_gate) +
      std::to_string(has_residual) + " " + name(plan.kind) + " threads " + std::to_string(options.threads);
  for (int64_t c = 0; c < p.batch; ++c) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        const Sum product = multiply(a, b, p.k, c, i, j);
        const double added = has_bias ? bias(0, 0, j) : 0;
        const double sum = alpha * product.value + added;
        double size = product.size + std::fabs(added);
        double expected = activate(args.activation, sum);
        if (has_gate) {
          const Sum gated = multiply(a, gate, p.k, c, i, j);
          expected = activate(args.activation, alpha * gated.value) * sum;
          size = (size + 1) * (gated.size + 1);
        }
        const double before = args.accumulate ? old(c, i, j) : 0;
        const double kept = has_residual ? residual(c, i, j) : 0;
        expected += kept + before;
        const double bound = tolerance(in, out_type);
        TPK_CHECK(std::fabs(out(c, i, j) - expected) <= bound * (size + std::fabs(before) + std::fabs(kept)),
                  context);
        if (has_preact) TPK_CHECK(std::fabs(preact(c, i, j) - sum) <= bound * size, context);
      }
    }
  }
  // Nothing beside the output is written: put the old values back, and all memory is as before.
  for (int64_t c = 0; c < p.batch; ++c) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) std::memcpy(out.at(c, i, j), old.at(c, i, j), size_of(out_type));
    }
  }
  TPK_CHECK(out.bytes() == old.bytes(), context);
}

// The same plan gives the same bits with any number of threads, every time.
void check_repeats(std::mt19937& random) {
  const Problem p{70, 90, 600, 1};
  Tensor a(DType::kFloat32, 1, p.m, p.k, random, true);
  Tensor b(DType::kFloat32, 1, p.k, p.n, random, true);
  Tensor out(DType::kFloat32, 1, p.m, p.n, random, false);
  GemmArgs args;
  args.problem = p;
  args.a = a.view();
  args.b = b.view();
  args.out = out.view();
  for (const ScheduleKind kind : {ScheduleKind::kStreamK, ScheduleKind::kSplitK, ScheduleKind::kHybridLast}) {
    ScheduleOptions o;
    o.workers = 17;
    o.min_iters = 2;
    o.splits = 4;
    const Plan plan = make_plan(p, {32, 32, 16}, kind, o, kCostCpu);
    TPK_CHECK(plan.schedule.num_slots > 0, name(kind));
    std::vector<unsigned char> first;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      ExecutorOptions options;
      options.threads = 1 + repeat % 20;
      streamk_gemm(args, plan, options);
      if (first.empty()) first = out.bytes();
      TPK_CHECK(out.bytes() == first,
                std::string(name(kind)) + " threads " + std::to_string(options.threads));
    }
  }
}

// A partial that nobody writes ends in a sentence, not in a hang.
void check_bounded_wait(std::mt19937& random) {
  const Problem p{16, 16, 512, 1};
  Tensor a(DType::kFloat32, 1, p.m, p.k, random, true);
  Tensor b(DType::kFloat32, 1, p.k, p.n, random, true);
  Tensor out(DType::kFloat32, 1, p.m, p.n, random, false);
  GemmArgs args;
  args.problem = p;
  args.a = a.view();
  args.b = b.view();
  args.out = out.view();
  ScheduleOptions o;
  o.workers = 3;
  Plan plan = make_plan(p, {16, 16, 16}, ScheduleKind::kStreamK, o, kCostCpu);
  plan.schedule.workers = 2;
  plan.schedule.pieces[0].first_worker = -1;  // ticket 0 takes the second share, the first is nobody's
  ExecutorOptions options;
  options.threads = 2;
  options.timeout = std::chrono::milliseconds(50);
  std::string message;
  try {
    streamk_gemm(args, plan, options);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  TPK_CHECK(message.find("waited for 50 ms for partial 0") != std::string::npos, message);
}

void check_chosen_plans() {
  for (const int64_t threads : {1, 2, 8, 64}) {
    for (const Problem& p :
         {Problem{0, 4, 4}, Problem{1, 1, 0}, Problem{64, 64, 1 << 16}, Problem{2000, 3000, 500}}) {
      const Plan plan = plan_gemm(p, nullptr, 0, 1, threads);
      TPK_CHECK(plan.predicted_us > 0 && plan.schedule.workers >= 1, name(plan.kind));
    }
  }
  const Plan deep = plan_gemm({64, 64, 1 << 16}, nullptr, 0, 1, 8);
  TPK_CHECK(deep.schedule.num_slots > 0, "a deep product on 8 threads is split along K");
}

}  // namespace

int main() {
  std::mt19937 random(20240229);
  for (int i = 0; i < kRandomCases; ++i) check_random_case(random);
  check_repeats(random);
  check_bounded_wait(random);
  check_chosen_plans();
  return tpk::test::result("executor", kRandomCases);
}

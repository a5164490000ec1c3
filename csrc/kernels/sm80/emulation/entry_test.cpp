// Runs the portable kernel's launcher and kernels on the CPU (see cuda.hpp, cuda_runtime_api.h): random calls
// against double, gates among them, with a workspace full of NaN between canaries; refusals and errors.
//   g++ -std=c++20 -O1 -Icsrc/kernels/sm80/emulation -Icsrc csrc/kernels/sm80/emulation/entry_test.cpp
//   -lpthread
//   ./a.out [trials [seed]]
#include "kernels/sm80/emulation/cuda.hpp"
//
#include <string>

#include "kernels/sm80/emulation/arrays.hpp"
#include "kernels/sm80/kernel.cuh"
//
#include "kernels/sm80/entry.cpp"

using namespace tpk;
using namespace tpk::emulation;

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// Memory for one workspace, 16 bytes beyond alignment, NaN, with canaries on both sides.
class Workspace {
 public:
  Allocator allocator() { return {&allocate, this}; }
  int calls() const { return calls_; }
  bool is_intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (memory_.empty()) break;
      if (memory_[begin_ - 1 - i] != 0x5a || memory_[end_ + i] != 0x5a) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static void* allocate(void* context, int64_t bytes) {
    auto* self = static_cast<Workspace*>(context);
    ++self->calls_;
    self->memory_.assign(static_cast<size_t>(bytes) + 512 + 2 * kGuard, 0x5a);
    const auto address = reinterpret_cast<uintptr_t>(self->memory_.data());
    self->begin_ = kGuard + (256 - (address + kGuard) % 256) % 256 + 16;
    self->end_ = self->begin_ + static_cast<size_t>(bytes);
    std::memset(&self->memory_[self->begin_], 0xff, static_cast<size_t>(bytes));
    return &self->memory_[self->begin_];
  }

  int calls_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  std::vector<unsigned char> memory_;
};

GemmOutcome run(const GemmCall& call, const Allocator& allocator, std::string* message) {
  char text[1024] = "";
  launches.clear();
  const GemmOutcome outcome = sm80::run_gemm(call, nullptr, allocator, text, sizeof text);
  *message = text;
  return outcome;
}

GemmCall call_of(Element element, const Array& a, const Array& b, const Array& out) {
  GemmCall c;
  c.problem = {a.rows, b.cols, a.cols, a.batch};
  c.element = element;
  c.a = matrix(a);
  c.b = matrix(b);
  c.out = matrix(out);
  c.multiprocessors = kMultiprocessors;
  c.timeout_ns = 60'000'000'000;
  return c;
}

void trial(int number) {
  const auto memories = {Memory::kRows, Memory::kRows, Memory::kCols, Memory::kRowsOdd, Memory::kStrided};
  const Element factors = pick(kElements);
  const ScalarKind element = kind_of(factors);
  const ScalarKind sums = factors == Element::kFp64 ? ScalarKind::kFp64 : ScalarKind::kFp32;
  const auto batch = pick<int64_t>({1, 1, 2});
  const auto m = pick<int64_t>({1, 65, 140});
  const auto n = pick<int64_t>({1, 7, 64, 133});
  const auto k = pick<int64_t>({0, 9, 64, 200, 330});
  const bool has_gate = between(0, 1) != 0;
  Array a(batch, m, k, element, pick(memories));
  Array b(batch, k, n, element, pick(memories), between(0, 4) == 0);
  Array gate(batch, k, n, element, pick(memories), between(0, 4) == 0);
  Array bias(1, 1, n, pick(kKinds), pick(memories));
  Array residual(batch, m, n, pick(kKinds), pick(memories));
  Array out(batch, m, n, pick(kKinds), pick(memories));
  Array preact(batch, m, n, out.kind, pick(memories));
  for (Array* filled : {&a, &b, &gate, &bias, &residual, &out}) filled->fill();
  Array old(batch, m, n, ScalarKind::kFp64, Memory::kRows);
  old.each([&](int64_t i, int64_t r, int64_t c) { put(old.kind, old.at(i, r, c), out(i, r, c)); });

  GemmCall call = call_of(factors, a, b, out);
  Epilogue epilogue;
  call.alpha = pick({1.0, -0.5});
  epilogue.alpha = call.alpha;
  call.activation = epilogue.activation = static_cast<Activation>(between(0, 4));
  call.accumulate = between(0, 1) != 0;
  if (call.accumulate) epilogue.old = &old;
  if (between(0, 1) != 0) {
    call.residual = matrix(residual);
    epilogue.residual = &residual;
  }
  Array mul(batch, m, n, sums, Memory::kRows);
  if (has_gate) {
    call.gate = matrix(gate);
    Epilogue plain;
    plain.alpha = call.alpha;
    mul.each([&](int64_t i, int64_t r, int64_t c) {
      put(mul.kind, mul.at(i, r, c), expect(a, gate, plain, i, r, c).out);
    });
    epilogue.mul = &mul;
  } else {
    call.bias = matrix(bias);
    call.preact = matrix(preact);
    epilogue.bias = &bias;
  }
  const std::string schedule = pick({"auto", "stream_k", "split_k", "hybrid_last", "hybrid_aligned"});
  const auto shapes = sm80::tile_shapes(factors);
  const auto chosen = static_cast<size_t>(between(-1, static_cast<int64_t>(shapes.size()) - 1));
  const std::string tile = chosen < shapes.size() ? name(shapes[chosen]) : "";
  call.schedule = schedule;
  call.tile = tile;
  call.splits = between(1, 3);
  call.workers = pick<int64_t>({0, 0, 5});
  call.multiprocessors = static_cast<int>(between(1, kMultiprocessors));

  const std::string context = "trial " + std::to_string(number) + (has_gate ? " gated " : " ") + schedule +
                              " element " + std::to_string(static_cast<int>(factors)) + " m, n, k " +
                              std::to_string(m) + " " + std::to_string(n) + " " + std::to_string(k);
  Workspace workspace;
  std::string message;
  const GemmOutcome outcome = run(call, workspace.allocator(), &message);
  check(outcome == GemmOutcome::kDone && message.empty(), context + ": " + message);
  check(launches.size() == (has_gate ? 2 : 1), context + ": launches");
  bool is_cut = false;
  for (const LaunchRecord& l : launches) {
    is_cut |= l.mark != 0;
    // split_k has a CTA for every part of a tile.
    if (schedule != "split_k")
      check(l.grid <= (call.workers > 0 ? call.workers : call.multiprocessors * kResident),
            context + ": grid");
  }
  check(launches[0].mark == 0 || launches[0].mark != launches.back().mark || !has_gate, context + ": marks");
  // Memory for what CTAs tell each other, and for a gate's product; none where there is neither.
  check(workspace.calls() == (has_gate || is_cut) && workspace.is_intact(), context + ": workspace");
  int64_t wrong = out.overwritten() + preact.overwritten();
  out.each([&](int64_t i, int64_t r, int64_t c) {
    const Expected want = expect(a, b, epilogue, i, r, c);
    const auto close = [&](double got, double wanted) {
      return std::abs(got - wanted) <=
             sum_error(factors) * (want.size + 1) + 1.01 * rounding(out.kind) * (std::abs(wanted) + 0.01);
    };
    if (!has_gate) wrong += !close(preact(i, r, c), want.preact);
    wrong += !close(out(i, r, c), want.out);
  });
  check(wrong == 0, context + ": " + std::to_string(wrong) + " wrong");
}

void check_what_is_not_done() {
  Array a(1, 20, 30, ScalarKind::kBf16, Memory::kRows);
  Array b(1, 30, 40, ScalarKind::kBf16, Memory::kRows);
  Array out(1, 20, 40, ScalarKind::kBf16, Memory::kRows);
  const auto expect_message = [&](const GemmCall& call, const Allocator& allocator, GemmOutcome outcome,
                                  const std::string& part) {
    std::string message;
    check(run(call, allocator, &message) == outcome, "outcome of: " + part);
    check(message.find(part) != std::string::npos, message + " does not say: " + part);
    check(launches.empty() && out.overwritten() == 0, "nothing is launched: " + part);
  };
  Workspace workspace;
  GemmCall call = call_of(Element::kBf16, a, b, out);
  const GemmHooks hooks;
  call.hooks = &hooks;
  expect_message(call, workspace.allocator(), GemmOutcome::kRefused, "has no hooks");
  call.hooks = nullptr;
  call.tile = "64x64x31";
  expect_message(call, workspace.allocator(), GemmOutcome::kFailed,
                 "tile must be 128x256x32, 128x128x32 or 64x64x32");
  call.tile = "";
  call.schedule = "magic";
  expect_message(call, workspace.allocator(), GemmOutcome::kFailed, "schedule must be one of");
  call.schedule = "split_k";
  call.splits = 2;
  call.problem.k = 4096;  // enough to cut
  const Allocator none{[](void*, int64_t) -> void* { return nullptr; }, nullptr};
  expect_message(call, none, GemmOutcome::kFailed, "there is no memory for a workspace of");
  call.problem.k = (int64_t{1} << 35) + 1;
  expect_message(call, workspace.allocator(), GemmOutcome::kFailed, "K must not exceed 2^35");
  check(workspace.calls() == 0, "nothing is allocated before an error");
}

}  // namespace

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 40;
  random_numbers.seed(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
  run_kernel = [](const void* kernel, int grid, int threads, void** arguments) {
    const auto function = reinterpret_cast<void (*)(sm80::GemmParams)>(const_cast<void*>(kernel));
    const auto& params = *static_cast<const sm80::GemmParams*>(arguments[0]);
    launches.back().mark = params.mark;
    launch(grid, threads, [&] { function(params); });
  };
  for (int i = 0; i < trials; ++i) trial(i);
  check_what_is_not_done();
  std::printf("sm80 launcher on the CPU: %d trials, %d failures.\n", trials, failures);
  return failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

// Runs the portable kernel's own sources on the CPU (see cuda.hpp) over random problems and compares with
// double: loaders, main loop, fix-up, epilogue and scheduler, inputs surrounded by NaN, outputs by canaries,
// slots full of NaN.
//   g++ -std=c++20 -O2 -Icsrc/kernels/sm80/emulation -Icsrc csrc/kernels/sm80/emulation/kernel_test.cpp
//   -lpthread
//   ./a.out [trials [seed]]
// The include path of the emulation must come before csrc: some headers there stand in for the real ones.
#include "kernels/sm80/emulation/cuda.hpp"
//
#include <span>
#include <string>

#include "host/plan.hpp"
#include "kernels/sm80/emulation/arrays.hpp"
#include "kernels/sm80/kernel.cuh"
#include "kernels/sm80/operands.hpp"

using namespace tpk;
using namespace tpk::emulation;
using namespace tpk::sm80;

namespace {

using Kernel = void (*)(GemmParams);

template <class Tile>
Kernel find(OperandLayout a, OperandLayout b) {
  constexpr auto kK = OperandLayout::kKMajor;
  constexpr auto kOuter = OperandLayout::kOuterMajor;
  constexpr auto kAny = OperandLayout::kStrided;
  if (a == kAny || b == kAny) return &streamk_gemm_kernel<Tile, kAny, kAny>;
  if (a == kK && b == kK) return &streamk_gemm_kernel<Tile, kK, kK>;
  if (a == kK) return &streamk_gemm_kernel<Tile, kK, kOuter>;
  if (b == kK) return &streamk_gemm_kernel<Tile, kOuter, kK>;
  return &streamk_gemm_kernel<Tile, kOuter, kOuter>;
}

// One random problem; the number of wrong results.
template <class Tile>
int64_t trial() {
  constexpr Element kElement = Tile::kElement;
  using Sum = typename Tile::Sum;
  const ScalarKind element = kind_of(kElement);
  const ScalarKind sum_kind = sizeof(Sum) == 8 ? ScalarKind::kFp64 : ScalarKind::kFp32;
  const auto memories = {Memory::kRows, Memory::kRows,    Memory::kCols,
                         Memory::kCols, Memory::kRowsOdd, Memory::kStrided};
  const auto batch = pick<int64_t>({1, 1, 1, 2, 3});
  const auto m = pick<int64_t>({1, 5, 64, 100, 129, 200});
  const auto n = pick<int64_t>({1, 3, 40, 64, 128, 131, 264});
  const auto k = pick<int64_t>({0, 1, 7, 32, 33, 100, 160, 300, 520});
  const ScalarKind out_kind = pick(kKinds);
  const ScalarKind bias_kind = pick(kKinds);
  const bool has_mul = between(0, 3) == 0;  // a gate, whose product is here already
  const bool has_bias = !has_mul && between(0, 1) != 0;
  const bool has_preact = !has_mul && between(0, 1) != 0;
  const int residual_is = static_cast<int>(between(0, 3));  // 1 a matrix, 2 the output itself, else none

  Array a(batch, m, k, element, pick(memories), between(0, 4) == 0);
  Array b(batch, k, n, element, pick(memories), between(0, 4) == 0);
  Array bias(1, 1, n, bias_kind, pick(memories));
  Array out(batch, m, n, out_kind, pick(memories));
  Array preact(batch, m, n, out_kind, pick(memories));
  Array residual(batch, m, n, pick(kKinds), pick(memories), between(0, 4) == 0);
  Array mul(batch, m, n, sum_kind, pick(memories));
  for (Array* filled : {&a, &b, &bias, &residual, &mul}) filled->fill();

  GemmParams p;
  p.problem = {m, n, k, batch};
  const auto [operand_a, layout_a] = read_left(matrix(a), kElement, p.problem);
  const auto [operand_b, layout_b] = read_right(matrix(b), kElement, p.problem);
  p.a = operand_a;
  p.b = operand_b;
  p.out = read_output(matrix(out), kElement, p.problem);
  if (has_preact) p.preact = read_output(matrix(preact), kElement, p.problem);
  if (has_mul) p.mul = read_output(matrix(mul), kElement, p.problem);
  if (has_bias) p.bias = bias.first;
  p.bias_stride = n > 1 ? bias.col_stride * bias.bytes : 0;
  p.bias_kind = bias_kind;
  p.out_kind = out_kind;
  p.alpha = pick({1.0, 1.0, 0.0, -0.37, 2.5});
  p.activation = static_cast<Activation>(between(0, 4));
  p.accumulate = between(0, 1) != 0;
  const Array* const residual_from = residual_is == 1 ? &residual : residual_is == 2 ? &out : nullptr;
  if (p.accumulate || residual_from == &out) out.fill();
  if (residual_from != nullptr) {
    p.residual = read_output(matrix(*residual_from), kElement, p.problem);
    p.residual_kind = residual_from->kind;
  }
  Array old(batch, m, n, out_kind, Memory::kRows);
  old.each([&](int64_t i, int64_t r, int64_t c) { put(out_kind, old.at(i, r, c), out(i, r, c)); });

  const std::string schedule =
      pick({"auto", "data_parallel", "stream_k", "stream_k", "split_k", "hybrid_first", "hybrid_last",
            "own_first", "every_shard", "hybrid_aligned"});
  const TileShape shape{Tile::kBM, Tile::kBN, Tile::kBK};
  ScheduleOptions options;
  options.workers = between(1, 9);
  options.splits = between(1, 4);
  options.min_iters = between(1, 4);
  const Plan plan = schedule == "auto"
                        ? choose_plan(p.problem, Machine{options.workers, kCostSm90}, std::span(&shape, 1))
                        : make_plan(p.problem, shape, parse_schedule_kind(schedule), options, kCostSm90);
  p.walk = make_walk(plan.schedule, plan.order);
  p.timeout_ns = 60'000'000'000;
  const int64_t slots = plan.schedule.num_slots;
  p.mark = 0x123456789abcdef0;
  std::vector<uint64_t> flags(static_cast<size_t>(slots), pick<uint64_t>({0, ~uint64_t{0}, p.mark + 1}));
  std::vector<double2> partials(static_cast<size_t>(slots * shape.bm * shape.bn * sizeof(Sum) / 16 + 1));
  std::memset(partials.data(), 0xff, partials.size() * sizeof(double2));  // NaN
  p.only_adds = adds_only(p);
  p.sum_kind = sum_kind;
  p.plain = is_plain(p);
  p.flags = flags.data();
  p.partials = partials.data();
  const auto resident = static_cast<int>(between(1, 4));
  const Kernel kernel = find<Tile>(layout_a, layout_b);
  emulation::launch(p.walk.workers, Tile::kThreads, [&] { kernel(p); }, resident);

  int64_t wrong = out.overwritten() + (has_preact ? preact.overwritten() : 0);
  for (const uint64_t flag : flags) wrong += flag == p.mark;  // a replay would take it for its own
  Epilogue epilogue;
  epilogue.bias = has_bias ? &bias : nullptr;
  epilogue.mul = has_mul ? &mul : nullptr;
  epilogue.residual = residual_from == &out ? &old : residual_from;
  epilogue.old = p.accumulate ? &old : nullptr;
  epilogue.alpha = p.alpha;
  epilogue.activation = p.activation;
  out.each([&](int64_t i, int64_t r, int64_t c) {
    const Expected want = expect(a, b, epilogue, i, r, c);
    const auto close = [&](double got, double wanted) {
      return std::abs(got - wanted) <=
             sum_error(kElement) * (want.size + 1) + 1.01 * rounding(out_kind) * (std::abs(wanted) + 0.01);
    };
    if (has_preact) wrong += !close(preact(i, r, c), want.preact);
    wrong += !close(out(i, r, c), want.out);
  });
  if (wrong > 0) {
    std::printf(
        "%lld wrong: tile %d, element %d, batch %lld, m %lld, n %lld, k %lld, layouts %d %d, out %d, bias "
        "%d, "
        "preact %d, mul %d, residual %d, alpha %g, accumulate %d, activation %d, %s, workers %lld, slots "
        "%lld, "
        "resident %d\n",
        static_cast<long long>(wrong), Tile::kBM, static_cast<int>(kElement), static_cast<long long>(batch),
        static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
        static_cast<int>(layout_a), static_cast<int>(layout_b), static_cast<int>(out_kind), has_bias,
        has_preact, has_mul, residual_is, p.alpha, p.accumulate, static_cast<int>(p.activation),
        schedule.c_str(), static_cast<long long>(p.walk.workers), static_cast<long long>(slots), resident);
  }
  return wrong;
}

// A problem for one of an element's tiles.
template <class... Tiles>
int64_t trial_of(TileSet<Tiles...>) {
  int64_t (*const trials[])() = {&trial<Tiles>...};
  return trials[between(0, sizeof...(Tiles) - 1)]();
}

}  // namespace

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 60;
  random_numbers.seed(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
  int bad = 0;
  for (int i = 0; i < trials; ++i) {
    bad += with_element(pick(kElements), [](auto e) { return trial_of(TilesOf<e.value>{}); }) > 0;
  }
  std::printf("sm80 kernel on the CPU: %d of %d problems wrong.\n", bad, trials);
  return bad > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

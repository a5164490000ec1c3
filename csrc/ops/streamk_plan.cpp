// torch.ops.tpkernels.streamk_plan: what streamk_gemm would do, without doing it. No tensor is involved, so
// it runs on any machine: the plan of a CUDA product needs no GPU.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/sm80/plan.hpp"
#include "ops/cpu_threads.hpp"
#include "ops/sentence.hpp"

namespace {

// device: "cpu", or the architecture whose cost constants count. A CUDA plan assumes the residency of the
// vector kernels; operands that need element loads, and cards with little shared memory, may get another.
std::tuple<std::string, std::vector<int64_t>, double> streamk_plan(
    int64_t batch, int64_t m, int64_t n, int64_t k, const std::string& device, const std::string& schedule,
    int64_t workers, int64_t splits, int64_t multiprocessors, const std::string& tile) {
  const bool sm80 = device == "sm80";
  TPK_REQUIRE(sm80 || device == "cpu" || device == "cuda" || device == "sm90",
              "streamk_plan: device must be 'cpu', 'cuda', 'sm80' or 'sm90', but it is '", device, "'.");
  TPK_REQUIRE(batch >= 0 && m >= 0 && n >= 0 && k >= 0,
              "streamk_plan: batch, m, n and k must not be negative, but they are ", batch, ", ", m, ", ", n,
              " and ", k, ".");
  TPK_REQUIRE(workers >= 0 && multiprocessors >= 0,
              "streamk_plan: workers and multiprocessors must not be negative, but they are ", workers,
              " and ", multiprocessors, ".");
  const tpk::Problem p{m, n, k, batch};
  tpk::Plan plan;
  if (device == "cpu") {
    plan = tpk::ops::cpu_plan("streamk_plan", p, schedule, workers, splits, tile);
  } else {
    const int64_t count = multiprocessors > 0 ? multiprocessors : sm80 ? 108 : 132;
    const tpk::CostConstants& cost = sm80 ? tpk::kCostSm80 : tpk::kCostSm90;
    try {
      plan = tpk::sm80::plan_gemm(p, count, cost, schedule, workers, splits, tile).plan;
    } catch (const std::invalid_argument& error) {
      throw std::runtime_error(tpk::ops::sentence("streamk_plan: ", error.what()));
    }
  }
  const tpk::Schedule& s = plan.schedule;
  std::vector<int64_t> numbers{plan.tile.bm, plan.tile.bn, plan.tile.bk, plan.order.size(),
                               s.k_iters,    s.workers,    plan.splits,  s.num_slots};
  return {tpk::name(plan.kind), std::move(numbers), plan.predicted_us};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("streamk_plan", TORCH_BOX(&streamk_plan));
}

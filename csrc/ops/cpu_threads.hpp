// Threads and plans of CPU ops: one answer for streamk_gemm and streamk_plan.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels/cpu/gemm.hpp"
#include "ops/sentence.hpp"

namespace tpk::ops {

// TPK_NUM_THREADS if it is set, else torch's number of threads (torch.set_num_threads); at most `most` if
// that is not 0.
inline int64_t cpu_threads(int64_t most = 0) {
  const auto bounded = [&](int64_t threads) { return most > 0 ? min64(threads, most) : threads; };
  if (const char* text = std::getenv("TPK_NUM_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long threads = std::strtol(text, &end, 10);
    TPK_REQUIRE(*end == '\0' && threads >= 1 && threads <= 4096,
                "TPK_NUM_THREADS must be a number from 1 to 4096, but it is '", text, "'.");
    return bounded(threads);
  }
  return bounded(torch::stable::get_num_threads());
}

// The plan of a product on the CPU; schedule is a name or "auto", workers = 0 means one per thread, tile is a
// name or "". most_threads > 0 bounds the threads. Plans are kept: with many threads making one takes longer
// than a small product.
inline Plan cpu_plan(const char* op, const Problem& p, const std::string& schedule, int64_t workers,
                     int64_t splits, const std::string& tile, int64_t most_threads = 0) {
  TPK_REQUIRE(workers >= 0, op, ": workers must not be negative (0: one per thread), but it is ", workers,
              ".");
  TPK_REQUIRE(splits >= 1, op, ": splits must be at least 1, but it is ", splits, ".");
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, std::string, int64_t, int64_t, std::string,
                         int64_t, const CostConstants*>;
  static std::mutex mutex;
  static std::map<Key, Plan> plans;
  const int64_t threads = cpu_threads(most_threads);
  const Key key{p.batch, p.m, p.n, p.k, schedule, workers, splits, tile, threads, &cpu_cost.get()};
  const std::lock_guard lock(mutex);
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  constexpr size_t kMostPlans = 4096;
  if (plans.size() >= kMostPlans) plans.clear();
  try {
    const bool automatic = schedule == "auto";
    const ScheduleKind kind = automatic ? ScheduleKind::kDataParallel : parse_schedule_kind(schedule);
    const Plan plan = cpu::plan_gemm(p, automatic ? nullptr : &kind, workers, splits, threads, tile);
    return plans.emplace(key, plan).first->second;
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(sentence(op, ": ", error.what()));
  }
}

}  // namespace tpk::ops

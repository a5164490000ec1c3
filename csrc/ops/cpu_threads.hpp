// Threads and plans of CPU ops: one answer for streamk_gemm and streamk_plan.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/cpu/gemm.hpp"
#include "ops/sentence.hpp"

namespace tpk::ops {

// TPK_NUM_THREADS if it is set, else torch's number of threads (torch.set_num_threads).
inline int64_t cpu_threads() {
  if (const char* text = std::getenv("TPK_NUM_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long threads = std::strtol(text, &end, 10);
    TPK_REQUIRE(*end == '\0' && threads >= 1 && threads <= 4096,
                "TPK_NUM_THREADS must be a number from 1 to 4096, but it is '", text, "'.");
    return threads;
  }
  return torch::stable::get_num_threads();
}

// The plan of a product on the CPU; schedule is a name or "auto", workers = 0 means one per thread.
inline Plan cpu_plan(const char* op, const Problem& p, const std::string& schedule, int64_t workers,
                     int64_t splits) {
  TPK_REQUIRE(workers >= 0, op, ": workers must not be negative (0: one per thread), but it is ", workers,
              ".");
  try {
    if (schedule == "auto") return cpu::plan_gemm(p, nullptr, workers, splits, cpu_threads());
    const ScheduleKind kind = parse_schedule_kind(schedule);
    return cpu::plan_gemm(p, &kind, workers, splits, cpu_threads());
  } catch (const std::invalid_argument& error) {
    TPK_REQUIRE(false, op, ": ", error.what());
    throw;
  }
}

}  // namespace tpk::ops

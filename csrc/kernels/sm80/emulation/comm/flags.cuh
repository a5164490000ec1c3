// comm/flags.cuh on the CPU: the part that the portable kernel uses. See ../cuda.hpp.
#pragma once

#include <chrono>

#include "../../../../comm/flags.cuh"  // the real one: what needs no device

namespace tpk::comm {

inline u64 now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace tpk::comm

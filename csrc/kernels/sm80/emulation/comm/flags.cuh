// comm/flags.cuh on the CPU: the part that the portable kernel uses. See ../cuda.hpp.
#pragma once

#include <chrono>

#include "kernels/sm80/emulation/cuda.hpp"

namespace tpk::comm {

using u32 = unsigned int;
using u64 = unsigned long long;
enum class Scope { kGpu, kSys };

template <Scope>
void store_release(u32* flag, u32 v) {
  __atomic_store_n(flag, v, __ATOMIC_RELEASE);
}

inline u32 take_ticket(u32* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED); }

template <Scope>
bool wait_epoch(const u32* flag, u32 expected, u64 timeout_ns, u32* seen) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  do {
    *seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    if (static_cast<int>(*seen - expected) >= 0) return true;
    emulation::yield();
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace tpk::comm

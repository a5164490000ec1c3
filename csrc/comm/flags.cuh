// Flags: words through which CTAs, and ranks, tell each other that data is ready.
//
// A flag carries a 32-bit epoch that only grows (modulo 2^32) and is never reset while anyone may wait on
// it. Epochs are compared by signed difference, so wrap-around is harmless as long as a waiter is fewer
// than 2^31 epochs behind.
//
// Self-contained: compiles under nvcc and NVRTC with no other header. Needs sm_70 or newer. A C++ compiler
// without CUDA sees what needs no device: scopes, the comparison of epochs, and patience.
#pragma once

#if defined(__CUDACC__)
#define TPK_COMM_HD __host__ __device__ __forceinline__
#else
#define TPK_COMM_HD inline
#endif

namespace tpk::comm {

using u32 = unsigned int;
using u64 = unsigned long long;

// Who must see the effect: threads of this GPU, or also those of other GPUs and the host.
enum class Scope { kGpu, kSys };

// True when epoch seen is expected or later.
TPK_COMM_HD bool epoch_reached(u32 seen, u32 expected) { return static_cast<int>(seen - expected) >= 0; }

// How long a wait may still last, by a clock that may jump: profilers set %globaltimer anew, which must
// neither end a wait at once nor make it last for ever. Time between two looks counts for kMostPerLook at
// most, and for nothing if the clock went back. So a wait is never cut short by more than that, and lasts
// longer only where it was not looking: while its CTA was off the multiprocessor.
struct Patience {
  static constexpr u64 kMostPerLook = 50000000;  // ns

  u64 left;  // ns
  u64 seen;  // the clock, at the last look

  TPK_COMM_HD Patience(u64 timeout_ns, u64 now) : left(timeout_ns), seen(now) {}

  // Looks at the clock. True: timeout_ns have passed.
  TPK_COMM_HD bool ends(u64 now) {
    const u64 gone = now - seen;  // modulo 2^64: more than half of that is a step back
    seen = now;
    const u64 counts = gone >> 63 != 0 ? 0 : gone < kMostPerLook ? gone : kMostPerLook;
    left -= counts < left ? counts : left;
    return left == 0;
  }
};

#if defined(__CUDACC__)

// Stores v. All memory operations of this thread that come before it, and those of other threads that
// were ordered before it by a barrier (__syncthreads), are visible to whoever reads v with load_acquire at
// the same or a wider scope. The store itself is one word: never torn. One writer per flag.
template <Scope kScope>
__device__ __forceinline__ void store_release(u32* flag, u32 v) {
  if constexpr (kScope == Scope::kGpu) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
  } else {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
  }
}

// Adds v atomically, with the ordering of store_release; any number of writers. A reader that acquires the
// sum is ordered after every addition that went into it, not only the last one.
template <Scope kScope>
__device__ __forceinline__ void add_release(u32* flag, u32 v) {
  if constexpr (kScope == Scope::kGpu) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
  } else {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
  }
}

// Loads the flag. Memory operations of this thread that come after it, and those of other threads ordered
// after it by a barrier, see everything that was released with the value read. It does NOT order
// earlier operations of this thread, and gives no ordering for data read through the async proxy (TMA):
// that also needs fence.proxy.async.
template <Scope kScope>
__device__ __forceinline__ u32 load_acquire(const u32* flag) {
  u32 v;
  if constexpr (kScope == Scope::kGpu) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  } else {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  }
  return v;
}

// Takes the next number of a counter: unique and dense over all callers. Orders nothing (relaxed).
__device__ __forceinline__ u32 take_ticket(u32* counter) {
  u32 v;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// Adds v atomically and returns what was there. Ordered both ways: as add_release before, as load_acquire
// after.
__device__ __forceinline__ u32 add_acq_rel(u32* counter, u32 v) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(v)
               : "memory");
  return before;
}

// Sets bits atomically, with the ordering of add_acq_rel, and returns those that were set.
__device__ __forceinline__ u64 set_bits(u64* word, u64 bits) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(word), "l"(bits)
               : "memory");
  return before;
}

// Loads a word that others write, and orders nothing (relaxed).
__device__ __forceinline__ u32 load_relaxed(const u32* word) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}

// Nanoseconds of a clock that all SMs of a device share and that runs on while a CTA is preempted. It may
// jump: measure waits with Patience.
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Waits until reached(the flag's value), for at most timeout_ns. One thread calls it. True: reached, with the
// ordering of load_acquire for the value that was read; to pass that on to other threads of the CTA, follow
// with a barrier. False: time is up, nothing is ordered, the data must not be used; *seen (if given) holds
// the last value read. The caller reports: this function never traps.
template <Scope kScope, class Reached>
__device__ __forceinline__ bool wait_word(const u32* flag, Reached reached, u64 timeout_ns,
                                          u32* seen = nullptr) {
  u32 v = load_acquire<kScope>(flag);
  bool there = reached(v);
  if (!there) {
    Patience patience(timeout_ns, now_ns());
    bool late;
    do {
      __nanosleep(20);
      late = patience.ends(now_ns());  // then one more look: this CTA may have been off the multiprocessor
      v = load_acquire<kScope>(flag);
      there = reached(v);
    } while (!there && !late);
  }
  if (seen != nullptr) *seen = v;
  return there;
}

// wait_word until the flag's epoch is expected or later.
template <Scope kScope>
__device__ __forceinline__ bool wait_epoch(const u32* flag, u32 expected, u64 timeout_ns,
                                           u32* seen = nullptr) {
  return wait_word<kScope>(flag, [expected](u32 v) { return epoch_reached(v, expected); }, timeout_ns, seen);
}

// Waits (bounded, as wait_epoch, GPU scope) until all of `bits` are set in the word; *seen: the last value
// read.
__device__ __forceinline__ bool wait_bits(const u64* word, u64 bits, u64 timeout_ns, u64* seen) {
  const auto all_set = [&] {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(*seen) : "l"(word) : "memory");
    return (*seen & bits) == bits;
  };
  if (all_set()) return true;
  Patience patience(timeout_ns, now_ns());
  bool late;
  do {
    __nanosleep(20);
    late = patience.ends(now_ns());  // then one more look
    if (all_set()) return true;
  } while (!late);
  return false;
}

// The memory of host/protocol.hpp and host/all_reduce.hpp on a device.
struct DeviceMemory {
  u64 timeout_ns;

  template <Scope kScope>
  __device__ __forceinline__ u32 load_acquire(const u32* word) const {
    return comm::load_acquire<kScope>(word);
  }
  template <Scope kScope>
  __device__ __forceinline__ void store_release(u32* word, u32 v) const {
    comm::store_release<kScope>(word, v);
  }
  __device__ __forceinline__ void store_relaxed(u32* word, u32 v) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
  }
  __device__ __forceinline__ u32 add_acq_rel(u32* word, u32 v) const { return comm::add_acq_rel(word, v); }
  __device__ __forceinline__ u32 take_ticket(u32* counter) const { return comm::take_ticket(counter); }
  template <Scope kScope>
  __device__ __forceinline__ bool wait_epoch(const u32* flag, u32 expected, u32* seen) const {
    return comm::wait_epoch<kScope>(flag, expected, timeout_ns, seen);
  }
};

#endif  // __CUDACC__

}  // namespace tpk::comm

#undef TPK_COMM_HD

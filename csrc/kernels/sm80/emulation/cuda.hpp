// Enough of CUDA C++ for the portable kernel's sources to run on the CPU: a CTA is an OS thread, its CUDA
// threads are fibers of that thread. Included before everything else; kernels/sm80/ptx.cuh and comm/flags.cuh
// beside this file replace the real ones. Slow, single-minded, and strict: cp.async lands as late as it may,
// addresses are checked, shared memory starts as NaN.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local  // one CTA per OS thread

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct double2 {
  double x, y;
};
struct uint2 {
  uint32_t x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline void __stcg(float4* p, float4 v) { *p = v; }
inline void __stcg(double2* p, double2 v) { *p = v; }
inline float4 __ldcg(const float4* p) { return *p; }
inline double2 __ldcg(const double2* p) { return *p; }
using std::erf;
using std::exp;
using std::tanh;

namespace tpk::emulation {

[[noreturn]] inline void fail(const char* what) {
  std::printf("EMULATION: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

struct Copy {  // a cp.async under way
  uint32_t shared;
  const void* global;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(128 * 1024);
  int thread = 0;
  bool done = false;
  int64_t cta_barriers = 0;
  int64_t warp_barriers = 0;
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups;
};

constexpr int kWarps = 8;
inline bool checks_banks = false;  // whether accesses to shared memory may have no bank conflict

struct Cta {
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  ucontext_t scheduler;
  std::function<void()> kernel;
  int block = 0;
  alignas(1024) unsigned char shared[160 * 1024];
  // What the lanes of a warp tell each other in a collective instruction.
  uint32_t address[kWarps][32];
  double a[kWarps][16][16];
  double b[kWarps][16][8];
};

inline thread_local Cta* cta = nullptr;

inline Fiber& self() { return *cta->current; }
inline int warp() { return self().thread / 32; }
inline int lane() { return self().thread % 32; }
inline void yield() { swapcontext(&self().context, &cta->scheduler); }

// Waits until fibers first ... first + count - 1 have come to this barrier too (or have left the kernel).
inline void barrier(int64_t Fiber::* counter, int first, int count) {
  const int64_t target = ++(self().*counter);
  for (int i = first; i < first + count;) {
    const Fiber& other = cta->fibers[static_cast<size_t>(i)];
    if (other.done || other.*counter >= target) {
      ++i;
    } else {
      yield();
    }
  }
}
inline void sync_warp() { barrier(&Fiber::warp_barriers, warp() * 32, 32); }

// All lanes of a warp access `size` bytes each at these shared addresses, in turns of 128 bytes: in one turn
// different addresses must lie in different banks.
inline void check_banks(const uint32_t* address, uint32_t size) {
  const uint32_t lanes = 128 / size;
  for (uint32_t turn = 0; turn < 32; turn += lanes) {
    for (uint32_t i = turn; i < turn + lanes; ++i) {
      for (uint32_t j = turn; j < i; ++j) {
        if (address[i] != address[j] && address[i] / size % lanes == address[j] / size % lanes)
          fail("a bank conflict");
      }
    }
  }
}
inline void sync_cta() { barrier(&Fiber::cta_barriers, 0, static_cast<int>(cta->fibers.size())); }

// One lane's part of that, as all lanes come here.
inline void check_banks_of_lane(uint32_t address, uint32_t size) {
  if (!checks_banks) return;
  auto& all = cta->address[warp()];
  all[lane()] = address;
  sync_warp();
  check_banks(all, size);
  sync_warp();
}

struct Index {
  int x;
};
inline Index thread_index() { return {self().thread}; }
inline Index block_index() { return {cta->block}; }

inline void fiber_main() {
  cta->kernel();
  self().done = true;
  yield();
}

// Runs one CTA.
inline void run_cta(int block, int threads, const std::function<void()>& kernel) {
  cta->kernel = kernel;
  cta->block = block;
  std::memset(cta->shared, 0xff, sizeof cta->shared);
  cta->fibers = std::vector<Fiber>(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    Fiber& f = cta->fibers[static_cast<size_t>(i)];
    f.thread = i;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, &fiber_main, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (Fiber& f : cta->fibers) {
      if (f.done) continue;
      running = true;
      cta->current = &f;
      swapcontext(&cta->scheduler, &f.context);
    }
  }
}

// Runs kernel() as grid CTAs of `threads` threads: `resident` at a time, which start in the order of their
// numbers, each when one before it has ended.
inline void launch(int grid, int threads, const std::function<void()>& kernel, int resident = 8) {
  std::atomic<int> next{0};
  std::vector<std::thread> places;
  for (int i = 0; i < resident; ++i) {
    places.emplace_back([&] {
      const auto owner = std::make_unique<Cta>();
      cta = owner.get();
      for (int block = next++; block < grid; block = next++) run_cta(block, threads, kernel);
    });
  }
  for (std::thread& place : places) place.join();
}

}  // namespace tpk::emulation

[[noreturn]] inline void __trap() { tpk::emulation::fail("the kernel trapped"); }
inline void __syncthreads() { tpk::emulation::sync_cta(); }
inline void __nanosleep(unsigned) {
  tpk::emulation::yield();
  std::this_thread::yield();
}
#define threadIdx (tpk::emulation::thread_index())
#define blockIdx (tpk::emulation::block_index())

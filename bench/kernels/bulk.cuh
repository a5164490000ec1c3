// Bulk copies (cp.async.bulk) between global memory, a peer's included, and shared memory, and the mbarriers
// that tell when loads have landed. sm_90 and newer. Shared memory is named by its 32-bit address.
//
// Self-contained: compiles under nvcc and NVRTC. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "comm/flags.cuh"

namespace tpk::bench {

using comm::u32;
using comm::u64;

// What the launch asked for, aligned to 128 bytes.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// One thread arrives once a phase. Follow all initialisations with fence_barrier_init.
__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Initialised barriers are visible to the copies that this thread starts.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// The phase ends when `bytes` more bytes have landed.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, "
      "p;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the phase of this parity, for at most timeout_ns. False: time is up.
__device__ __forceinline__ bool barrier_wait(u32 barrier, u32 parity, u64 timeout_ns) {
  if (barrier_test(barrier, parity)) return true;
  const u64 start = comm::now_ns();
  while (!barrier_test(barrier, parity)) {
    if (comm::now_ns() - start >= timeout_ns) return barrier_test(barrier, parity);
  }
  return true;
}

// Global to shared; counts its bytes at the barrier when they have landed.
__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared to global, in the group that the next bulk_commit closes.
__device__ __forceinline__ void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Shared memory of all groups of this thread but the latest kPending may be overwritten.
template <u32 kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All stores of this thread are done, and ordered before its later fences and releases.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace tpk::bench

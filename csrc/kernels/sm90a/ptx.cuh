// The instructions of sm_90a that the kernel uses, by the names it uses them under. wgmma, TMA and barriers
// come from CUTLASS's arch-level headers; the few that it lacks are written here.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>

#include "kernels/sm90a/config.hpp"

namespace tpk::sm90a {

using Barrier = cutlass::arch::ClusterBarrier;                 // counts arrivals
using LoadBarrier = cutlass::arch::ClusterTransactionBarrier;  // and bytes that TMA has written

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The thread's number, read anew: what is derived from it is not kept in registers across the main loop,
// where they are scarce.
__device__ __forceinline__ int thread_number() {
  int n;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(n));
  return n;
}

// Programmatic dependent launch: waits until everything that this launch depends on is in memory; lets what
// depends on this one be launched (it waits in turn). No effect where neither launch asked for it.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void allow_later_kernels() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Both, in the order for kernels that leave room for others: launches that may follow before this one has
// begun would pile up on its multiprocessors, and spread the CTAs of each unevenly over them.
__device__ __forceinline__ void begin_after_earlier_kernels() {
  wait_for_earlier_kernels();
  allow_later_kernels();
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Generic-proxy writes (or reads acquired from others) before later TMA accesses of this thread.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for shared memory alone, which does not wait for what was stored to global memory.
__device__ __forceinline__ void fence_async_proxy_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier `id` (1 ... 15) among `threads` threads of the CTA.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The address of the same place in another CTA's shared memory; an arrival at a barrier there.
__device__ __forceinline__ uint32_t remote_address(const void* p, uint32_t cta) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(p)), "r"(cta));
  return r;
}
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival at a barrier of another CTA after this thread has read shared memory that the other will write
// once it knows. The usual arrival orders reads within a CTA only, where shared memory serves them first; one
// that goes to another multiprocessor can overtake a read that waits in the queue, and a word was lost so
// once in some ten thousand.
__device__ __forceinline__ void arrive_remote_after_reads(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A word to the same place in another CTA's shared memory; completes 4 bytes of that CTA's barrier.
__device__ __forceinline__ void store_remote(const uint32_t* word, uint32_t value, const LoadBarrier* barrier,
                                             uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 to, signal;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 signal, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [signal];\n"
      "}" ::"r"(shared_address(word)),
      "r"(value), "r"(shared_address(barrier)), "r"(cta)
      : "memory");
}

// 16 bytes to an address in another CTA's shared memory; completes 16 bytes of a barrier there.
__device__ __forceinline__ void store_remote(uint32_t to, uint32_t barrier, float a, float b, float c,
                                             float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
      "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// Waits for a phase of a barrier of this CTA that other CTAs of the cluster complete, and for what they wrote
// before.
__device__ __forceinline__ void wait_for_cluster(const uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// A box of a tensor to shared memory, of this CTA or at the same place of all CTAs in `to_ctas`; completes
// its bytes of the barrier (of each). Without a cache hint.
__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, int x, int y, int z,
                                            const LoadBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Asks for a box, so that a load to come finds it in L2.
__device__ __forceinline__ void tensor_load_multicast(void* to, const CUtensorMap* map, int x, int y, int z,
                                                      const LoadBarrier& barrier, uint16_t to_ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "h"(to_ctas)
      : "memory");
}

// `bytes` contiguous bytes (a multiple of 16, as both addresses) from global to shared memory; completes as
// many of the barrier.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          const LoadBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Four 8 x 8 blocks of 2-byte elements; lanes 8 j ... 8 j + 7 give the row addresses of block j.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each block transposed.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                           uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// wgmma descriptors, without the address: a 128-byte swizzle; see cute/arch/mma_sm90_desc.hpp. K-major:
// groups of 8 rows are 1024 bytes apart. Outer-major: groups of 8 elements of K are 1024 bytes apart, boxes
// of 64 columns one box.
template <Major kMajor>
__device__ __forceinline__ constexpr uint64_t descriptor_base() {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeading = kMajor == Major::kK ? 1 : (kBK * kSwizzleBytes) >> 4;
  return kSwizzle128 | kStride | kLeading << 16;
}

template <Major kMajor>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return descriptor_base<kMajor>() | ((address & 0x3ffff) >> 4);
}

// How far 16 elements of K further on lie, and 64 rows (or columns) further on; in units of 16 bytes.
template <Major kMajor>
constexpr int kStepK16 = (kMajor == Major::kK ? 16 * kElementBytes : 16 * kSwizzleBytes) >> 4;
constexpr int kStep64 = (64 * kSwizzleBytes) >> 4;

namespace detail {

using cute::SM90::GMMA::ScaleOut;

template <Major kMajor>
constexpr auto kTranspose = kMajor == Major::kK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;

template <Element kElement, int kN, Major kA, Major kB>
struct Wgmma;
#define TPK_WGMMA(n)                                                                               \
  template <Major kA, Major kB>                                                                    \
  struct Wgmma<Element::kBf16, n, kA, kB> {                                                        \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<kTranspose<kA>, kTranspose<kB>>; \
  };                                                                                               \
  template <Major kA, Major kB>                                                                    \
  struct Wgmma<Element::kFp16, n, kA, kB> {                                                        \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<kTranspose<kA>, kTranspose<kB>>;   \
  };
TPK_WGMMA(16)
TPK_WGMMA(32)
TPK_WGMMA(48)
TPK_WGMMA(64)
TPK_WGMMA(80)
TPK_WGMMA(96)
TPK_WGMMA(112)
TPK_WGMMA(128)
TPK_WGMMA(144)
TPK_WGMMA(160)
TPK_WGMMA(176)
TPK_WGMMA(192)
TPK_WGMMA(208)
TPK_WGMMA(224)
TPK_WGMMA(240)
TPK_WGMMA(256)
#undef TPK_WGMMA

template <class Atom, size_t... kI>
__device__ __forceinline__ void fma(uint64_t a, uint64_t b, float* acc, ScaleOut scale,
                                    std::index_sequence<kI...>) {
  Atom::fma(a, b, acc[kI]..., scale);
}

}  // namespace detail

// acc = a * b + (keep ? acc : 0) for 64 rows, kN columns and 16 elements of K; asynchronous.
template <Element kElement, int kN, Major kA, Major kB>
__device__ __forceinline__ void wgmma(float (&acc)[kN / 2], uint64_t a, uint64_t b, bool keep) {
  using Atom = typename detail::Wgmma<kElement, kN, kA, kB>::Type;
  detail::fma<Atom>(a, b, acc, keep ? detail::ScaleOut::One : detail::ScaleOut::Zero,
                    std::make_index_sequence<kN / 2>{});
}

// Two floats rounded to nearest even; lo goes to the lower half.
__device__ __forceinline__ uint32_t pack(ScalarKind kind, float lo, float hi) {
  uint32_t r;
  if (kind == ScalarKind::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

__device__ __forceinline__ float unpack_low(ScalarKind kind, uint32_t bits) {
  if (kind == ScalarKind::kBf16) return __uint_as_float(bits << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(static_cast<unsigned short>(bits & 0xffffu)));
  return r;
}
__device__ __forceinline__ float unpack_high(ScalarKind kind, uint32_t bits) {
  return kind == ScalarKind::kBf16 ? __uint_as_float(bits & 0xffff0000u) : unpack_low(kind, bits >> 16);
}

}  // namespace tpk::sm90a

// The few instructions that CUDA C++ has no name for.
#pragma once

#include <cstdint>

#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

// The launch's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char shared[];
  return shared;
}

// threadIdx.x, which the compiler takes for another value each time.
__device__ __forceinline__ int thread_index_anew() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// A launch may start before those that it depends on have ended (entry.cpp asks for it from Hopper on): it
// waits for them, and may let those behind it start.
__device__ __forceinline__ void allow_later_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// See comm/flags.cuh: the same for words of 64 bits, between CTAs of a device.
__device__ __forceinline__ void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies the first `bytes` (0 ... 16) of 16 bytes and zero-fills the rest; with bytes = 0 nothing is read, so
// the source may lie anywhere. Asynchronous: visible to this thread after cp_async_wait. What lies beside it
// is brought to the L2 as well: a row's next stage.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint32_t x, uint32_t y, uint32_t z,
                                                uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Four 8 x 8 blocks of 2-byte elements; lanes 8 j ... 8 j + 7 give the row addresses of block j.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  }
}

// One, two or four neighbouring elements, in one load.
__device__ __forceinline__ void load_shared(uint32_t (&v)[1], uint32_t shared) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v[0]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[1], uint32_t shared) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void load_shared(double (&v)[1], uint32_t shared) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v[0]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(double (&v)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v[0]), "=d"(v[1]) : "r"(shared) : "memory");
}

// An fp32 number as the nearest tf32. Of two that are as near, Hopper's one instruction for it takes the even
// one; before, there is only the one away from zero.
__device__ __forceinline__ uint32_t round_tf32(uint32_t bits) {
  uint32_t r;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(bits)));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(bits)));
#endif
  return r;
}

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

// d += a * b for 16 rows of A, 8 columns of B, and the element's K step.
template <Element kElement>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kElement == Element::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (kElement == Element::kFp16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kElement == Element::kTf32, "The other elements have other registers.");
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// fp64. Before Hopper there are only shapes of eight rows; Hopper runs those at half its rate.
template <Element kElement>
__device__ __forceinline__ void mma(double (&d)[4], const double (&a)[2], double b) {
  static_assert(kElement == Element::kFp64, "Only fp64 has sums in fp64.");
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(b));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d[2 * i]), "+d"(d[2 * i + 1])
                 : "d"(a[i]), "d"(b));
  }
#endif
}

// The same for two blocks of K, one behind the other: one instruction, of Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasPairs = false;
#else
constexpr bool kHasPairs = true;
#endif
template <Element kElement>
__device__ __forceinline__ void mma(double (&d)[4], const double (&a0)[2], const double (&a1)[2], double b0,
                                    double b1) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a0[0]), "d"(a0[1]), "d"(a1[0]), "d"(a1[1]), "d"(b0), "d"(b1));
#else
  mma<kElement>(d, a0, b0);
  mma<kElement>(d, a1, b1);
#endif
}

// Two floats rounded to nearest even; lo goes to the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ uint32_t pack_fp16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ float unpack_bf16(uint32_t bits16) { return __uint_as_float(bits16 << 16); }

__device__ __forceinline__ float unpack_fp16(uint32_t bits16) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(static_cast<unsigned short>(bits16)));
  return r;
}

}  // namespace tpk::sm80

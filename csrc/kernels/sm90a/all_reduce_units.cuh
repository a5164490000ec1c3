// Units of 16 bytes as kernels/sm90a/all_reduce.cu handles them: their elements, and packets.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "host/all_reduce.hpp"

namespace tpk::sm90a {

using all_reduce::kUnitBytes;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Packets: in each 64 bits 4 bytes of data, and the epoch above them. Such a word is never torn.
__device__ __forceinline__ void store_packets(char* to, const uint4& data, uint32_t epoch) {
  const uint64_t above = uint64_t{epoch} << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(above | data.x),
               "l"(above | data.y)
               : "memory");
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to + 16), "l"(above | data.z),
               "l"(above | data.w)
               : "memory");
}
struct Packets {
  uint64_t words[4];

  __device__ __forceinline__ uint4 data() const {
    return make_uint4(static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]),
                      static_cast<uint32_t>(words[2]), static_cast<uint32_t>(words[3]));
  }
  __device__ __forceinline__ bool have(uint32_t epoch) const {
    return words[0] >> 32 == epoch && words[1] >> 32 == epoch && words[2] >> 32 == epoch &&
           words[3] >> 32 == epoch;
  }
};
__device__ __forceinline__ Packets load_packets(const char* from) {
  Packets p;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(p.words[0]), "=l"(p.words[1])
               : "l"(from)
               : "memory");
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(p.words[2]), "=l"(p.words[3])
               : "l"(from + 16)
               : "memory");
  return p;
}

// The first `count` elements of a unit, one by one; the others are 0.
template <class T>
__device__ __noinline__ uint4 load_elements(const T* from, int count) {
  union {
    uint4 raw;
    T at[kUnitBytes / sizeof(T)];
  } unit{make_uint4(0, 0, 0, 0)};
#pragma unroll
  for (int j = 0; j < static_cast<int>(kUnitBytes / sizeof(T)); ++j) {
    if (j < count) unit.at[j] = from[j];
  }
  return unit.raw;
}
template <class T>
__device__ __noinline__ void store_elements(T* to, uint4 data, int count) {
  const T* const from = reinterpret_cast<const T*>(&data);
#pragma unroll
  for (int j = 0; j < static_cast<int>(kUnitBytes / sizeof(T)); ++j) {
    if (j < count) to[j] = from[j];
  }
}

}  // namespace tpk::sm90a

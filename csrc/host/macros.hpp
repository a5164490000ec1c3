// The macros that let the host core run inside kernels, on CPU threads and in tests alike.
#pragma once

#if defined(__CUDACC__)
#define TPK_HD __host__ __device__ __forceinline__
#else
#define TPK_HD inline
#endif

// In front of a loop whose body is long: one copy of it.
#if defined(__CUDA_ARCH__)
#define TPK_ONE_COPY _Pragma("unroll 1")
#else
#define TPK_ONE_COPY
#endif

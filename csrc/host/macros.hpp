// The one macro that lets the host core run inside kernels, on CPU threads and in tests alike.
#pragma once

#if defined(__CUDACC__)
#define TPK_HD __host__ __device__ __forceinline__
#else
#define TPK_HD inline
#endif

// Copies by the threads of one CTA: any size, any alignment, 16 bytes at a time where that is possible.
//
// Self-contained: compiles under nvcc and NVRTC.
#pragma once

namespace tpk::comm {

namespace detail {

// count words of type V; both pointers are aligned to V.
template <typename V>
__device__ __forceinline__ void copy_words(V* dst, const V* src, unsigned long long count,
                                           unsigned int thread, unsigned int threads) {
  constexpr unsigned int kBatch = 4;  // loads in flight before the first store
  unsigned long long i = thread;
  const unsigned long long step = static_cast<unsigned long long>(threads) * kBatch;
  for (; i + static_cast<unsigned long long>(threads) * (kBatch - 1) < count; i += step) {
    V v[kBatch];
#pragma unroll
    for (unsigned int j = 0; j < kBatch; ++j) v[j] = src[i + j * threads];
#pragma unroll
    for (unsigned int j = 0; j < kBatch; ++j) dst[i + j * threads] = v[j];
  }
  for (; i < count; i += threads) dst[i] = src[i];
}

// Single bytes up to dst's next multiple of sizeof(V), whole words, single bytes.
template <typename V>
__device__ __forceinline__ void copy_around(char* dst, const char* src, unsigned long long bytes,
                                            unsigned int thread, unsigned int threads) {
  constexpr unsigned long long kWord = sizeof(V);
  unsigned long long head = (kWord - reinterpret_cast<unsigned long long>(dst) % kWord) % kWord;
  if (head > bytes) head = bytes;
  const unsigned long long words = (bytes - head) / kWord;
  const unsigned long long tail_at = head + words * kWord;
  copy_words(dst, src, head, thread, threads);
  copy_words(reinterpret_cast<V*>(dst + head), reinterpret_cast<const V*>(src + head), words, thread,
             threads);
  copy_words(dst + tail_at, src + tail_at, bytes - tail_at, thread, threads);
}

}  // namespace detail

// Copies bytes from src to dst, which must not overlap, with all threads of one CTA; touches nothing outside
// either range. Orders nothing: ordinary (weak) loads and stores. To hand the copy on, follow with
// __syncthreads() and one thread's store_release (comm/flags.cuh); to copy what someone else released,
// precede it with one thread's load_acquire or wait_epoch and __syncthreads().
__device__ __forceinline__ void copy_bytes(void* dst, const void* src, unsigned long long bytes) {
  const unsigned int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned int threads = blockDim.x * blockDim.y * blockDim.z;
  char* d = static_cast<char*>(dst);
  const char* s = static_cast<const char*>(src);
  // The widest word for which one head aligns both pointers.
  const unsigned long long skew =
      reinterpret_cast<unsigned long long>(d) ^ reinterpret_cast<unsigned long long>(s);
  if (skew % 16 == 0) {
    detail::copy_around<uint4>(d, s, bytes, thread, threads);
  } else if (skew % 4 == 0) {
    detail::copy_around<unsigned int>(d, s, bytes, thread, threads);
  } else if (skew % 2 == 0) {
    detail::copy_around<unsigned short>(d, s, bytes, thread, threads);
  } else {
    detail::copy_words(d, s, bytes, thread, threads);
  }
}

}  // namespace tpk::comm

// The copy engine of a device, driven from one stream of high priority: rows to peers, with a flag behind
// them, without any multiprocessor. Everything is enqueued, nothing waits on the host, so calls can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tpk::comm {

// Rows in memory: where the first begins, and bytes from one to the next.
struct Rows {
  void* data = nullptr;
  size_t pitch = 0;

  Rows from(int64_t row) const {
    return {static_cast<char*>(data) + row * static_cast<int64_t>(pitch), pitch};
  }
};

class CopyEngine {
 public:
  // The one of a device, which is current; made at its first use, which must not be inside a capture.
  static CopyEngine& of(int device);

  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // From fork to join the engine belongs to one call: what comes next on it waits for what `main` has so far;
  // join makes `main` wait for it.
  class Call {
   public:
    Call(CopyEngine& engine, cudaStream_t main);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    void copy(Rows to, Rows from, size_t row_bytes, int64_t rows);
    // Behind all copies before it: the epoch, as it is then, into the peer's word.
    void raise(uint32_t* word, const uint32_t* epoch);
    // Waits until the own word is 1, and sets it to 0.
    void take_bell(uint32_t* bell);
    // What a product does.
    void raise_bell(uint32_t* bell);
    void join();

   private:
    CopyEngine& engine_;
    std::unique_lock<std::mutex> lock_;
    cudaStream_t main_;
    bool joined_ = false;
  };

 private:
  CopyEngine();

  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t joined_ = nullptr;
  std::mutex mutex_;
};

}  // namespace tpk::comm

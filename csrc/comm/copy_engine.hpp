// The copy engine of a device, driven from a few streams of high priority: rows to peers, with a flag behind
// them, without any multiprocessor. Between a copy and the next one of its stream about 10 us pass, which a
// copy on another stream may fill. Everything is enqueued, nothing waits on the host, so calls can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "comm/transport.hpp"

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
  // What a call moves while its product runs, or what is on its way beneath that.
  enum class Purpose { kCall, kBeneath };
  static constexpr int kStreams = 3;  // of calls. The fewer, the less stands in one hardware queue

  // The one of a device, which is current; made at its first use, which must not be inside a capture.
  static CopyEngine& of(int device, Purpose purpose = Purpose::kCall);

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

    // What follows is enqueued on that stream (at first it is 0), in no order with what others have.
    void use(int stream);
    // Rows to a peer, and behind them the epoch, as it is then, into its word. By another transport, if one
    // is set.
    void push(Rows to, Rows from, size_t row_bytes, int64_t rows, uint32_t* word, const uint32_t* epoch);
    void copy(Rows to, Rows from, size_t row_bytes, int64_t rows);
    // The same without rows, behind all copies before it on its stream.
    void raise(uint32_t* word, const uint32_t* epoch);
    // Waits until the own word is 1, and sets it to 0.
    void take_bell(uint32_t* bell);
    // What a product does.
    void raise_bell(uint32_t* bell);
    void join();
    // `main` goes on without: see CopyEngine::join.
    void leave_open();

   private:
    cudaStream_t stream() const { return engine_.streams_[current_].stream; }

    CopyEngine& engine_;
    std::unique_lock<std::mutex> lock_;
    cudaStream_t main_;
    int current_ = 0;
    bool joined_ = false;
  };

  // Makes `main` wait for the call that was left open.
  void join(cudaStream_t main);

 private:
  explicit CopyEngine(int streams);

  struct Stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t joined = nullptr;
    bool is_used = false;  // it is part of the call
  };
  std::vector<Stream> streams_;
  cudaEvent_t forked_ = nullptr;
  std::mutex mutex_;
};

}  // namespace tpk::comm

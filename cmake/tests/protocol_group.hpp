// What ranks of host/protocol.hpp share when they run as threads (protocol_ranks.hpp): their pages and
// buffers. Which calls they make: protocol_calls.hpp. Words are atomics with the orders that the kernels use,
// rows are plain memory, so that ThreadSanitizer sees an order that is missing. Threads pause at random. A
// Mutation leaves one thing of the protocol out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "protocol_calls.hpp"

namespace tpk::protocol::test {

// Row `row` of what `rank` holds or computes in a call. Never kPoison.
inline uint32_t value_of(int call, int rank, int64_t row) {
  return (static_cast<uint32_t>(call) * 2654435761u + static_cast<uint32_t>(rank) * 40503u +
          static_cast<uint32_t>(row)) >>
         1;
}

inline void pause(Random& random, bool long_ones = false) {
  const auto dice = random() % 256;
  if (dice < (long_ones ? 128 : 4)) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
  } else if (dice < 40) {
    std::this_thread::yield();
  }
}

struct ThreadMemory {
  uint64_t timeout_ns;
  bool relaxed_stores;
  bool relaxed_loads;

  static std::atomic_ref<uint32_t> word_at(const uint32_t* word) {
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word));
  }
  template <Scope>
  uint32_t load_acquire(const uint32_t* word) const {
    return relaxed_loads ? word_at(word).load(std::memory_order_relaxed)
                         : word_at(word).load(std::memory_order_acquire);
  }
  template <Scope>
  void store_release(uint32_t* word, uint32_t v) const {
    if (relaxed_stores) {
      word_at(word).store(v, std::memory_order_relaxed);
    } else {
      word_at(word).store(v, std::memory_order_release);
    }
  }
  uint32_t add_acq_rel(uint32_t* word, uint32_t v) const {
    return word_at(word).fetch_add(v, std::memory_order_acq_rel);
  }
  template <Scope kScope>
  bool wait_epoch(const uint32_t* flag, uint32_t expected, uint32_t* seen) const {
    const auto now = [] {
      return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    };
    comm::Patience patience(timeout_ns, now());
    for (int looks = 0;; ++looks) {
      const bool late = patience.ends(now());
      *seen = load_acquire<kScope>(flag);
      if (comm::epoch_reached(*seen, expected)) return true;
      if (late) return false;
      if (looks < 20) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }
};

struct Failure {
  int rank;
  const char* thread;
  int call;
  Missed missed;
};

// What the ranks of a run share.
struct Group {
  explicit Group(const Options& options) : o(options) {
    const size_t words = Page::kBytes / 4 + static_cast<size_t>(buffer_rows(o.world));
    for (auto& pages_of_kind : pages) {
      for (int r = 0; r < o.world; ++r) {
        memory.push_back(std::make_unique<uint32_t[]>(words));
        const Page page = Page::at(reinterpret_cast<uint64_t>(memory.back().get()));
        *page.epoch() = o.first_epoch;
        for (int p = 0; p < o.world; ++p) *page.entered(p) = o.first_epoch;
        for (int c = 0; c < kMaxChunks; ++c) *page.arrived(c) = *page.sums(c) = o.first_epoch;
        pages_of_kind.push_back(page);
      }
    }
  }

  void fail(const Failure& failure) {
    const std::lock_guard lock(mutex);
    failures.push_back(failure);
  }

  Options o;
  std::vector<std::unique_ptr<uint32_t[]>> memory;
  std::vector<Page> pages[kNumKinds];  // by kind and rank
  std::atomic<int64_t> rows_read{0};
  std::atomic<int64_t> wrong{0};
  std::mutex mutex;
  std::vector<Failure> failures;
};

}  // namespace tpk::protocol::test

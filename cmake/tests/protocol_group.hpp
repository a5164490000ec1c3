// What ranks of host/protocol.hpp share when they run as threads (protocol_ranks.hpp): their pages and
// buffers, and which calls they make. Words are atomics with the orders that the kernels use, rows are plain
// memory, so that ThreadSanitizer sees an order that is missing. Threads pause at random. A Mutation leaves
// one thing of the protocol out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host/pushes.hpp"

namespace tpk::protocol::test {

using Random = std::minstd_rand;

enum class Mutation {
  kNone,
  kSkipEntered,      // enter does not wait for the peers
  kFlagBeforeRows,   // the engine raises a flag, then copies
  kEnterBeforeRead,  // a rank says that it has come to the next call while CTAs read
  kEnterBeforeJoin,  // ... while the engine still pushes
  kReadBeforeFlag,   // CTAs do not wait for rows
  kSendBeforeBell,   // the engine does not wait for the doorbell
  kRelaxedStores,    // words are written without release ...
  kRelaxedLoads,     // ... or read without acquire: x86 does not care, ThreadSanitizer does
};
constexpr const char* kMutations[] = {"none",
                                      "skip_entered",
                                      "flag_before_rows",
                                      "enter_before_read",
                                      "enter_before_join",
                                      "read_before_flag",
                                      "send_before_bell",
                                      "relaxed_stores",
                                      "relaxed_loads"};

enum class Kind { kGather, kScatter, kSum };
constexpr int kNumKinds = 3;
enum class Kinds { kGather, kScatter, kSum, kAll };  // of a run's calls; all: in turn
enum class Stop { kNever, kBeforeEnter, kPushes, kProduct };

struct Options {
  int world = 8;
  int ctas = 2;
  int calls = 100;
  Kinds kinds = Kinds::kAll;
  uint32_t first_epoch = 0;
  uint32_t seed = 1;
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  Mutation mutation = Mutation::kNone;
  bool ends_when_wrong = false;
  bool equal_shards = false;  // of 2 chunks
  Stop stop = Stop::kNever;   // what stop_rank does no more in stop_call
  int stop_rank = 0;
  int stop_call = 0;
};

constexpr int64_t kMostShardRows = 700;  // 2 chunks and a bit
constexpr uint32_t kPoison = 0xffffffff;
constexpr int kTileRows = 96;

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

// One call, the same on every rank.
struct Call {
  Kind kind = Kind::kGather;
  bool reads = true;  // a gather whose rows nobody reads: a product without columns
  std::vector<int64_t> rows;
  ChunkList chunks;

  int begin(int rank) const { return chunks.begin(chunks.first[rank]); }
};

inline Call make_call(const Options& o, int index) {
  Random random(o.seed * 7919u + static_cast<uint32_t>(index) + 1);
  random.discard(3);
  Call call;
  call.kind = static_cast<Kind>(o.kinds == Kinds::kAll ? index % kNumKinds : static_cast<int>(o.kinds));
  const bool scatter = call.kind != Kind::kGather;
  call.reads = o.equal_shards || scatter || random() % 4 != 0;
  const auto all = random() % 8;  // 0: no rows at all, 1: one rank has all
  const auto one = static_cast<int>(random() % o.world);
  for (int r = 0; r < o.world; ++r) {
    const bool empty = all == 0 || (all == 1 && r != one) || random() % 4 == 0;
    const auto rows = static_cast<int64_t>(random() % kMostShardRows) + 1;
    call.rows.push_back(o.equal_shards ? 600 : empty ? 0 : rows);
  }
  // A sender has a word for each chunk of an owner.
  call.chunks = cut_chunks(call.rows, 4, 1, scatter ? max64(1, kMaxChunks / o.world) : kMaxChunks);
  return call;
}

struct Failure {
  int rank;
  const char* thread;
  int call;
  Missed missed;
};

// What the ranks of a run share.
struct Group {
  explicit Group(const Options& options) : o(options) {
    // Slots, and results.
    const size_t words = Page::kBytes / 4 + 2 * static_cast<size_t>(o.world) * kMostShardRows;
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

// What CTAs of host/all_reduce.hpp are when they run as threads: their memory, and which calls they make.
// Words are atomics with the orders that the kernel uses, data are plain memory, so that ThreadSanitizer sees
// an order that is missing. Threads pause at random. A Mutation leaves one thing out.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "host/all_reduce.hpp"

namespace tpk::all_reduce::test {

using namespace std::chrono_literals;
using Random = std::minstd_rand;

constexpr int32_t kLargest = 400;  // units
constexpr int64_t kHalf = kPacketBytes + kMaxRanks * (kLargest + 8) * kUnitBytes;
constexpr uint32_t kPoison = 0xffffffff;
constexpr int kWays = 5;

enum class Mutation {
  kNone,
  kOneHalf,         // all calls use the same half
  kFlagBeforeData,  // flags are raised, then data stored
  kReadBeforeFlag,  // nobody waits
  kFirstCtaCounts,  // the epoch is counted before all CTAs have read it
  kExactFlags,      // a flag that is ahead counts for nothing
  kNoWaitForEmpty,  // in a gather nobody waits for ranks without rows
  kRelaxedStores,   // words are written without release ...
  kRelaxedLoads,    // ... or read without acquire: x86 does not care, ThreadSanitizer does
};
constexpr const char* kMutations[] = {
    "none",        "one_half",          "flag_before_data", "read_before_flag", "first_cta_counts",
    "exact_flags", "no_wait_for_empty", "relaxed_stores",   "relaxed_loads"};

enum class Stop { kNever, kBeforeCall, kBeforeSums };

struct Options {
  int world = 4;
  int calls = 100;
  int threads = 4;     // CTAs at most
  int only_way = -1;   // else all of them
  bool alike = false;  // every call has the same size
  uint32_t first_epoch = 0;
  uint32_t seed = 1;
  std::chrono::nanoseconds timeout = 60s;
  Mutation mutation = Mutation::kNone;
  bool ends_when_wrong = false;
  Stop stop = Stop::kNever;  // what stop_rank does no more in stop_call
  int stop_rank = 0;
  int stop_call = 0;
};

struct Missed {
  int rank;
  int call;
  Word word;
  int peer;
  uint32_t expected;
  uint32_t seen;
};

inline uint32_t value_of(int call, int rank, int index) {
  return (static_cast<uint32_t>(call) * 2654435761u + static_cast<uint32_t>(rank) * 40503u +
          static_cast<uint32_t>(index) * 7u) >>
         1;
}
// In the order of ranks, which matters.
inline uint32_t sum_of(int call, int world, int index) {
  uint32_t sum = 0;
  for (int r = 0; r < world; ++r) sum = 31 * sum + value_of(call, r, index);
  return sum;
}

inline void pause(Random& random) {
  const auto dice = random() % 256;
  if (dice < 3)
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
  else if (dice < 30)
    std::this_thread::yield();
}

// Units of all shards before that of a rank.
inline int32_t first_of(const Call& c, int rank) {
  int32_t first = 0;
  for (int r = 0; r < rank; ++r) first += c.lengths[r];
  return first;
}

// What the ranks of a run share.
struct Group {
  explicit Group(const Options& options) : o(options) {
    for (int r = 0; r < o.world; ++r) {
      // Packets are read 8 bytes at a time.
      memory.push_back(std::make_unique<uint64_t[]>((Page::kBytes + 2 * kHalf) / 8));
      pages[r] = Page::at(reinterpret_cast<uint64_t>(memory.back().get()));
      *pages[r].epoch() = o.first_epoch;
    }
  }
  Call make_call(int index) const {
    Random random(o.seed * 7919u + static_cast<uint32_t>(index) + 1);
    random.discard(3);
    Call c;
    std::copy(pages, pages + kMaxRanks, c.pages);
    c.world = o.world;
    c.way = static_cast<Way>(o.only_way >= 0 ? o.only_way : random() % kWays);
    c.ctas = o.alike ? o.threads : 1 + static_cast<int>(random()) % o.threads;
    c.units = o.alike ? kLargest : 1 + static_cast<int32_t>(random() % (random() % 4 == 0 ? kLargest : 20));
    // Also calls in which some ranks, or all, have no rows.
    for (int r = 0; r < c.world && has_shards(c.way); ++r) {
      const int32_t length = c.units / c.world + static_cast<int32_t>(random() % 3);
      c.lengths[r] = o.alike ? kLargest / c.world : random() % 3 == 0 ? 0 : length;
    }
    c.half_bytes = kHalf;
    c.cut();
    return c;
  }

  Options o;
  std::vector<std::unique_ptr<uint64_t[]>> memory;
  Page pages[kMaxRanks];
  std::atomic<int64_t> checked{0};
  std::atomic<int64_t> wrong{0};
  std::mutex mutex;
  std::vector<Missed> missed;
};

struct Stopped {};

struct ThreadMemory {
  const Options& o;
  int ctas;

  static std::atomic_ref<uint32_t> at(const uint32_t* word) {
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word));
  }
  template <Scope>
  uint32_t load_acquire(const uint32_t* word) const {
    return at(word).load(o.mutation == Mutation::kRelaxedLoads ? std::memory_order_relaxed
                                                               : std::memory_order_acquire);
  }
  template <Scope>
  void store_release(uint32_t* word, uint32_t v) const {
    at(word).store(
        v, o.mutation == Mutation::kRelaxedStores ? std::memory_order_relaxed : std::memory_order_release);
  }
  uint32_t take_ticket(uint32_t* word) const {
    const uint32_t before = at(word).fetch_add(1, std::memory_order_relaxed);
    if (o.mutation != Mutation::kFirstCtaCounts) return before;
    if (before + 1 == static_cast<uint32_t>(ctas)) at(word).store(0);
    return before == 0 ? static_cast<uint32_t>(ctas) - 1 : 0;
  }
  void store_relaxed(uint32_t* word, uint32_t v) const { at(word).store(v, std::memory_order_relaxed); }
};

// A CTA of one thread. Data are words of 32 bits in plain memory, packets atomic words of 64 bits.
struct ThreadCta {
  Group& g;
  const Call& c;
  int call;
  int number;
  const uint32_t* partial;
  uint32_t* out;
  Random& random;
  std::vector<std::function<void()>> late = {};  // stores of kFlagBeforeData

  static constexpr int kWords = kUnitBytes / 4;
  bool mutated(Mutation m) const { return g.o.mutation == m; }
  uint32_t half(uint32_t parity) const { return mutated(Mutation::kOneHalf) ? 0 : parity; }

  int index() const { return number; }
  void barrier() { pause(random); }
  ThreadMemory memory() const { return {g.o, c.ctas}; }
  template <class F>
  bool each_peer(F f) {
    bool all = true;
    for (int peer = 0; peer < c.world; ++peer) all = (peer == c.rank || f(peer)) && all;
    for (const auto& store : late) store();
    late.clear();
    return all;
  }
  template <class F>
  void once(F f) {
    pause(random);
    f();
  }
  bool until(const std::function<bool()>& there) {
    const auto end = std::chrono::steady_clock::now() + g.o.timeout;
    for (int looks = 0;; ++looks) {
      const bool over = std::chrono::steady_clock::now() > end;
      if (there()) return true;
      if (over) return false;
      if (looks < 20)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(20us);
    }
  }
  bool fail(Word word, int peer, uint32_t expected, uint32_t seen) {
    const std::lock_guard lock(g.mutex);
    g.missed.push_back({c.rank, call, word, peer, expected, seen});
    return false;
  }
  bool wait(const uint32_t* flag, uint32_t epoch, Word word, int peer) {
    if (mutated(Mutation::kReadBeforeFlag)) return true;
    const bool empty = c.way == Way::kGather && c.lengths[peer] == 0;
    if (mutated(Mutation::kNoWaitForEmpty) && empty) return true;
    uint32_t seen = 0;
    const bool there = until([&] {
      seen = memory().load_acquire<Scope::kSys>(flag);
      return mutated(Mutation::kExactFlags) ? seen == epoch : arrived(seen, epoch);
    });
    return there || fail(word, peer, epoch, seen);
  }

  void write(char* base, int unit, const uint32_t* words) {
    uint32_t* const to = reinterpret_cast<uint32_t*>(base) + kWords * unit;
    if (!mutated(Mutation::kFlagBeforeData)) {
      std::copy(words, words + kWords, to);
      return;
    }
    std::vector<uint32_t> copy(words, words + kWords);
    late.push_back([to, copy] { std::copy(copy.begin(), copy.end(), to); });
  }
  // Where unit i of a block lies: behind a slot's begin, in a tensor of all shards, in one of the own.
  char* slot(int owner, uint32_t parity, int sender) const { return c.slot(owner, half(parity), sender); }
  int all(int rank, int i) const { return has_shards(c.way) ? first_of(c, rank) + i - c.begin(rank) : i; }
  int own(int i) const { return has_shards(c.way) ? i - c.begin(c.rank) : i; }
  void copy(const char* base, int from, int to) const {
    const auto* words = reinterpret_cast<const uint32_t*>(base) + kWords * from;
    std::copy(words, words + kWords, out + kWords * to);
  }

  void send_to(int owner, Slice s, uint32_t parity) {
    for (int i = s.begin; i < s.end; ++i) {
      pause(random);
      write(slot(owner, parity, c.rank), i - c.begin(owner), partial + kWords * all(owner, i));
    }
  }
  void send(Slice s, uint32_t parity) {
    for (int i = s.begin; i < s.end; ++i) {
      pause(random);
      for (int peer = 0; peer < c.world; ++peer) {
        if (peer == c.rank) continue;
        write(slot(peer, parity, c.rank), i - c.begin(c.rank), partial + kWords * own(i));
      }
    }
  }
  void sum(Slice s, uint32_t parity, bool publish) {
    if (g.o.stop == Stop::kBeforeSums && c.rank == g.o.stop_rank && call == g.o.stop_call) throw Stopped{};
    for (int i = s.begin; i < s.end; ++i) {
      pause(random);
      uint32_t total[kWords] = {};
      for (int r = 0; r < c.world; ++r) {
        const uint32_t* const from = r == c.rank ? partial + kWords * all(r, i)
                                                 : reinterpret_cast<uint32_t*>(slot(c.rank, parity, r)) +
                                                       kWords * (i - c.begin(c.rank));
        for (int w = 0; w < kWords; ++w) total[w] = 31 * total[w] + from[w];
      }
      std::copy(total, total + kWords, out + kWords * own(i));
      for (int peer = 0; publish && peer < c.world; ++peer) {
        if (peer != c.rank) write(c.sums(peer, half(parity)), i, total);
      }
    }
  }
  void collect(Slice s, uint32_t parity) {
    pause(random);
    for (int i = s.begin; i < s.end; ++i) copy(c.sums(c.rank, half(parity)), i, i);
  }
  void keep(Slice s) {
    const char* const base = reinterpret_cast<const char*>(partial);
    for (int i = s.begin; i < s.end; ++i) copy(base, own(i), all(c.rank, i));
  }
  void take(int sender, Slice s, uint32_t parity) {
    for (int i = s.begin; i < s.end; ++i) {
      pause(random);
      copy(slot(c.rank, parity, sender), i - c.begin(sender), all(sender, i));
    }
  }

  // The kernel's packets order nothing, and need not: a read that has returned sees no later write. Here they
  // do, or ThreadSanitizer would miss an order between what calls before and behind them read and write.
  std::atomic_ref<uint64_t> packet(int owner, uint32_t parity, int sender, int word) const {
    return std::atomic_ref<uint64_t>(
        reinterpret_cast<uint64_t*>(c.packets(owner, half(parity), sender))[word]);
  }
  void send_packets(Slice s, uint32_t parity, uint32_t epoch) {
    for (int w = kWords * s.begin; w < kWords * s.end; ++w) {
      pause(random);
      for (int peer = 0; peer < c.world; ++peer) {
        if (peer == c.rank) continue;
        packet(peer, parity, c.rank, w).store(uint64_t{epoch} << 32 | partial[w], std::memory_order_release);
      }
    }
  }
  bool sum_packets(Slice s, uint32_t parity, uint32_t epoch) {
    for (int w = kWords * s.begin; w < kWords * s.end; ++w) {
      uint32_t total = 0;
      for (int r = 0; r < c.world; ++r) {
        uint64_t got = uint64_t{epoch} << 32 | partial[w];
        const bool there = r == c.rank || until([&] {
                             got = packet(c.rank, parity, r, w).load(std::memory_order_acquire);
                             return got >> 32 == epoch || mutated(Mutation::kReadBeforeFlag);
                           });
        if (!there) return fail(Word::kPacket, r, epoch, static_cast<uint32_t>(got >> 32));
        total = 31 * total + static_cast<uint32_t>(got);
      }
      out[w] = total;
    }
    return true;
  }
};

}  // namespace tpk::all_reduce::test

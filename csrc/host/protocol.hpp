// How ranks of one host hand rows to each other: the words of a page, and the order in which they are read
// and written. One page and one buffer a rank, group and kind of call ("gather", "scatter", or "sum": a
// scatter whose sums then go to all), in memory that every rank of the group can write.
//
// One call, in this order, on every rank:
//   enter   tells every peer that this rank is here, waits until all peers are, and begins an epoch
//   push    rows into peers' buffers, and behind them the epoch into their `arrived` words (host/pushes.hpp)
//   read    rows of the own buffer, each after its `arrived` word has reached the epoch
//   join    the pushes of this call are over (the copy streams are joined)
// A rank that is here has joined the last call, and read what it brought; so who has entered knows that all
// pushes of the last call, by anyone to anyone, are over, and all reads: words and rows have one writer at a
// time even where the shards change from call to call, and also where a rank did not read what came (a
// product without columns).
//
// Enter is a barrier, so that no product waits for a rank that may still wait for something else, such as
// another communicator's kernel that finds no room beside this product: what a product waits for are copy
// engines, which need no multiprocessor, and tiles that peers compute before they wait themselves
// (host/progress.hpp). Only enter, one warp, waits for ranks that are late.
//
// Templates over a Memory, so that kernels and the threads of cmake/tests/test_protocol.cpp run the same
// code:
//   load_acquire<Scope>(const u32*) -> u32, store_release<Scope>(u32*, u32), add_acq_rel(u32*, u32) -> u32
//   before, wait_epoch<Scope>(const u32*, u32 expected, u32* seen) -> bool: bounded, false when time is up.
// comm::DeviceMemory is the one of kernels. Compiles for host and device, without CUDA too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/flags.cuh"
#include "host/macros.hpp"

namespace tpk::protocol {

using comm::Scope;

constexpr int kMaxRanks = 16;
constexpr int kMaxChunks = 64;  // that arrive, or leave, in one call, of all ranks together

// Where a rank's allocation begins: words of 32 bits, then the buffer. All words are zero at first.
struct Page {
  static constexpr size_t kBytes = 4096;
  static constexpr int kArrived = 0;   // [kMaxChunks]
  static constexpr int kEntered = 64;  // [kMaxRanks]
  static constexpr int kEpoch = 128;
  static constexpr int kTicket = 160;
  static constexpr int kBells = 192;     // [kMaxChunks]
  static constexpr int kCounters = 256;  // [kMaxChunks]
  static constexpr int kSums = 320;      // [kMaxChunks]

  uint32_t* words = nullptr;

  TPK_HD static Page at(uint64_t address) { return {reinterpret_cast<uint32_t*>(address)}; }

  // Gather: chunk i is here. Scatter, sum: a chunk of my rows is, from one rank; see arrived_index of
  // host/pushes.hpp. The sender's epoch, written behind the data.
  TPK_HD uint32_t* arrived(int i) const { return words + kArrived + i; }
  // Written by `peer`, to me: it has come to the call that is epoch *entered(peer), so that I may write to
  // its buffer.
  TPK_HD uint32_t* entered(int peer) const { return words + kEntered + peer; }
  // Calls so far, modulo 2^32. Written by the owner alone, in enter.
  TPK_HD uint32_t* epoch() const { return words + kEpoch; }
  // Tickets that my product has given to its clusters. Zero when it begins.
  TPK_HD uint32_t* ticket() const { return words + kTicket; }
  // Scatter: chunk c of the result is ready to be sent. My product sets it to 1, my copy stream to 0.
  TPK_HD uint32_t* bell(int c) const { return words + kBells + c; }
  // How much of it is. Zero between calls.
  TPK_HD uint32_t* counter(int c) const { return words + kCounters + c; }
  // Sum: the sums of chunk c of the result are here. The owner's epoch, written behind them.
  TPK_HD uint32_t* sums(int c) const { return words + kSums + c; }
  TPK_HD void* buffer() const { return words + kBytes / sizeof(uint32_t); }
};
static_assert(Page::kSums + kMaxChunks <= static_cast<int>(Page::kBytes / sizeof(uint32_t)),
              "The words must end before the buffer.");

enum class Word : uint32_t { kArrived, kEntered, kBell, kSums };

// A wait that took too long. Functions that wait fill it before they return false.
struct Missed {
  Word word = Word::kArrived;
  int32_t index = 0;  // of the word: see Page
  int32_t peer = 0;   // who should have written it
  uint32_t expected = 0;
  uint32_t seen = 0;
};

namespace detail {

template <Scope kScope, class Memory>
TPK_HD bool wait(const Memory& memory, const uint32_t* flag, Word word, int index, int peer,
                 uint32_t expected, Missed* missed) {
  uint32_t seen = 0;
  if (memory.template wait_epoch<kScope>(flag, expected, &seen)) return true;
  *missed = {word, index, peer, expected, seen};
  return false;
}

}  // namespace detail

template <class Memory>
TPK_HD uint32_t epoch_of(const Memory& memory, const Page& mine) {
  return memory.template load_acquire<Scope::kGpu>(mine.epoch());
}

// ---- Enter. After the last read of the own buffer and the end of the own pushes of the last call, in stream
// order. A kernel gives each peer a thread, with a barrier before advance_epoch; one thread calls enter.

// Tells `peer`, whose page is `peers`, that rank `rank` has come to epoch `epoch`.
template <class Memory>
TPK_HD void publish_entered(const Memory& memory, const Page& peers, int rank, uint32_t epoch) {
  memory.template store_release<Scope::kSys>(peers.entered(rank), epoch);
}

// Waits until `peer` has come to it, too. False: *missed says what is missing.
template <class Memory>
TPK_HD bool peer_entered(const Memory& memory, const Page& mine, int peer, uint32_t epoch, Missed* missed) {
  return detail::wait<Scope::kSys>(memory, mine.entered(peer), Word::kEntered, peer, peer, epoch, missed);
}

// When all have: begins it.
template <class Memory>
TPK_HD void advance_epoch(const Memory& memory, const Page& mine, uint32_t epoch) {
  *mine.ticket() = 0;
  memory.template store_release<Scope::kSys>(mine.epoch(), epoch);
}

template <class Memory>
TPK_HD bool enter(const Memory& memory, const Page* pages, int world, int rank, Missed* missed) {
  const uint32_t epoch = epoch_of(memory, pages[rank]) + 1;
  for (int peer = 0; peer < world; ++peer) {
    if (peer != rank) publish_entered(memory, pages[peer], rank, epoch);
  }
  for (int peer = 0; peer < world; ++peer) {
    if (peer != rank && !peer_entered(memory, pages[rank], peer, epoch, missed)) return false;
  }
  advance_epoch(memory, pages[rank], epoch);
  return true;
}

// ---- Arrival.

// Behind rows that were written to the peer's buffer: what the copy engine does by a copy of 4 bytes.
template <class Memory>
TPK_HD void raise_arrived(const Memory& memory, const Page& mine, const Page& peers, int index) {
  memory.template store_release<Scope::kSys>(peers.arrived(index), epoch_of(memory, mine));
}

// Waits until `sender` has written what arrived(index) stands for.
template <class Memory>
TPK_HD bool wait_arrived(const Memory& memory, const Page& mine, int index, int sender, uint32_t epoch,
                         Missed* missed) {
  return detail::wait<Scope::kSys>(memory, mine.arrived(index), Word::kArrived, index, sender, epoch, missed);
}

// Waits until `owner` has written the sums of `chunk` to my buffer of results.
template <class Memory>
TPK_HD bool wait_sums(const Memory& memory, const Page& mine, int chunk, int owner, uint32_t epoch,
                      Missed* missed) {
  return detail::wait<Scope::kSys>(memory, mine.sums(chunk), Word::kSums, chunk, owner, epoch, missed);
}

// ---- Doorbells: from a product to the copy stream of its own rank.

// Adds `more` to what is in memory of `chunk`; who completes `target` rings the bell. Called by one thread of
// those that wrote it, behind a barrier of theirs.
template <class Memory>
TPK_HD void count_and_ring(const Memory& memory, const Page& mine, int chunk, uint32_t more,
                           uint32_t target) {
  if (memory.add_acq_rel(mine.counter(chunk), more) + more != target) return;
  *mine.counter(chunk) = 0;  // nobody else comes before the next call
  memory.template store_release<Scope::kSys>(mine.bell(chunk), 1u);
}

// Where rows are written to peers' buffers by those who computed them: who completes the chunk writes the
// epoch to word `word` of the pages of ranks [first, end), but not of `rank`.
template <class Memory>
TPK_HD void count_and_tell(const Memory& memory, const Page* pages, int rank, int chunk, uint32_t more,
                           uint32_t target, int first, int end, int word) {
  const Page& mine = pages[rank];
  if (memory.add_acq_rel(mine.counter(chunk), more) + more != target) return;
  *mine.counter(chunk) = 0;
  const uint32_t epoch = epoch_of(memory, mine);
  for (int r = first; r < end; ++r) {
    if (r != rank) memory.template store_release<Scope::kSys>(pages[r].words + word, epoch);
  }
}

// What the copy stream does by a wait for the value 1 and a write of 0.
template <class Memory>
TPK_HD bool take_bell(const Memory& memory, const Page& mine, int chunk, int rank, Missed* missed) {
  if (!detail::wait<Scope::kSys>(memory, mine.bell(chunk), Word::kBell, chunk, rank, 1u, missed))
    return false;
  memory.template store_release<Scope::kSys>(mine.bell(chunk), 0u);
  return true;
}

}  // namespace tpk::protocol

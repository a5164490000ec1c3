// An all-reduce, a gather or a reduce-scatter among the ranks of a host in one kernel, for sizes so small
// that latency counts: the words, where things lie, who waits for what. The kernel is
// kernels/sm90a/all_reduce.cu.
//
// Every rank has a page of words and a buffer of two halves; call e uses half e % 2 of everyone's buffer. A
// CTA owns the same slices on every rank, and talks to the CTAs of the same number only.
//
//   packets   It stores its slice of the partial to every peer, the epoch beside each 4 bytes in one word;
//             waits until what the peers sent has the epoch; sums. Twice the bytes, and no flag.
//   one-shot  It stores its slice to every peer; flags; waits for the peers' flags; sums.
//   two-shot  A block of the result has an owner. It stores its slice of each block to the owner; flags;
//             waits; sums its slice of the own block, and stores that to every peer; flags; waits; copies.
//   gather    Blocks are shards. It stores its slice of the own one to every peer; flags; copies that slice;
//             waits; copies its slices of the others.
//   scatter   Blocks are shards. As two-shot up to the sum.
//
// Two halves are why nobody waits at the end. Whoever is in call e + 2 has ended e + 1; there it has waited
// for all peers, which therefore had begun e + 1, and ended e (calls of a rank are one after the other). So
// nobody still reads what call e left in the half that e + 2 writes, and a flag is never more than one call
// ahead of who waits for it. That holds whatever the sizes, ways and numbers of CTAs are from call to call:
// every call exchanges at least the words, or packets, of CTA 0 with every peer; with shards of no rows, too.
//
// Templates, so that kernels and the threads of cmake/tests/test_all_reduce_protocol.cpp run the same code. A
// Cta is what they run on; all threads of one make the same calls:
//
//   index() -> int, barrier()
//   memory(): load_acquire and store_release as in host/protocol.hpp; and, which order nothing,
//     store_relaxed(word, value) and take_ticket(word), which adds 1 and returns what was there
//   each_peer(f) -> bool: f(peer) for every other rank, each by one thread; false where one returned false
//   once(f): one thread, best one that waits for no peer
//   wait(flag, epoch, word, peer) -> bool: bounded, until arrived(*flag, epoch), as an acquire; else false
//   send(slice, parity): of the partial or shard, to slot(peer, parity, rank) of every peer
//   send_to(owner, slice, parity): of the owner's block, to its slot(owner, parity, rank)
//   sum(slice, parity, publish): of the own block over ranks, in their order, from the own slots; to the
//     output and, if publish, to sums(peer, parity) of every peer
//   collect(slice, parity): from the own sums(rank, parity) to the output
//   keep(slice): from the shard to the output
//   take(sender, slice, parity): from slot(rank, parity, sender) to the output
//   send_packets(slice, parity, epoch), and sum_packets(slice, parity, epoch) -> bool, which waits
//
// Compiles for host and device, without CUDA too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/macros.hpp"
#include "host/protocol.hpp"

namespace tpk::all_reduce {

using protocol::kMaxRanks;
using protocol::Scope;

constexpr int kMaxCtas = 64;
constexpr int kUnitBytes = 16;             // data are stored in units; the last one may be partly filled
constexpr int64_t kPacketBytes = 2 << 20;  // of a half: the packets. Nothing else lies there, or data could
                                           // look like an epoch. Zero at first
constexpr int32_t kMostUnits = 1 << 27;    // so that sizes in elements, and ends of parts, fit 31 bits

enum class Way : int32_t { kPackets, kOneShot, kTwoShot, kGather, kScatter };

// Whether blocks are shards: any number of units each.
TPK_HD constexpr bool has_shards(Way way) { return way == Way::kGather || way == Way::kScatter; }

// Where a rank's allocation begins. All words are zero at first.
struct Page {
  static constexpr size_t kBytes = 16384;
  static constexpr int kEpoch = 0;
  static constexpr int kCounted = 32;  // on a line of its own
  // Words 640 to 911: scratch of fused_warm_up.
  static constexpr int kParts = 1024;  // [kMaxCtas][kMaxRanks]
  static constexpr int kSums = 2048;   // [kMaxCtas][kMaxRanks]

  uint32_t* words = nullptr;

  TPK_HD static Page at(uint64_t address) { return {reinterpret_cast<uint32_t*>(address)}; }

  // Of the last call. Written by whichever of its CTAs is the last to read it.
  TPK_HD uint32_t* epoch() const { return words + kEpoch; }
  // How many CTAs of a call have read it. Zero between calls.
  TPK_HD uint32_t* counted() const { return words + kCounted; }
  // CTA `cta` of rank `rank` has stored what it sends me. Its epoch, from its GPU.
  TPK_HD uint32_t* parts(int cta, int rank) const { return words + kParts + cta * kMaxRanks + rank; }
  // Two-shot: and its sums.
  TPK_HD uint32_t* sums(int cta, int rank) const { return words + kSums + cta * kMaxRanks + rank; }
  TPK_HD char* buffer() const { return reinterpret_cast<char*>(words) + kBytes; }
};
static_assert((Page::kSums + kMaxCtas * kMaxRanks) * sizeof(uint32_t) <= Page::kBytes,
              "The words must end before the buffer.");

// What is waited for. Rows and addends have the words of parts.
enum class Word : int32_t { kPart, kSums, kPacket, kRows, kAddend };

// Epochs are odd and even in turn, and never 0 again: that is what memory holds that was never written.
TPK_HD constexpr uint32_t next_epoch(uint32_t epoch) { return epoch == 0xffffffffu ? 2 : epoch + 1; }

// Whether a flag has the epoch, or is ahead by one call. Not "or later": CTAs of high numbers may have had no
// call for 2^31 epochs, and their flags must not look like some that are ahead.
TPK_HD constexpr bool arrived(uint32_t seen, uint32_t expected) {
  return seen == expected || seen == next_epoch(expected);
}

struct Slice {
  int32_t begin = 0;
  int32_t end = 0;
};

// Of each of n nearly equal parts, the last of which may be shorter or empty: whole lines of 128 bytes.
TPK_HD constexpr int32_t part_units(int32_t units, int32_t n) { return (units + n * 8 - 1) / (n * 8) * 8; }

// The same on every rank, but for `rank`. Every rank has a block: everything with packets and in one-shot,
// else one of its own. Units are counted block after block; each has as much room as the longest needs.
struct Call {
  Page pages[kMaxRanks];
  int32_t world = 1;
  int32_t rank = 0;
  Way way = Way::kOneShot;
  int32_t ctas = 1;
  int32_t units = 0;             // of the result of an all-reduce
  int32_t lengths[kMaxRanks]{};  // of blocks, where they are shards; else cut() fills them, too
  int32_t block_units = 0;       // room of a block
  int32_t block_pitch = 0;       // from the begin of one to that of the next
  int32_t slice_units = 0;       // of a block, that one CTA has
  int64_t half_bytes = 0;        // of each buffer

  // Fills what follows from the rest.
  void cut() {
    block_units = way == Way::kTwoShot ? part_units(units, world) : units;
    if (has_shards(way)) {
      int32_t longest = 0;
      for (int r = 0; r < world; ++r) longest = longest < lengths[r] ? lengths[r] : longest;
      block_units = part_units(longest, 1);
    }
    block_pitch = way == Way::kPackets || way == Way::kOneShot ? 0 : block_units;
    for (int r = 0; r < world && !has_shards(way); ++r) {
      const int32_t behind = units - begin(r);
      lengths[r] = behind < 0 ? 0 : least(behind, block_units);
    }
    slice_units = part_units(block_units, ctas);
  }
  TPK_HD static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
  TPK_HD int32_t begin(int owner) const { return owner * block_pitch; }
  TPK_HD Slice slice(int owner, int cta) const {
    const int32_t length = lengths[owner];
    return {begin(owner) + least(cta * slice_units, length),
            begin(owner) + least((cta + 1) * slice_units, length)};
  }
  TPK_HD int64_t slot_bytes() const { return int64_t{block_units} * kUnitBytes; }
  TPK_HD char* half(int rank, uint32_t parity) const { return pages[rank].buffer() + parity * half_bytes; }
  TPK_HD char* packets(int owner, uint32_t parity, int sender) const {
    return half(owner, parity) + 2 * sender * slot_bytes();
  }
  TPK_HD char* slot(int owner, uint32_t parity, int sender) const {
    return half(owner, parity) + kPacketBytes + sender * slot_bytes();
  }
  TPK_HD char* sums(int rank, uint32_t parity) const { return slot(rank, parity, world); }

  // Whether the halves hold what the call stores.
  bool fits() const {
    if (way == Way::kPackets) return 2 * world * slot_bytes() <= kPacketBytes && kPacketBytes <= half_bytes;
    const int64_t results = way == Way::kTwoShot ? int64_t{units} * kUnitBytes : 0;
    return kPacketBytes + world * slot_bytes() + results <= half_bytes;
  }
};

// As many CTAs as have work for `threads` threads each.
TPK_HD constexpr int32_t ctas_for(int32_t units, int32_t threads) {
  const int32_t ctas = (units + threads - 1) / threads;
  return ctas < 1 ? 1 : ctas < kMaxCtas ? ctas : kMaxCtas;
}

// The other ranks, each once: the next one first, so that not all store to one at a time.
TPK_HD int peer_of(const Call& c, int step) {
  const int peer = c.rank + step;
  return peer < c.world ? peer : peer - c.world;
}

// ---- One CTA's part of a call. False: a wait took too long, and the output must not be used.

namespace detail {

TPK_HD uint32_t* flag_of(const Page& page, Word word, int cta, int rank) {
  return word == Word::kSums ? page.sums(cta, rank) : page.parts(cta, rank);
}

// Tells every peer that what this CTA stored to it is there.
template <class Cta>
TPK_HD void raise(Cta& cta, const Call& c, Word word, uint32_t epoch) {
  cta.barrier();  // all threads have stored; a release by one of them is one of all
  cta.each_peer([&](int peer) {
    uint32_t* const flag = flag_of(c.pages[peer], word, cta.index(), c.rank);
    cta.memory().template store_release<Scope::kSys>(flag, epoch);
    return true;
  });
}

// Waits for the same of every peer.
template <class Cta>
TPK_HD bool await(Cta& cta, const Call& c, Word word, uint32_t epoch) {
  const Page& mine = c.pages[c.rank];
  const bool all = cta.each_peer(
      [&](int peer) { return cta.wait(flag_of(mine, word, cta.index(), peer), epoch, word, peer); });
  cta.barrier();  // what one thread acquired, all have
  return all;
}

// Behind a barrier, so that all threads of the CTA have read the epoch: the last CTA that comes here counts
// it, for later calls, whose kernels come behind this one. That orders nothing, and need not: a read that has
// returned sees no later write. Long before the end, where it would take time.
template <class Cta>
TPK_HD void count(Cta& cta, const Call& c, uint32_t epoch) {
  cta.once([&] {
    const Page& mine = c.pages[c.rank];
    if (cta.memory().take_ticket(mine.counted()) + 1 != static_cast<uint32_t>(c.ctas)) return;
    cta.memory().store_relaxed(mine.counted(), 0);
    cta.memory().store_relaxed(mine.epoch(), epoch);
  });
}

template <class Cta>
TPK_HD bool packets(Cta& cta, const Call& c, uint32_t epoch) {
  const Slice mine = c.slice(c.rank, cta.index());
  cta.send_packets(mine, epoch % 2, epoch);
  cta.barrier();
  count(cta, c, epoch);
  return cta.sum_packets(mine, epoch % 2, epoch);
}

template <class Cta>
TPK_HD bool one_shot(Cta& cta, const Call& c, uint32_t epoch) {
  const Slice mine = c.slice(c.rank, cta.index());
  cta.send(mine, epoch % 2);
  raise(cta, c, Word::kPart, epoch);
  count(cta, c, epoch);
  if (!await(cta, c, Word::kPart, epoch)) return false;
  cta.sum(mine, epoch % 2, false);
  return true;
}

// Every block of the partial goes to its owner; the own one comes from everyone.
template <class Cta>
TPK_HD bool exchange(Cta& cta, const Call& c, Word word, uint32_t epoch) {
  TPK_ONE_COPY
  for (int step = 1; step < c.world; ++step) {
    const int owner = peer_of(c, step);
    cta.send_to(owner, c.slice(owner, cta.index()), epoch % 2);
  }
  raise(cta, c, word, epoch);
  count(cta, c, epoch);
  return await(cta, c, word, epoch);
}

template <class Cta>
TPK_HD bool two_shot(Cta& cta, const Call& c, uint32_t epoch) {
  const uint32_t parity = epoch % 2;
  if (!exchange(cta, c, Word::kPart, epoch)) return false;
  cta.sum(c.slice(c.rank, cta.index()), parity, true);
  raise(cta, c, Word::kSums, epoch);
  if (!await(cta, c, Word::kSums, epoch)) return false;
  TPK_ONE_COPY
  for (int step = 1; step < c.world; ++step) cta.collect(c.slice(peer_of(c, step), cta.index()), parity);
  return true;
}

template <class Cta>
TPK_HD bool scatter(Cta& cta, const Call& c, uint32_t epoch) {
  if (!exchange(cta, c, Word::kAddend, epoch)) return false;
  cta.sum(c.slice(c.rank, cta.index()), epoch % 2, false);
  return true;
}

template <class Cta>
TPK_HD bool gather(Cta& cta, const Call& c, uint32_t epoch) {
  const Slice mine = c.slice(c.rank, cta.index());
  cta.send(mine, epoch % 2);
  raise(cta, c, Word::kRows, epoch);
  count(cta, c, epoch);
  cta.keep(mine);
  if (!await(cta, c, Word::kRows, epoch)) return false;
  TPK_ONE_COPY
  for (int step = 1; step < c.world; ++step) {
    const int sender = peer_of(c, step);
    cta.take(sender, c.slice(sender, cta.index()), epoch % 2);
  }
  return true;
}

}  // namespace detail

template <Way kWay, class Cta>
TPK_HD bool run(Cta& cta, const Call& c) {
  const uint32_t epoch = next_epoch(cta.memory().template load_acquire<Scope::kGpu>(c.pages[c.rank].epoch()));
  if constexpr (kWay == Way::kPackets) {
    return detail::packets(cta, c, epoch);
  } else if constexpr (kWay == Way::kOneShot) {
    return detail::one_shot(cta, c, epoch);
  } else if constexpr (kWay == Way::kTwoShot) {
    return detail::two_shot(cta, c, epoch);
  } else if constexpr (kWay == Way::kGather) {
    return detail::gather(cta, c, epoch);
  } else {
    return detail::scatter(cta, c, epoch);
  }
}

}  // namespace tpk::all_reduce

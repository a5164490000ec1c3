// What a product can be tied to while it runs: operand rows, or blocks of factors, that still arrive, results
// that someone waits for, and rows whose sum over ranks it ends. A plain product has none of them. Pure C++.
#pragma once

#include <cstdint>

#include "host/macros.hpp"
#include "kernels/gemm_types.hpp"

namespace tpk {

constexpr int kMaxChunks = 64;  // blocks of rows that arrive, or leave, together
constexpr int kMaxRanks = 16;
constexpr int kMaxPairs = 4;    // of factors, whose products are summed
constexpr int kMaxBlocks = 32;  // of factors that arrive

// Whose rows of M are whose: rank r has [begin(r), row_end[r]).
struct RankRows {
  int32_t world = 0;  // 0: there are no ranks
  int32_t rank = 0;   // this one
  int32_t row_end[kMaxRanks] = {};

  int32_t begin(int32_t r) const { return r == 0 ? 0 : row_end[r - 1]; }
};

struct RowSpan {
  int32_t begin = 0;
  int32_t end = 0;
};

// Arrival: the rows [row_end[c - 1], row_end[c]) of A, or a slab of slab_k elements of K of them, are written
// by someone else, who raises flags[c * slabs + slab] to *epoch afterwards (release, system scope). The
// kernel reads no element of a chunk before its flag has been seen, so flags and rows may be raised in any
// order; but a schedule whose first tiles need the last chunks only waits.
//
// With `ranks` tiles are taken in the order in which shards land: own rows, those of rank + 1, and so on.
// With `own` the own rows are read from there (it must lie in memory as TMA takes it, K contiguous), so that
// a tile that lies in them waits for nothing; one that straddles reads A, and waits for the own chunk too.
struct ArrivalHook {
  const uint32_t* flags = nullptr;  // null: A is complete
  const uint32_t* epoch = nullptr;  // in device memory, so that a CUDA graph may be replayed
  int32_t num_chunks = 0;
  int32_t slabs = 1;
  int32_t slab_k = 0;  // a multiple of 64, or 0: all of K
  int32_t row_end[kMaxChunks] = {};
  RankRows ranks;
  Matrix own;           // data null: none
  bool landed = false;  // a product before this one has seen every flag: planned as one without an arrival
};

// Block arrival: the product is a sum over pairs of factors, some of which are written by someone else. Every
// a (side 0) is cut into blocks of extent[0] rows, every b (side 1) into blocks of extent[1] columns. Behind
// block i of a factor of pair p flags[first[side][p] + i] is raised to *epoch (release, system scope); first
// is -1 where all of it was there before. The kernel reads no element of a block before its flag has been
// seen.
struct BlockArrival {
  const uint32_t* flags = nullptr;  // null: all is there
  const uint32_t* epoch = nullptr;
  int32_t extent[2] = {};
  int32_t count[2] = {};  // blocks of a factor
  int32_t first[2][kMaxPairs] = {{-1, -1, -1, -1}, {-1, -1, -1, -1}};
  int32_t from[2][kMaxPairs] = {};  // ranks, for reports
  bool by_columns =
      false;  // blocks of b are what comes one after the other: tiles are taken column by column
};

// The words [begin, end) of the blocks that `extent` rows of an a, columns of a b, from `begin` on lie in,
// for the factor of that pair. None where all of it was there before.
struct BlockWords {
  int32_t begin = 0;
  int32_t end = 0;
};

TPK_HD BlockWords block_words(const BlockArrival& h, int side, int pair, int32_t begin, int32_t extent) {
  int32_t word = h.first[side][pair];
  if (word < 0) return {};
  const int32_t end_word = word + h.count[side];
  for (; begin >= h.extent[side]; begin -= h.extent[side]) ++word;
  BlockWords words{word, word};
  for (begin += extent; begin > 0 && words.end < end_word; begin -= h.extent[side]) ++words.end;
  return words;
}

// Who raises a word; -1: nobody.
TPK_HD int sender_of_block(const BlockArrival& h, int word) {
  int rank = -1;
  for (int i = 0; i < 2 * kMaxPairs; ++i) {
    const int side = i / kMaxPairs;
    const int first = h.first[side][i % kMaxPairs];
    if (first >= 0 && word >= first && word < first + h.count[side]) rank = h.from[side][i % kMaxPairs];
  }
  return rank;
}

// A departure whose tiles are stored in other ranks' memory, not in `others`: no copy engine moves them. All
// of these are addressed by row of M, and have rows as far apart as `others` has.
struct StoredHook {
  bool on = false;
  void* slots[kMaxRanks] = {};  // for what is partial of a rank's rows; own: unused
  int32_t num_sums = 0;
  void* sums[kMaxRanks] = {};  // for the sums of own rows, beside the call's out
};

// Departure: rows of the result that belong to other ranks go, rounded, to `others` [M, N]; the call's out,
// and residual, are the own rows alone, [own rows, N], and only they are finished: the sum over ranks in
// their order, the own product in its place, then bias, then residual. What rank r computed of the own rows
// lies, in out's dtype, at `slots` + r * slot_stride; its rows up to own_chunk_end[i] (from row_end of the
// one before) are there when arrived[r * own_chunks + i] has reached *epoch. Rows of all of these have room
// for whole units of 16 bytes, and begin at one; those of out and of the residual are as far apart as a
// slot's. One batch. Rows are computed block after block, as `blocks` names them: all rows, each block those
// of one rank, no tile with rows of two. A run of own blocks gets tickets behind all that stands in front of
// it, so that no wait for a slot keeps another rank waiting (host/progress.hpp).
struct DepartureHook {
  RankRows ranks;  // world 0: everything stays
  Matrix others;
  const void* slots = nullptr;
  int64_t slot_stride = 0;  // bytes
  int64_t row_stride = 0;
  const uint32_t* arrived = nullptr;
  const uint32_t* epoch = nullptr;
  int32_t own_chunks = 0;
  int32_t own_chunk_end[kMaxChunks] = {};  // counted from the first own row
  int32_t num_blocks = 0;
  RowSpan blocks[kMaxChunks] = {};
  uint32_t* ticket = nullptr;  // 0 when the product begins; null: the launcher makes one
  StoredHook stored;
};

// Instead of bells, where tiles are stored in other ranks' memory: *epoch is written (release, system scope)
// to word[c] of the pages of ranks [first[c], end[c]), but not of this one.
struct PeerWords {
  const uint32_t* epoch = nullptr;  // null: there are bells
  int32_t rank = 0;
  uint32_t* pages[kMaxRanks] = {};
  int16_t word[kMaxChunks] = {};
  int8_t first[kMaxChunks] = {};
  int8_t end[kMaxChunks] = {};
};

// Doorbell: when every tile that has rows of a chunk is in memory, bells[c] is set to 1 (release, system
// scope). Counters must be zero before the first call and are zero after each. Chunks as above, of the
// output's rows of batch 0; batches must then be one.
struct DoorbellHook {
  uint32_t* counters = nullptr;  // null: nobody waits
  uint32_t* bells = nullptr;
  int32_t num_chunks = 0;
  int32_t silent_begin = 0;  // chunks [silent_begin, silent_end) have no bell: nobody waits for them
  int32_t silent_end = 0;
  int32_t row_end[kMaxChunks] = {};
  uint32_t target[kMaxChunks] = {};  // filled by the launcher
  PeerWords peers;
};

struct GemmHooks {
  ArrivalHook arrival;
  BlockArrival blocks;
  DoorbellHook doorbell;
  DepartureHook departure;
};

}  // namespace tpk

// What a rank sends to whom, in which order and in which chunks. Host only; host/protocol.hpp has the words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "host/check.hpp"
#include "host/problem.hpp"
#include "host/protocol.hpp"

namespace tpk::protocol {

// The peer that a rank sends to in step 1, 2, ..., world - 1. A gather goes to rank - 1 first, so that every
// rank receives the shard of rank + 1 first; a scatter goes to rank + 1 first, whose tiles are computed
// first.
constexpr int gather_peer(int rank, int step, int world) { return (rank - step + world) % world; }
constexpr int scatter_peer(int rank, int step, int world) { return (rank + step) % world; }

// Blocks of rows that travel, and are waited for, as one. Numbered shard after shard.
struct ChunkList {
  int32_t count = 0;
  int32_t first[kMaxRanks + 1] = {};  // chunks of rank r: [first[r], first[r + 1]); none if it has no rows
  int32_t row_end[kMaxChunks] = {};   // rows of chunk c: [begin(c), row_end[c])

  TPK_HD int32_t begin(int32_t chunk) const { return chunk == 0 ? 0 : row_end[chunk - 1]; }
  TPK_HD int32_t rows(int32_t chunk) const { return row_end[chunk] - begin(chunk); }
  int32_t of_rank(int32_t r) const { return first[r + 1] - first[r]; }
  int32_t owner(int32_t chunk) const {
    int32_t r = 0;
    while (first[r + 1] <= chunk) ++r;
    return r;
  }
};

constexpr int64_t kChunkRows = 256;  // chunks end where tiles do
// A copy and its flag cost about 10 us beside what they move, which below 8 MiB is most of it.
constexpr int64_t kLeastChunkBytes = int64_t{8} << 20;

// Cuts every shard into chunks of nearly equal size: multiples of kChunkRows rows except a shard's last one,
// no less than least_bytes each unless the whole shard is less (the last one may lack less than kChunkRows
// rows), no more than most_of_rank of a shard, and no more than kMaxChunks in all. Throws
// std::invalid_argument with a sentence where an argument makes no sense.
inline ChunkList cut_chunks(std::span<const int64_t> shard_rows, int64_t row_bytes,
                            int64_t least_bytes = kLeastChunkBytes, int64_t most_of_rank = kMaxChunks) {
  const auto world = static_cast<int64_t>(shard_rows.size());
  tpk::detail::require(world >= 1 && world <= kMaxRanks, [&] {
    return "shard_rows must name 1 to " + std::to_string(kMaxRanks) + " ranks, but it names " +
           std::to_string(world) + ".";
  });
  tpk::detail::check_extent("row_bytes", row_bytes, 0);
  tpk::detail::check_extent("least_bytes", least_bytes, 1);
  tpk::detail::check_extent("most_of_rank", most_of_rank, 1);
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  int64_t total = 0;
  for (int64_t r = 0; r < world; ++r) {
    tpk::detail::require(shard_rows[r] >= 0, [&] {
      return "shard_rows must not be negative, but rank " + std::to_string(r) + " has " +
             std::to_string(shard_rows[r]) + " rows.";
    });
    tpk::detail::require(shard_rows[r] <= kMostRows - total, [&] {
      return "shard_rows must add up to less than 2^31, but ranks 0 to " + std::to_string(r) +
             " have more rows: split the call.";
    });
    total += shard_rows[r];
  }
  // How many chunks a shard becomes if none may be less than `blocks` times kChunkRows rows.
  const auto chunks_of = [](int64_t rows, int64_t blocks) {
    return rows == 0 ? 0 : max64(1, rows / (blocks * kChunkRows));
  };
  const auto too_many = [&](int64_t blocks) {
    int64_t count = 0;
    bool of_one = false;
    for (const int64_t rows : shard_rows) {
      const int64_t chunks = chunks_of(rows, blocks);
      of_one = of_one || chunks > most_of_rank;
      count += chunks;
    }
    return of_one || count > kMaxChunks;
  };
  const int64_t least_rows = row_bytes == 0 ? kMostRows : min64(kMostRows, ceil_div(least_bytes, row_bytes));
  int64_t blocks = ceil_div(least_rows, kChunkRows);
  int64_t enough = ceil_div(kMostRows, kChunkRows);  // one chunk a shard
  while (blocks < enough) {                          // to the least number that is enough
    const int64_t middle = (blocks + enough) / 2;
    if (too_many(middle)) {
      blocks = middle + 1;
    } else {
      enough = middle;
    }
  }

  ChunkList list;
  int64_t begin = 0;
  for (int64_t r = 0; r < world; ++r) {
    list.first[r] = list.count;
    const int64_t rows = shard_rows[r];
    const int64_t chunks = chunks_of(rows, blocks);
    for (int64_t c = 1; c <= chunks; ++c) {
      const int64_t end = min64(rows, ceil_div(rows, kChunkRows) * c / chunks * kChunkRows);
      list.row_end[list.count++] = static_cast<int32_t>(begin + end);
    }
    begin += rows;
  }
  list.first[world] = list.count;
  return list;
}

// A scatter's chunks: of the result, a row of which has row_bytes. So few of a shard that each sender has its
// own word for every one. Smaller ones than a gather's, since nothing leaves before all of it is computed;
// less so where sums go to all, as there must be enough to compute while a chunk travels. All-reduces on two
// H200: 2048 x 8192 in chunks of 4 MiB takes 254 us, of 8 MiB 234; 1024 x 12288 in two chunks a rank 288, in
// one 335. stored: by the product itself (StoredHook), so that a chunk is no copy. 2048 x 4096 on two H200 in
// chunks of 4 MiB takes 106 us, of 2 MiB 120.
constexpr int64_t kLeastDepartingBytes = int64_t{4} << 20;
constexpr int64_t kLeastSumBytes = int64_t{6} << 20;
constexpr int64_t kLeastStoredBytes = int64_t{4} << 20;
inline ChunkList cut_departing(std::span<const int64_t> shard_rows, int64_t row_bytes, bool sums,
                               bool stored) {
  constexpr int64_t kMost = 4;
  const auto world = max64(1, static_cast<int64_t>(shard_rows.size()));
  const int64_t least = stored ? kLeastStoredBytes : sums ? kLeastSumBytes : kLeastDepartingBytes;
  return cut_chunks(shard_rows, row_bytes, least, max64(1, min64(kMost, kMaxChunks / world)));
}

// In which order a rank computes the chunks of a scatter, and sends those of others: rank + 1's first, and so
// on, its own last. If the sums of own chunks go on to all ranks: the first chunk of every rank, then the
// second ones, and so on, but own ones one step behind, so that what others computed of them arrives while
// their second ones are computed. In both, what stands in front of own chunk i holds all that other ranks
// need for their chunk i, which is why nobody waits for ever.
inline std::vector<int32_t> leaving_order(const ChunkList& list, int rank, int world, bool sums) {
  std::vector<int32_t> order;
  if (!sums) {
    for (int step = 1; step <= world; ++step) {
      const int owner = scatter_peer(rank, step, world);
      for (int32_t c = list.first[owner]; c < list.first[owner + 1]; ++c) order.push_back(c);
    }
    return order;
  }
  const auto take = [&](int owner, int32_t i) {
    if (i >= 0 && i < list.of_rank(owner)) order.push_back(list.first[owner] + i);
  };
  int32_t most = 0;
  for (int r = 0; r < world; ++r) most = std::max(most, list.of_rank(r));
  for (int32_t i = 0; i <= most; ++i) {
    for (int step = 1; step < world; ++step) take(scatter_peer(rank, step, world), i);
    take(rank, i - 1);
  }
  return order;
}

// Which of the owner's `arrived` words says that `chunk`, of the owner's rows, is there from `sender`.
inline int32_t arrived_index(const ChunkList& list, int owner, int sender, int32_t chunk) {
  return sender * list.of_rank(owner) + chunk - list.first[owner];
}

// Who a rank that stores tiles in its peers' memory tells of a chunk, and by which word of the page: the
// owner of its rows, or, of the sums of its own rows, everybody else.
struct Told {
  int32_t first;  // peers [first, end), but not the rank itself
  int32_t end;
  int32_t word;
};
inline Told told_of(const ChunkList& list, int rank, int world, int32_t chunk) {
  const int32_t owner = list.owner(chunk);
  if (owner == rank) return {0, world, Page::kSums + chunk};
  return {owner, owner + 1, Page::kArrived + arrived_index(list, owner, rank, chunk)};
}

// The pushes of one call, in order. An Engine enqueues them (or does them):
//   push(peer, chunk, index): rows of the chunk into the peer's buffer (scatter: into my slot there), and
//     behind them my epoch into its arrived[index]
//   scatter: use(stream): what follows goes to that one. Chunks take 0 and 1 in turn, sums take 2, since who
//     waits for sums must not keep chunks back. A gather's take one: two chunks that share the link both come
//     late, 17 us of 274 on two H200 where the link is what counts
//   scatter: take_bell(chunk) -> bool: from here on the rows of the chunk are there (false ends the call)
//   sums: send_sums(chunk): own rows of the result into every peer's buffer of results, a flag behind each
template <class Engine>
void push_gather(Engine& engine, const ChunkList& chunks, int rank, int world) {
  for (int step = 1; step < world; ++step) {
    const int peer = gather_peer(rank, step, world);
    for (int32_t c = chunks.first[rank]; c < chunks.first[rank + 1]; ++c) {
      engine.push(peer, c, c);
    }
  }
}

// order: leaving_order(chunks, rank, world, sums).
template <class Engine>
bool push_scatter(Engine& engine, const ChunkList& chunks, const std::vector<int32_t>& order, int rank,
                  bool sums) {
  int sent = 0;
  for (const int32_t c : order) {
    const int owner = chunks.owner(c);
    if (owner == rank && !sums) continue;
    engine.use(owner == rank ? 2 : sent++ % 2);
    if (!engine.take_bell(c)) return false;
    if (owner == rank) {
      engine.send_sums(c);
    } else {
      engine.push(owner, c, arrived_index(chunks, owner, rank, c));
    }
  }
  return true;
}

}  // namespace tpk::protocol

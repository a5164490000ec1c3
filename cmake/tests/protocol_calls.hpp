// The calls that ranks of host/protocol.hpp make when they run as threads (protocol_ranks.hpp), and the tiles
// of their products. A row of what travels is one word.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include "block_tables.hpp"
#include "host/pushes.hpp"
#include "host/tile_order.hpp"

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
  kFirstBlockOnly,   // CTAs wait for the first of the blocks that a tile reads of a factor
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
                                      "first_block_only",
                                      "relaxed_stores",
                                      "relaxed_loads"};

enum class Kind { kGather, kScatter, kSum, kBlocks };
constexpr int kNumKinds = 4;
enum class Kinds { kGather, kScatter, kSum, kBlocks, kAll };  // of a run's calls; all: in turn
enum class Departures { kCopied, kStored, kBoth };            // of scatters and sums; both: in turn
enum class Stop { kNever, kBeforeEnter, kPushes, kProduct };

struct Options {
  int world = 8;
  int ctas = 2;
  int calls = 100;
  Kinds kinds = Kinds::kAll;
  Departures departures = Departures::kBoth;
  uint32_t first_epoch = 0;
  uint32_t seed = 1;
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  Mutation mutation = Mutation::kNone;
  bool ends_when_wrong = false;
  bool equal_shards = false;  // of 2 chunks; blocks: from all to all, the same in every call
  Stop stop = Stop::kNever;   // what stop_rank does no more in stop_call
  int stop_rank = 0;
  int stop_call = 0;
};

constexpr int64_t kMostShardRows = 700;    // 2 chunks and a bit
constexpr int64_t kMostExtent = 1100;      // of a factor: 5 blocks
constexpr int64_t kMostShortExtent = 200;  // of those on one side
constexpr uint32_t kPoison = 0xffffffff;
constexpr int kTileRows = 96;
constexpr int kTileColumns = 192;  // of blocks

// Slots and results of a sum; slots of factors.
constexpr int64_t buffer_rows(int world) {
  return max64(2 * world * kMostShardRows, kMaxPairs * (kMostExtent + kMostShortExtent));
}

// Factors in blocks on all ranks. The buffer: slots of left ones, then of right ones.
struct BlockCall {
  blocks::Holders holders;
  blocks::Cut cut;
  int64_t extent[2] = {};

  int64_t slot(blocks::Side side, int64_t i) const {
    return (side == blocks::kLeft ? 0 : cut.slots[blocks::kLeft] * extent[blocks::kLeft]) + i * extent[side];
  }
};

// One call, the same on every rank.
struct Call {
  Kind kind = Kind::kGather;
  bool stored = false;  // a scatter or sum whose rows CTAs write to other ranks' buffers, without an engine
  bool reads = true;    // a gather whose rows nobody reads: a product without columns
  std::vector<int64_t> rows;
  ChunkList chunks;
  BlockCall factors;

  int begin(int rank) const { return chunks.begin(chunks.first[rank]); }
};

inline BlockCall make_block_call(const Options& o, Random& random) {
  BlockCall call;
  const auto least_bytes = static_cast<int64_t>(random() % 1500) + 1;
  const bool short_side = random() % 2 != 0;
  for (const bool side : {false, true}) {
    const auto most = static_cast<uint32_t>(side == short_side ? kMostShortExtent : kMostExtent);
    call.extent[side] = o.equal_shards ? 300 : static_cast<int64_t>(random() % most) + 1;
  }
  call.holders = o.equal_shards      ? blocks::test::from_all(o.world)
                 : random() % 4 == 0 ? blocks::test::of_squares(o.world)
                                     : blocks::test::at_random(o.world, random);
  call.cut = blocks::cut_blocks(call.holders, call.extent[0], call.extent[1], 1, 4, least_bytes);
  return call;
}

inline Call make_call(const Options& o, int index) {
  Random random(o.seed * 7919u + static_cast<uint32_t>(index) + 1);
  random.discard(3);
  Call call;
  call.kind = static_cast<Kind>(o.kinds == Kinds::kAll ? index % kNumKinds : static_cast<int>(o.kinds));
  if (call.kind == Kind::kBlocks) {
    call.factors = make_block_call(o, random);
    return call;
  }
  const bool scatter = call.kind != Kind::kGather;
  call.stored = scatter && (o.departures == Departures::kStored ||
                            (o.departures == Departures::kBoth && random() % 2 != 0));
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

struct Tile {
  int64_t begin;
  int64_t end;
  int owner = 0;  // of a scatter's
  // Of factors in blocks: columns, and the steps that are multiplied.
  int64_t first_column = 0;
  int64_t end_column = 0;
  int64_t first_step = 0;
  int64_t end_step = 0;
};

// Blocks: as the kernel places them. Every third is cut along K, as schedules do.
inline std::vector<Tile> block_tiles(const BlockCall& call) {
  std::vector<Tile> tiles;
  const Problem problem{call.extent[blocks::kLeft], call.extent[blocks::kRight], 1, 1};
  const TileShape shape{kTileRows, kTileColumns, 1};
  const int64_t group = call.cut.by_columns ? max64(1, tiles_m(problem, shape)) : 8;
  const TileOrder order = make_tile_order(problem, shape, group);
  for (int64_t i = 0; i < order.size(); ++i) {
    const TileCoord at = order.at(i);
    const int64_t row = at.m * shape.bm;
    const int64_t column = at.n * shape.bn;
    const int64_t cut = i % 3 == 0 ? i % call.holders.steps : 0;
    const Tile whole{row,
                     min64(row + shape.bm, problem.m),
                     0,
                     column,
                     min64(column + shape.bn, problem.n),
                     cut,
                     call.holders.steps};
    tiles.push_back(whole);
    if (cut == 0) continue;
    tiles.push_back(whole);
    tiles.back().first_step = 0;
    tiles.back().end_step = cut;
  }
  return tiles;
}

// Gather: rows of M in the order in which they arrive. Scatter, sum: chunk after chunk, in `order`.
inline std::vector<Tile> make_tiles(const Call& call, int rank, const std::vector<int32_t>& order) {
  if (call.kind == Kind::kBlocks) return block_tiles(call.factors);
  std::vector<Tile> tiles;
  const ChunkList& chunks = call.chunks;
  if (call.kind != Kind::kGather) {
    for (const int32_t c : order) {
      const int owner = chunks.owner(c);
      const int64_t end = chunks.row_end[c] - call.begin(owner);
      for (int64_t at = chunks.begin(c) - call.begin(owner); at < end; at += kTileRows) {
        tiles.push_back({at, min64(at + kTileRows, end), owner});
      }
    }
    return tiles;
  }
  const int64_t total = chunks.count == 0 ? 0 : chunks.row_end[chunks.count - 1];
  const int64_t count = ceil_div(total, kTileRows);
  const int64_t start = ceil_div(call.begin(rank), kTileRows);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t at = (start + t) % count * kTileRows;
    tiles.push_back({at, min64(at + kTileRows, total)});
  }
  return tiles;
}

}  // namespace tpk::protocol::test

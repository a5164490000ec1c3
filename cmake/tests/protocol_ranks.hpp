// Ranks of host/protocol.hpp as threads: each has a main stream, a copy engine of three streams and some
// CTAs.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "protocol_group.hpp"

namespace tpk::protocol::test {

class Rank {
 public:
  Rank(Group& group, int rank)
      : g_(group),
        o_(group.o),
        rank_(rank),
        memory_{static_cast<uint64_t>(o_.timeout.count()), o_.mutation == Mutation::kRelaxedStores,
                o_.mutation == Mutation::kRelaxedLoads},
        fork_(4 + o_.ctas),
        computed_(1 + o_.ctas),
        joined_(4),
        own_(2 * kMostExtent),
        out_(kMostShardRows),
        send_(static_cast<size_t>(o_.world) * kMostShardRows) {
    threads_.emplace_back([this] { run_main(); });
    for (int stream = 0; stream < 3; ++stream) threads_.emplace_back([this, stream] { run_engine(stream); });
    for (int c = 0; c < o_.ctas; ++c) threads_.emplace_back([this, c] { run_cta(c); });
  }

 private:
  bool mutated(Mutation mutation) const { return o_.mutation == mutation; }
  bool stops(Stop stop) const { return o_.stop == stop && o_.stop_rank == rank_ && o_.stop_call == index_; }
  const Page& page(int rank) const { return g_.pages[static_cast<int>(call_.kind)][rank]; }
  uint32_t* buffer(int rank) const { return static_cast<uint32_t*>(page(rank).buffer()); }
  uint32_t* slot(int owner, int sender) const { return buffer(owner) + sender * kMostShardRows; }
  uint32_t* results(int rank, int owner) const { return slot(rank, o_.world + owner); }
  Random random_of(int thread) const { return Random(o_.seed * 131u + rank_ * 17u + thread + 1u); }

  void fail(const char* thread, const Missed& missed) {
    failed_.store(true);
    g_.fail({rank_, thread, index_, missed});
  }
  void expect(uint32_t got, uint32_t want) {
    if (got != want) g_.wrong.fetch_add(1, std::memory_order_relaxed);
  }

  // ---- The main stream.

  void run_main() {
    Random random = random_of(0);
    for (index_ = 0; index_ < o_.calls; ++index_) {
      if (!begin_call(random)) break;
      fork_.arrive_and_wait();
      if (mutated(Mutation::kEnterBeforeRead)) say_next();
      computed_.arrive_and_wait();
      const bool stops_now = stops(Stop::kProduct) || stops(Stop::kPushes);
      if (call_.kind == Kind::kSum && !failed_.load() && !stops_now) collect(random);
      // What was read is gone. Rows that nobody waited for may still be on their way.
      if (call_.reads && !failed_.load() && !stops_now)
        std::fill_n(buffer(rank_), buffer_rows(o_.world), kPoison);
      if (mutated(Mutation::kEnterBeforeJoin)) say_next();
      joined_.arrive_and_wait();
      if (failed_.load() || stops(Stop::kPushes) || (call_.stored && stops(Stop::kProduct))) break;
      std::fill(own_.begin(), own_.end(), kPoison);
      std::fill(out_.begin(), out_.end(), kPoison);
      std::fill(send_.begin(), send_.end(), kPoison);
      pause(random);
    }
    ends_ = true;
    fork_.arrive_and_wait();
  }

  bool begin_call(Random& random) {
    if (stops(Stop::kBeforeEnter) || (o_.ends_when_wrong && g_.wrong.load() != 0)) return false;
    call_ = make_call(o_, index_);
    const bool of_blocks = call_.kind == Kind::kBlocks;
    if (of_blocks) arrival_ = blocks::arrival_of(call_.factors.holders, call_.factors.cut, rank_);
    const int64_t rows = of_blocks ? 2 * kMostExtent : call_.rows[rank_];
    for (int64_t row = 0; row < rows; ++row) own_[row] = value_of(index_, rank_, row);
    plan_tiles();
    pause(random, true);
    Missed missed;
    if (mutated(Mutation::kSkipEntered)) {
      advance_epoch(memory_, page(rank_), epoch_of(memory_, page(rank_)) + 1);
    } else if (!enter(memory_, pages(), o_.world, rank_, &missed)) {
      fail("main", missed);
      return false;
    }
    return true;
  }

  // What enter of the next call would say.
  void say_next() {
    for (int peer = 0; peer < o_.world; ++peer) {
      if (peer != rank_) publish_entered(memory_, page(peer), rank_, epoch_of(memory_, page(rank_)) + 1);
    }
  }

  const Page* pages() const { return g_.pages[static_cast<int>(call_.kind)].data(); }

  void plan_tiles() {
    tiles_.clear();
    next_tile_.store(0, std::memory_order_relaxed);
    if (stops(Stop::kProduct) || !call_.reads) return;
    order_ = leaving_order(call_.chunks, rank_, o_.world, call_.kind == Kind::kSum);
    tiles_ = make_tiles(call_, rank_, order_);
  }

  // ---- The copy engine: a thread for each stream, which does what is enqueued on it.

  struct Engine {
    Rank& r;
    int stream;
    Random random;
    int current = 0;
    Missed missed{};

    bool mine() const { return current == stream; }
    void use(int which) { current = which; }
    void move(int peer, int index, uint32_t* to, const uint32_t* from, int64_t rows) {
      pause(random);
      if (r.mutated(Mutation::kFlagBeforeRows)) {
        raise(peer, index);
        pause(random, true);
      }
      std::memcpy(to, from, rows / 2 * 4);
      pause(random, r.mutated(Mutation::kEnterBeforeJoin));
      std::memcpy(to + rows / 2, from + rows / 2, (rows - rows / 2) * 4);
    }
    void push(int peer, int chunk, int index) {
      if (!mine()) return;
      const ChunkList& chunks = r.call_.chunks;
      const int begin = chunks.begin(chunk);
      if (r.call_.kind == Kind::kGather) {
        move(peer, index, r.buffer(peer) + begin, r.own_.data() + (begin - r.call_.begin(r.rank_)),
             chunks.rows(chunk));
      } else {
        const int in_shard = begin - r.call_.begin(peer);
        move(peer, index, r.slot(peer, r.rank_) + in_shard, r.send_.data() + peer * kMostShardRows + in_shard,
             chunks.rows(chunk));
      }
      raise(peer, index);
    }
    void push(const blocks::Push& p) {
      if (!mine()) return;
      const BlockCall& f = r.call_.factors;
      const auto peer = static_cast<int>(p.peer);
      const auto index = static_cast<int>(f.cut.word(p.side, p.slot, p.block));
      const int64_t begin = p.block * f.cut.extent[p.side];
      const int64_t end = min64(begin + f.cut.extent[p.side], f.extent[p.side]);
      move(peer, index, r.buffer(peer) + f.slot(p.side, p.slot) + begin,
           r.own_.data() + p.side * kMostExtent + begin, end - begin);
      raise(peer, index);
    }
    bool take_bell(int chunk) {
      if (!mine()) return true;
      if (r.mutated(Mutation::kSendBeforeBell)) return true;
      return protocol::take_bell(r.memory_, r.page(r.rank_), chunk, r.rank_, &missed);
    }
    void send_sums(int chunk) {
      if (!mine()) return;
      const ChunkList& chunks = r.call_.chunks;
      const int in_shard = chunks.begin(chunk) - r.call_.begin(r.rank_);
      for (int step = 1; step < r.o_.world; ++step) {
        const int peer = gather_peer(r.rank_, step, r.o_.world);
        pause(random);
        std::memcpy(r.results(peer, r.rank_) + in_shard, r.out_.data() + in_shard, chunks.rows(chunk) * 4);
        r.memory_.template store_release<Scope::kSys>(r.page(peer).sums(chunk),
                                                      epoch_of(r.memory_, r.page(r.rank_)));
      }
    }
    void raise(int peer, int index) {
      raise_arrived(r.memory_, r.page(r.rank_), r.page(peer), index);
      pause(random);
    }
  };

  void run_engine(int stream) {
    while (true) {
      fork_.arrive_and_wait();
      if (ends_) return;
      Engine engine{*this, stream, random_of(100 + 3 * index_ + stream)};
      if (stops(Stop::kPushes)) {
      } else if (call_.kind == Kind::kGather) {
        push_gather(engine, call_.chunks, rank_, o_.world);
      } else if (call_.kind == Kind::kBlocks) {
        for (const auto& p : blocks::pushes_of(call_.factors.holders, call_.factors.cut, rank_))
          engine.push(p);
      } else if (!call_.stored &&
                 !push_scatter(engine, call_.chunks, order_, rank_, call_.kind == Kind::kSum)) {
        fail("engine", engine.missed);
      }
      joined_.arrive_and_wait();
    }
  }

  // ---- CTAs.

  void run_cta(int cta) {
    Random random = random_of(2 + cta);
    while (true) {
      fork_.arrive_and_wait();
      if (ends_) return;
      const uint32_t epoch = epoch_of(memory_, page(rank_));
      const auto count = static_cast<int>(tiles_.size());
      uint32_t seen = 0;  // blocks: words, a bit each
      Missed missed;
      for (int t; (t = next_tile_.fetch_add(1, std::memory_order_relaxed)) < count;) {
        pause(random);
        const Tile& tile = tiles_[t];
        const bool done = call_.kind == Kind::kGather   ? gathered(tile, epoch, random, &missed)
                          : call_.kind == Kind::kBlocks ? multiplied(tile, epoch, random, &seen, &missed)
                          : tile.owner == rank_         ? reduced(tile, epoch, random, &missed)
                                                        : sent(tile, random);
        if (done) continue;
        fail("cta", missed);
        break;
      }
      computed_.arrive_and_wait();
    }
  }

  bool arrived(int index, int sender, uint32_t epoch, Missed* missed) const {
    if (mutated(Mutation::kReadBeforeFlag)) return true;
    return wait_arrived(memory_, page(rank_), index, sender, epoch, missed);
  }

  bool gathered(const Tile& tile, uint32_t epoch, Random& random, Missed* missed) {
    const ChunkList& chunks = call_.chunks;
    int sender = 0;
    for (int c = 0; c < chunks.count; ++c) {
      while (chunks.first[sender + 1] <= c) ++sender;
      const int64_t begin = max64(tile.begin, chunks.begin(c));
      const int64_t end = min64(tile.end, chunks.row_end[c]);
      if (begin >= end) continue;
      if (sender != rank_ && !arrived(c, sender, epoch, missed)) return false;
      pause(random);
      const int64_t first = call_.begin(sender);
      for (int64_t row = begin; row < end; ++row) {
        expect(sender == rank_ ? own_[row - first] : buffer(rank_)[row],
               value_of(index_, sender, row - first));
      }
      g_.rows_read.fetch_add(end - begin, std::memory_order_relaxed);
    }
    return true;
  }

  bool multiplied(const Tile& tile, uint32_t epoch, Random& random, uint32_t* seen, Missed* missed) {
    const BlockCall& f = call_.factors;
    const int64_t begin[] = {tile.begin, tile.first_column};
    const int64_t end[] = {tile.end, tile.end_column};
    for (int64_t step = tile.first_step; step < tile.end_step; ++step) {
      for (const blocks::Side side : {blocks::kLeft, blocks::kRight}) {
        if (!blocks_are_here(side, step, begin[side], epoch, seen, missed)) return false;
      }
      pause(random);
      for (const blocks::Side side : {blocks::kLeft, blocks::kRight}) {
        const int64_t slot = f.holders.slot(side, rank_, step);
        const int64_t first = side * kMostExtent;
        const uint32_t* const from = slot < 0 ? &own_[first] : buffer(rank_) + f.slot(side, slot);
        const auto owner = static_cast<int>(f.holders.at(side, rank_, step));
        for (int64_t row = begin[side]; row < end[side]; ++row) {
          expect(from[row], value_of(index_, owner, first + row));
        }
        g_.rows_read.fetch_add(end[side] - begin[side], std::memory_order_relaxed);
      }
    }
    return true;
  }

  // What wait_for_blocks of the kernel does, for one side.
  bool blocks_are_here(blocks::Side side, int64_t step, int64_t begin, uint32_t epoch, uint32_t* seen,
                       Missed* missed) const {
    const int64_t extent = side == blocks::kLeft ? kTileRows : kTileColumns;
    BlockWords words = block_words(arrival_, side, static_cast<int>(step), static_cast<int32_t>(begin),
                                   static_cast<int32_t>(extent));
    if (mutated(Mutation::kFirstBlockOnly)) words.end = std::min(words.end, words.begin + 1);
    for (int word = words.begin; word < words.end; ++word) {
      if ((*seen >> word & 1) != 0) continue;
      if (!arrived(word, sender_of_block(arrival_, word), epoch, missed)) return false;
      *seen |= 1u << word;
    }
    return true;
  }

  bool sent(const Tile& tile, Random& random) {
    const bool early = call_.stored && mutated(Mutation::kFlagBeforeRows);
    if (early) ring(tile);
    pause(random, early);
    uint32_t* const to = call_.stored ? slot(tile.owner, rank_) : &send_[tile.owner * kMostShardRows];
    for (int64_t row = tile.begin; row < tile.end; ++row) to[row] = value_of(index_, rank_, row);
    pause(random);
    if (!early) ring(tile);
    return true;
  }

  void ring(const Tile& tile) {
    for_chunks(tile, [&](int c, int64_t rows) {
      const auto more = static_cast<uint32_t>(rows);
      const auto target = static_cast<uint32_t>(call_.chunks.rows(c));
      if (call_.stored) {
        const Told told = told_of(call_.chunks, rank_, o_.world, c);
        count_and_tell(memory_, pages(), rank_, c, more, target, told.first, told.end, told.word);
      } else {
        count_and_ring(memory_, page(rank_), c, more, target);
      }
      return true;
    });
  }

  // Calls f(chunk, rows) for every chunk that a scatter's tile has rows of, while it returns true.
  template <class F>
  bool for_chunks(const Tile& tile, const F& f) const {
    const ChunkList& chunks = call_.chunks;
    const int64_t first = call_.begin(tile.owner);
    for (int c = chunks.first[tile.owner]; c < chunks.first[tile.owner + 1]; ++c) {
      const int64_t begin = max64(tile.begin, chunks.begin(c) - first);
      const int64_t end = min64(tile.end, chunks.row_end[c] - first);
      if (begin < end && !f(c, end - begin)) return false;
    }
    return true;
  }

  // In the order of ranks, which matters: 31 * (31 * a + b) + c.
  bool reduced(const Tile& tile, uint32_t epoch, Random& random, Missed* missed) {
    for (int sender = 0; sender < o_.world; ++sender) {
      const bool there =
          sender == rank_ || for_chunks(tile, [&](int c, int64_t) {
            return arrived(arrived_index(call_.chunks, rank_, sender, c), sender, epoch, missed);
          });
      if (!there) return false;
    }
    pause(random);
    for (int64_t row = tile.begin; row < tile.end; ++row) {
      uint32_t sum = 0;
      uint32_t want = 0;
      for (int sender = 0; sender < o_.world; ++sender) {
        const uint32_t own = value_of(index_, sender, row);
        sum = 31 * sum + (sender == rank_ ? own : slot(rank_, sender)[row]);
        want = 31 * want + own;
      }
      expect(sum, want);
      out_[row] = sum;
      for (int peer = 0; call_.stored && call_.kind == Kind::kSum && peer < o_.world; ++peer) {
        if (peer != rank_) results(peer, rank_)[row] = sum;
      }
    }
    g_.rows_read.fetch_add((tile.end - tile.begin) * o_.world, std::memory_order_relaxed);
    if (call_.kind == Kind::kSum) ring(tile);
    return true;
  }

  // What the collect kernel does: sums of the others.
  void collect(Random& random) {
    const ChunkList& chunks = call_.chunks;
    const uint32_t epoch = epoch_of(memory_, page(rank_));
    for (int c = 0; c < chunks.count; ++c) {
      const int owner = chunks.owner(c);
      if (owner == rank_) continue;
      Missed missed;
      if (!mutated(Mutation::kReadBeforeFlag) && !wait_sums(memory_, page(rank_), c, owner, epoch, &missed)) {
        return fail("collect", missed);
      }
      pause(random);
      const int64_t first = call_.begin(owner);
      for (int64_t row = chunks.begin(c) - first; row < chunks.row_end[c] - first; ++row) {
        uint32_t want = 0;
        for (int sender = 0; sender < o_.world; ++sender) want = 31 * want + value_of(index_, sender, row);
        expect(results(rank_, owner)[row], want);
      }
    }
  }

  Group& g_;
  const Options& o_;
  const int rank_;
  const ThreadMemory memory_;
  std::barrier<> fork_;      // all threads
  std::barrier<> computed_;  // main and CTAs: the product's kernel has ended
  std::barrier<> joined_;    // main and the engine's streams
  // Written by main before the fork.
  int index_ = 0;
  bool ends_ = false;
  Call call_;
  std::vector<int32_t> order_;  // of chunks that leave
  std::vector<Tile> tiles_;
  BlockArrival arrival_;
  std::atomic<int> next_tile_{0};
  std::vector<uint32_t> own_;   // the user's tensor of a gather, or left and right factor
  std::vector<uint32_t> out_;   // own rows of the result
  std::vector<uint32_t> send_;  // of a scatter, by owner
  std::atomic<bool> failed_{false};
  std::vector<std::jthread> threads_;  // last: they use the rest
};

// Runs all calls on all ranks, to the end or until the first failure on each.
inline void run(Group& group) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < group.o.world; ++r) ranks.push_back(std::make_unique<Rank>(group, r));
}

}  // namespace tpk::protocol::test

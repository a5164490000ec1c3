// The protocol between ranks, as kernels and copy engines run it, on threads: thousands of epochs with random
// delays, shards that change with every call, and poisoned buffers; ranks that stop; and what must go wrong
// if a part of the protocol is left out. Also which chunks are sent, in which order.
//
// With the name of a mutation as argument only that is run, for ThreadSanitizer to find; with "blocks" or
// "stored" behind it in calls of that kind.
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/gemm_hooks.hpp"
#include "protocol_ranks.hpp"

namespace tpk::protocol::test {
namespace {

using namespace std::chrono_literals;

static_assert(kMaxChunks == tpk::kMaxChunks && kMaxRanks == tpk::kMaxRanks,
              "Hooks hold what the protocol needs.");

#if defined(__SANITIZE_THREAD__)
constexpr int kCalls = 300;
#else
constexpr int kCalls = 1000;
#endif

long long cases = 0;

std::string words_of(const Failure& f) {
  return "rank " + std::to_string(f.rank) + " " + f.thread + ", call " + std::to_string(f.call) + ": word " +
         std::to_string(static_cast<int>(f.missed.word)) + "[" + std::to_string(f.missed.index) +
         "] of rank " + std::to_string(f.missed.peer) + " is " + std::to_string(f.missed.seen) +
         ", expected " + std::to_string(f.missed.expected);
}

// ---- Runs in which everything is right.

void check_run(int world, int ctas, Kinds kinds, uint32_t first_epoch, int calls,
               Departures departures = Departures::kBoth) {
  Options o;
  o.departures = departures;
  o.world = world;
  o.ctas = ctas;
  o.kinds = kinds;
  o.calls = calls;
  o.first_epoch = first_epoch;
  o.seed = static_cast<uint32_t>(world * 100 + ctas);
  Group group(o);
  run(group);
  cases += calls;
  const std::string what =
      "world " + std::to_string(world) + ", kinds " + std::to_string(static_cast<int>(kinds));
  for (const Failure& f : group.failures) TPK_CHECK(false, what + ": " + words_of(f));
  TPK_CHECK(group.wrong.load() == 0, what + ": " + std::to_string(group.wrong.load()) + " wrong rows");
  TPK_CHECK(group.rows_read.load() > calls * world, what + ": too few rows were read");
  for (const Kind kind : {Kind::kGather, Kind::kScatter, Kind::kSum, Kind::kBlocks}) {
    int of_kind = 0;
    for (int i = 0; i < calls; ++i) of_kind += make_call(o, i).kind == kind;
    const uint32_t epoch = first_epoch + static_cast<uint32_t>(of_kind);
    for (int r = 0; r < world; ++r) {
      const Page page = group.pages[static_cast<int>(kind)][r];
      TPK_CHECK(*page.epoch() == epoch, what);
      for (int p = 0; p < world; ++p) {
        TPK_CHECK(*page.entered(p) == (p == r ? first_epoch : epoch), what);
      }
      for (int c = 0; c < kMaxChunks; ++c) TPK_CHECK(*page.bell(c) == 0 && *page.counter(c) == 0, what);
    }
  }
}

// Whether arrived(index) of `rank` is for `sender` to write, in calls of equal shards.
bool writes(const Call& call, int sender, int rank, int index) {
  if (call.kind != Kind::kBlocks) return index / 2 == sender;  // two chunks a shard
  const blocks::Cut& cut = call.factors.cut;
  for (const blocks::Push& p : blocks::pushes_of(call.factors.holders, cut, sender)) {
    if (p.peer == rank && cut.word(p.side, p.slot, p.block) == index) return true;
  }
  return false;
}

// ---- A rank that stops: every other one says who, which word, what it expected and what it saw.

// What is not as it should be after such a run.
std::vector<std::string> wrong_after_stop(const Group& group) {
  const Options& o = group.o;
  const uint32_t before = o.first_epoch + static_cast<uint32_t>(o.stop_call);  // the last whole epoch
  std::vector<std::string> wrong;
  const auto expect = [&](bool ok, const std::string& what) {
    if (!ok) wrong.push_back(what);
  };
  expect(group.wrong.load() == 0, "stale rows were used");
  std::set<int> ranks;
  for (const Failure& f : group.failures) {
    const Missed& m = f.missed;
    // Sums that could not be made are missed by those who send them, and by those who want them.
    const bool follows =
        o.kinds == Kinds::kSum && f.rank != o.stop_rank && (m.word == Word::kBell || m.word == Word::kSums);
    if (follows) continue;
    ranks.insert(f.rank);
    bool ok = m.peer == o.stop_rank;
    if (f.rank == o.stop_rank) {  // its own product did not send
      ok = ok && o.stop == Stop::kProduct && m.word == Word::kBell && m.expected == 1 && m.seen == 0;
    } else {
      ok = ok && f.call == o.stop_call && m.expected == before + 1 && m.seen == before;
      if (o.stop == Stop::kBeforeEnter) {
        ok = ok && m.word == Word::kEntered && m.index == o.stop_rank;
      } else {
        ok = ok && m.word == Word::kArrived && writes(make_call(o, f.call), o.stop_rank, f.rank, m.index);
      }
    }
    expect(ok, words_of(f));
  }
  // A rank whose copy engine waits for its product notices itself.
  const bool notices = o.stop == Stop::kProduct && o.departures == Departures::kCopied;
  const size_t late = static_cast<size_t>(o.world) - (notices ? 0 : 1);
  expect(ranks.size() == late, std::to_string(ranks.size()) + " ranks noticed");
  return wrong;
}

void check_stop(Stop stop, Kinds kinds, int world, int stopped, Departures departures) {
  Options o;
  o.departures = departures;
  o.world = world;
  o.kinds = kinds;
  o.calls = 6;
  o.first_epoch = 0xfffffffe;
  o.equal_shards = true;
  o.stop = stop;
  o.stop_rank = stopped;
  o.stop_call = 3;
  std::vector<std::string> wrong;
  // On a busy machine others are late too: then again, with more time.
  for (const auto timeout : {300ms, 3000ms}) {
    o.timeout = timeout;
    Group group(o);
    run(group);
    ++cases;
    wrong = wrong_after_stop(group);
    if (wrong.empty() || group.wrong.load() != 0) break;
  }
  for (const std::string& what : wrong) {
    TPK_CHECK(false, "stop " + std::to_string(static_cast<int>(stop)) + ", kinds " +
                         std::to_string(static_cast<int>(kinds)) + ", rank " + std::to_string(stopped) +
                         ": " + what);
  }
}

// ---- Runs in which something is left out.

// kinds: of the calls; kAll: one in which the mutation does something, another for each seed. Not several:
// calls of one would make ranks wait for each other between those of another.
Options mutated(Mutation mutation, int seed, Kinds kinds, Departures departures) {
  Options o;
  o.departures = departures;
  o.world = 5;
  o.calls = 200;
  o.kinds = kinds != Kinds::kAll                                                         ? kinds
            : mutation == Mutation::kSendBeforeBell || departures == Departures::kStored ? Kinds::kScatter
            : mutation == Mutation::kFirstBlockOnly                                      ? Kinds::kBlocks
            : mutation == Mutation::kEnterBeforeJoin ? Kinds::kGather
                                                     : static_cast<Kinds>(seed % kNumKinds);
  o.seed = static_cast<uint32_t>(seed);
  o.timeout = 300ms;
  o.mutation = mutation;
  return o;
}

// Whether rows were wrong, or a wait was in vain, within `runs` runs.
bool goes_wrong(Mutation mutation, int runs, Kinds kinds, Departures departures = Departures::kBoth) {
  for (int seed = 1; seed <= runs; ++seed) {
    Options o = mutated(mutation, seed, kinds, departures);
    o.ends_when_wrong = true;
    Group group(o);
    run(group);
    ++cases;
    if (group.wrong.load() == 0 && group.failures.empty()) continue;
    std::printf("%s%s: %lld wrong rows and %zu waits in vain in run %d\n",
                kMutations[static_cast<int>(mutation)],
                kinds == Kinds::kBlocks             ? " in blocks"
                : departures == Departures::kStored ? " of what is stored"
                                                    : "",
                static_cast<long long>(group.wrong.load()), group.failures.size(), seed);
    return true;
  }
  return false;
}

// For ThreadSanitizer, which ends the program at the first race.
int run_mutated(const char* name, Kinds kinds, Departures departures) {
  for (int m = 1; m < static_cast<int>(std::size(kMutations)); ++m) {
    if (std::strcmp(name, kMutations[m]) != 0) continue;
    for (int seed = 1; seed <= 20; ++seed) {
      Group group(mutated(static_cast<Mutation>(m), seed, kinds, departures));
      run(group);
    }
    return 0;
  }
  std::fprintf(stderr, "%s is no mutation.\n", name);
  return 2;
}

// ---- Chunks and orders.

void check_chunks(const std::vector<int64_t>& rows, int64_t row_bytes, int64_t least_bytes) {
  ++cases;
  const ChunkList list = cut_chunks(rows, row_bytes, least_bytes);
  std::string what = "rows";
  for (const int64_t n : rows) what += " " + std::to_string(n);
  what += ", row_bytes " + std::to_string(row_bytes) + ", least_bytes " + std::to_string(least_bytes);
  TPK_CHECK(list.count <= kMaxChunks && list.first[0] == 0 && list.first[rows.size()] == list.count, what);
  int64_t begin = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    int64_t at = begin;
    TPK_CHECK((list.first[r + 1] > list.first[r]) == (rows[r] > 0), what);
    for (int c = list.first[r]; c < list.first[r + 1]; ++c) {
      const int64_t size = list.rows(c);
      const bool last = c + 1 == list.first[r + 1];
      TPK_CHECK(list.begin(c) == at && size > 0, what);
      TPK_CHECK(last || size % kChunkRows == 0, what);
      const bool whole = list.first[r + 1] - list.first[r] == 1;
      TPK_CHECK(whole || row_bytes > 0, what);
      const int64_t least = ceil_div(least_bytes, max64(1, row_bytes));
      TPK_CHECK(whole || size + (last ? kChunkRows - 1 : 0) >= least, what);
      TPK_CHECK(size <= rows[r] / (list.first[r + 1] - list.first[r]) + 2 * kChunkRows,
                what);  // nearly equal
      at += size;
    }
    begin += rows[r];
    TPK_CHECK(at == begin, what);
  }
}

std::string refusal(const std::vector<int64_t>& rows, int64_t row_bytes = 2, int64_t least_bytes = 1) {
  ++cases;
  try {
    cut_chunks(rows, row_bytes, least_bytes);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void check_all_chunks() {
  Random random(5);
  const auto number = [&](int64_t most) { return static_cast<int64_t>(random()) % (most + 1); };
  for (int i = 0; i < 3000; ++i) {
    std::vector<int64_t> rows(1 + number(kMaxRanks - 1));
    for (int64_t& n : rows) n = number(3) == 0 ? 0 : number(int64_t{1} << number(24));
    check_chunks(rows, number(int64_t{1} << number(20)), 1 + number(int64_t{1} << number(30)));
  }
  check_chunks({(int64_t{1} << 31) - 1}, int64_t{1} << 60, 1);
  check_chunks({1000, 0}, 1, int64_t{1} << 62);
  // 8 ranks, M = 8192, K = 8192 in 16 bits: 2 chunks of 8 MiB a rank.
  const ChunkList list = cut_chunks(std::vector<int64_t>(8, 1024), 16384);
  TPK_CHECK(list.count == 16 && list.row_end[0] == 512 && list.first[3] == 6, "the usual case");
  // K = 1024: 2 MiB are the whole shard.
  TPK_CHECK(cut_chunks(std::vector<int64_t>(8, 1024), 2048).count == 8, "2 MiB a shard");
  TPK_CHECK(cut_chunks(std::vector<int64_t>(16, 1 << 20), 16384).count == 64, "16 large shards");
  TPK_CHECK(cut_chunks(std::vector<int64_t>(3, 0), 16384).count == 0, "no rows");

  // What departs: every sender has a word of its own for every chunk of an owner.
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (const int64_t rows : {1, 700, 5000, 1 << 22}) {
      std::vector<int64_t> shards(world, rows);
      shards[world / 2] = 0;
      shards[0] = 3 * rows;
      const ChunkList out = cut_departing(shards, 16384, false, false);
      for (int owner = 0; owner < world; ++owner) {
        std::set<int32_t> used;
        for (int sender = 0; sender < world; ++sender) {
          for (int32_t c = out.first[owner]; c < out.first[owner + 1]; ++c) {
            const int32_t index = arrived_index(out, owner, sender, c);
            TPK_CHECK(index >= 0 && index < kMaxChunks && used.insert(index).second, "departing");
          }
        }
      }
      TPK_CHECK(rows < 5000 || out.of_rank(0) == 4, "departing in four");
    }
  }

  TPK_CHECK(refusal({}).find("1 to 16 ranks, but it names 0") != std::string::npos, refusal({}));
  TPK_CHECK(refusal(std::vector<int64_t>(17, 1)).find("names 17") != std::string::npos, "17 ranks");
  TPK_CHECK(refusal({1, -2}).find("rank 1 has -2 rows") != std::string::npos, refusal({1, -2}));
  const std::vector<int64_t> huge = {1, int64_t{1} << 62, (int64_t{1} << 31) - 1};
  TPK_CHECK(refusal(huge).find("ranks 0 to 1") != std::string::npos, refusal(huge));
  TPK_CHECK(refusal({1}, -1).find("row_bytes must be at least 0") != std::string::npos, refusal({1}, -1));
  TPK_CHECK(refusal({1}, 1, 0).find("least_bytes must be at least 1") != std::string::npos,
            refusal({1}, 1, 0));
}

void check_orders() {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      ++cases;
      std::set<int> gather;
      std::set<int> scatter;
      for (int step = 1; step < world; ++step) {
        // In step d a rank receives the shard of rank + d: its sender's peer in that step is itself.
        TPK_CHECK(gather_peer((rank + step) % world, step, world) == rank, "gather");
        gather.insert(gather_peer(rank, step, world));
        scatter.insert(scatter_peer(rank, step, world));
      }
      TPK_CHECK(gather.size() == static_cast<size_t>(world - 1) && gather.count(rank) == 0, "gather");
      TPK_CHECK(scatter == gather, "scatter");
      TPK_CHECK(world == 1 || (gather_peer(rank, 1, world) + 1) % world == rank, "gather: rank - 1 first");
      TPK_CHECK(world == 1 || scatter_peer(rank, 1, world) == (rank + 1) % world, "scatter: rank + 1 first");
      TPK_CHECK(scatter_peer(rank, world, world) == rank, "scatter: own rows last");
    }
  }
}

// That calls of blocks are of all sorts.
void check_block_calls() {
  Options o;
  o.kinds = Kinds::kBlocks;
  std::set<int64_t> blocks_of[2];
  std::set<int64_t> steps;
  for (int i = 0; i < kCalls; ++i) {
    ++cases;
    const BlockCall call = make_call(o, i).factors;
    for (const int side : {0, 1}) {
      TPK_CHECK(call.extent[side] > 0, "a factor without rows");
      if (call.cut.by_columns == (side == blocks::kRight)) blocks_of[side].insert(call.cut.blocks[side]);
    }
    steps.insert(call.holders.steps);
    TPK_CHECK(call.slot(blocks::kRight, call.cut.slots[blocks::kRight]) <= buffer_rows(o.world), "room");
  }
  TPK_CHECK(blocks_of[0] == std::set<int64_t>({1, 2, 3, 4, 5}), "blocks of left factors");
  TPK_CHECK(blocks_of[1] == blocks_of[0] && steps == std::set<int64_t>({1, 2, 3, 4}), "blocks, steps");
}

int run_all(int argc, char** argv) {
  if (argc > 1) {
    const auto of = [&](const char* what) { return argc > 2 && std::strcmp(argv[2], what) == 0; };
    return run_mutated(argv[1], of("blocks") ? Kinds::kBlocks : Kinds::kAll,
                       of("stored") ? Departures::kStored : Departures::kBoth);
  }
  check_all_chunks();
  check_orders();
  check_block_calls();
  constexpr uint32_t kNearWrap = 0xfffffff0;
  check_run(8, 2, Kinds::kAll, kNearWrap, 3 * kCalls);
  check_run(8, 3, Kinds::kGather, kNearWrap, kCalls);
  check_run(8, 2, Kinds::kScatter, 0x7ffffff0, kCalls);
  for (const int world : {7, 5, 3, 2}) {
    check_run(world, 2 + world % 2, Kinds::kAll, kNearWrap, kCalls);
    check_run(world, 2, world % 3 == 2 ? Kinds::kGather : Kinds::kScatter, 0, kCalls);
    check_run(world, 3, Kinds::kSum, 0x7ffffff0, kCalls);
    check_run(world, 3, world % 2 == 0 ? Kinds::kScatter : Kinds::kSum, kNearWrap, kCalls,
              Departures::kStored);
  }
  for (const int world : {8, 4, 3, 2}) check_run(world, 2 + world % 2, Kinds::kBlocks, kNearWrap, kCalls);
  check_run(9, 2, Kinds::kBlocks, 0x7ffffff0, kCalls / 4);
  check_run(16, 2, Kinds::kBlocks, 0, kCalls / 10);
  check_run(1, 2, Kinds::kAll, kNearWrap, 20);
  for (const Kinds kinds : {Kinds::kGather, Kinds::kScatter, Kinds::kSum, Kinds::kBlocks}) {
    for (const Stop stop : {Stop::kBeforeEnter, Stop::kPushes, Stop::kProduct}) {
      const bool needs_peers_product = kinds == Kinds::kScatter || kinds == Kinds::kSum;
      if (stop == Stop::kProduct && !needs_peers_product) continue;
      for (const int stopped : {0, 5}) check_stop(stop, kinds, 8, stopped, Departures::kCopied);
      check_stop(stop, kinds, 2, 1, Departures::kCopied);
      if (stop != Stop::kProduct) continue;
      for (const int stopped : {0, 5}) check_stop(stop, kinds, 8, stopped, Departures::kStored);
      check_stop(stop, kinds, 2, 1, Departures::kStored);
    }
  }
#if !defined(__SANITIZE_THREAD__)
  // Under ThreadSanitizer each ends in its report: see CMakeLists.txt.
  for (int m = 1; m < static_cast<int>(Mutation::kRelaxedStores); ++m) {
    TPK_CHECK(goes_wrong(static_cast<Mutation>(m), 40, Kinds::kAll),
              std::string("nothing came of ") + kMutations[m]);
  }
  // What is stored by CTAs has no engine.
  for (const Mutation m : {Mutation::kSkipEntered, Mutation::kFlagBeforeRows, Mutation::kEnterBeforeRead,
                           Mutation::kReadBeforeFlag}) {
    TPK_CHECK(goes_wrong(m, 40, Kinds::kAll, Departures::kStored),
              std::string("nothing came, where rows are stored, of ") + kMutations[static_cast<int>(m)]);
  }
  // Blocks have no bell. Who has multiplied has read all that it is sent: by then all pushes have ended.
  for (const Mutation m : {Mutation::kSkipEntered, Mutation::kFlagBeforeRows, Mutation::kEnterBeforeRead,
                           Mutation::kReadBeforeFlag}) {
    TPK_CHECK(goes_wrong(m, 40, Kinds::kBlocks),
              std::string("nothing came in blocks of ") + kMutations[static_cast<int>(m)]);
  }
#endif
  return tpk::test::result("protocol", cases);
}

}  // namespace
}  // namespace tpk::protocol::test

int main(int argc, char** argv) { return tpk::protocol::test::run_all(argc, argv); }

// Small all-reduces, gathers and reduce-scatters, as kernels run them, on threads: ranks of several CTAs,
// thousands of calls, ways, sizes, shards and numbers of CTAs that change from call to call, random delays,
// poisoned halves, epochs that begin anew; ranks that stop; and what must go wrong if a part of it is left
// out. Also slices, and what fits.
//
// With the name of a mutation as argument only that is run, for ThreadSanitizer to find.
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "all_reduce_ranks.hpp"
#include "check.hpp"

namespace tpk::all_reduce::test {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kCalls = 400;
#else
constexpr int kCalls = 2000;
#endif

long long cases = 0;

std::string words_of(const Missed& m) {
  return "rank " + std::to_string(m.rank) + ", call " + std::to_string(m.call) + ": word " +
         std::to_string(static_cast<int>(m.word)) + " of rank " + std::to_string(m.peer) + " is " +
         std::to_string(m.seen) + ", expected " + std::to_string(m.expected);
}

// ---- Runs in which everything is right.

void check_run(int world, int threads, int only_way, uint32_t first_epoch, int calls) {
  Options o;
  o.world = world;
  o.threads = threads;
  o.only_way = only_way;
  o.first_epoch = first_epoch;
  o.calls = calls;
  o.seed = static_cast<uint32_t>(world * 100 + threads + 10 * (only_way + 1));
  Group group(o);
  run(group);
  cases += calls;
  const std::string what = "world " + std::to_string(world) + ", way " + std::to_string(only_way);
  for (const Missed& m : group.missed) TPK_CHECK(false, what + ": " + words_of(m));
  TPK_CHECK(group.wrong.load() == 0, what + ": " + std::to_string(group.wrong.load()) + " wrong words");
  TPK_CHECK(group.checked.load() > calls * world, what + ": too little was checked");
  uint32_t epoch = first_epoch;
  for (int i = 0; i < calls; ++i) epoch = next_epoch(epoch);
  for (int r = 0; r < world; ++r) {
    TPK_CHECK(*group.pages[r].epoch() == epoch && *group.pages[r].counted() == 0, what);
  }
}

// ---- A rank that stops: every other one says who, which word, what it expected and what it saw.

void check_stop(Stop stop, Way way, int world, int stopped) {
  Options o;
  o.world = world;
  o.calls = 6;
  o.only_way = static_cast<int>(way);
  o.alike = true;
  o.first_epoch = 0xfffffffc;  // what is missed has epoch 2
  o.timeout = 300ms;
  o.stop = stop;
  o.stop_rank = stopped;
  o.stop_call = 3;
  Group group(o);
  run(group);
  ++cases;
  const std::string what = "stop " + std::to_string(static_cast<int>(stop)) + ", way " +
                           std::to_string(static_cast<int>(way)) + ": ";
  TPK_CHECK(group.wrong.load() == 0, what + "stale data were used");
  const Word word = stop == Stop::kBeforeSums ? Word::kSums
                    : way == Way::kPackets    ? Word::kPacket
                    : way == Way::kGather     ? Word::kRows
                    : way == Way::kScatter    ? Word::kAddend
                                              : Word::kPart;
  std::set<int> ranks;
  for (const Missed& m : group.missed) {
    const std::string at = what + words_of(m);
    ranks.insert(m.rank);
    TPK_CHECK(m.peer == stopped && m.call == 3 && m.word == word && m.expected == 2, at);
    // In the halves, epochs of two calls before.
    TPK_CHECK(m.seen == (word == Word::kPacket ? 0xfffffffe : 0xffffffff), at);
  }
  TPK_CHECK(static_cast<int>(ranks.size()) == world - 1, what + std::to_string(ranks.size()) + " noticed");
}

// ---- Runs in which something is left out.

Options mutated(Mutation mutation, int seed) {
  Options o;
  o.world = 4;
  o.calls = 300;
  o.seed = static_cast<uint32_t>(seed);
  o.timeout = 300ms;
  o.mutation = mutation;
  o.only_way = seed % (kWays + 1) - 1;
  return o;
}

#if !defined(__SANITIZE_THREAD__)
// Whether words were wrong, or a wait was in vain, within `runs` runs.
bool goes_wrong(Mutation mutation, int runs) {
  for (int seed = 1; seed <= runs; ++seed) {
    Options o = mutated(mutation, seed);
    o.ends_when_wrong = true;
    Group group(o);
    run(group);
    ++cases;
    if (group.wrong.load() == 0 && group.missed.empty()) continue;
    std::printf("%s: %lld wrong words and %zu waits in vain in run %d\n",
                kMutations[static_cast<int>(mutation)], static_cast<long long>(group.wrong.load()),
                group.missed.size(), seed);
    return true;
  }
  return false;
}
#endif

// For ThreadSanitizer, which ends the program at the first race.
int run_mutated(const char* name) {
  for (int m = 1; m < static_cast<int>(std::size(kMutations)); ++m) {
    if (std::strcmp(name, kMutations[m]) != 0) continue;
    for (int seed = 1; seed <= 20; ++seed) {
      Group group(mutated(static_cast<Mutation>(m), seed));
      run(group);
    }
    return 0;
  }
  std::fprintf(stderr, "%s is no mutation.\n", name);
  return 2;
}

// ---- Decisions.

void check_slices() {
  Random random(3);
  for (int i = 0; i < 4000; ++i) {
    ++cases;
    Call c;
    c.way = static_cast<Way>(i % kWays);
    c.world = static_cast<int32_t>(random() % (kMaxRanks - 1)) + 2;
    c.ctas = static_cast<int32_t>(random() % kMaxCtas) + 1;
    c.units = static_cast<int32_t>(random() % (i % 2 == 0 ? 300 : kMostUnits)) + 1;
    for (int r = 0; r < c.world && has_shards(c.way); ++r) {
      c.lengths[r] = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % (c.units / c.world + 1));
    }
    const Call before = c;
    c.cut();
    const bool all = c.way == Way::kPackets || c.way == Way::kOneShot;
    int64_t units = 0;
    for (int owner = 0; owner < c.world; ++owner) {
      int32_t end = c.begin(owner);
      TPK_CHECK(end % 8 == 0 && (all ? end == 0 : end == owner * c.block_units), "blocks");
      for (int cta = 0; cta < c.ctas; ++cta) {
        const Slice s = c.slice(owner, cta);
        TPK_CHECK(s.begin == end && s.end >= s.begin && s.end <= c.begin(owner) + c.block_units, "slices");
        TPK_CHECK(s.end - s.begin <= c.slice_units && c.slice_units <= c.block_units + 7, "slices");
        TPK_CHECK(s.begin % 8 == 0 || s.begin == s.end, "whole lines");
        end = s.end;
      }
      TPK_CHECK(end - c.begin(owner) == c.lengths[owner], "slices cover a block");
      TPK_CHECK(!has_shards(c.way) || c.lengths[owner] == before.lengths[owner], "a block is a shard");
      units += c.lengths[owner];
    }
    TPK_CHECK(has_shards(c.way) || units == int64_t{c.units} * (all ? c.world : 1), "blocks cover all");
    TPK_CHECK(c.way != Way::kPackets || c.slice(0, 0).end > 0, "CTA 0 has a packet: see all_reduce.hpp");
  }
  TPK_CHECK(ctas_for(0, 512) == 1 && ctas_for(512, 512) == 1 && ctas_for(513, 512) == 2, "CTAs");
  TPK_CHECK(ctas_for(kMostUnits, 512) == kMaxCtas, "CTAs");
  for (int rank = 0; rank < 5; ++rank) {
    std::set<int> peers;
    Call c;
    c.world = 5;
    c.rank = rank;
    for (int step = 1; step < c.world; ++step) peers.insert(peer_of(c, step));
    TPK_CHECK(peers.size() == 4 && peers.count(rank) == 0 && *peers.rbegin() < 5, "peers");
  }
}

// Nothing that a call stores lies on anything else, or outside of its half, if it fits.
void check_layout() {
  for (const Way way : {Way::kPackets, Way::kOneShot, Way::kTwoShot, Way::kGather, Way::kScatter}) {
    for (int world = 2; world <= kMaxRanks; ++world) {
      for (const int32_t units : {1, 9, 1000, 4091}) {
        ++cases;
        Call c;
        c.way = way;
        c.world = world;
        c.units = units;
        for (int r = 0; r < world && has_shards(way); ++r) c.lengths[r] = r == 1 ? units : units / 2;
        c.cut();
        std::vector<char> memory(Page::kBytes);
        c.pages[0] = Page::at(reinterpret_cast<uint64_t>(memory.data()));
        const char* const begin = c.half(0, 0);
        const auto least = [&] {
          if (way == Way::kPackets) return kPacketBytes;
          const char* const end = c.slot(0, 0, world);
          return end - begin + (way == Way::kTwoShot ? int64_t{units} * kUnitBytes : 0);
        }();
        c.half_bytes = least;
        TPK_CHECK(c.fits(), "it fits");
        c.half_bytes = least - 1;
        TPK_CHECK(!c.fits(), "it does not fit");
        const int64_t slot = c.slot(0, 0, 1) - c.slot(0, 0, 0);
        int64_t longest = units;
        if (way == Way::kTwoShot) {
          longest = 0;
          for (int r = 0; r < world; ++r) {
            longest = std::max<int64_t>(longest, c.lengths[r]);
          }
        }
        TPK_CHECK(slot >= longest * kUnitBytes, "slots");
        TPK_CHECK(c.slot(0, 0, 0) - begin == kPacketBytes, "packets lie apart");
        TPK_CHECK(c.packets(0, 0, 1) - c.packets(0, 0, 0) == 2 * slot, "packets");
      }
    }
  }
  Call c;
  c.way = Way::kPackets;
  c.world = 16;
  c.units = 1 << 12;
  c.half_bytes = int64_t{1} << 30;
  c.cut();
  TPK_CHECK(c.fits(), "2 MiB of packets");
  c.units += 1;
  c.cut();
  TPK_CHECK(!c.fits(), "more packets than there is room for");
}

void check_epochs() {
  uint32_t epoch = 0xfffffff0;
  for (int i = 0; i < 40; ++i) {
    const uint32_t next = next_epoch(epoch);
    TPK_CHECK(next % 2 != epoch % 2 && next != 0, "odd and even in turn, never 0");
    TPK_CHECK(arrived(next, next) && arrived(next, epoch) && !arrived(epoch, next), "ahead by one");
    TPK_CHECK(!arrived(0, next), "never written");
    TPK_CHECK(!arrived(next - 0x80000001u, next) && !arrived(next + 0x7fffffffu, next), "long ago");
    epoch = next;
  }
}

int run_all(int argc, char** argv) {
  if (argc > 1) return run_mutated(argv[1]);
  check_slices();
  check_layout();
  check_epochs();
  constexpr uint32_t kNearEnd = 0xffffffc0;
  for (const int world : {2, 3, 4, 7}) check_run(world, 1 + world % 4, -1, kNearEnd, kCalls);
  for (int way = 0; way < kWays; ++way) check_run(3, 3, way, 0, kCalls);
  for (const Way way : {Way::kPackets, Way::kOneShot, Way::kTwoShot, Way::kGather, Way::kScatter}) {
    for (const int stopped : {0, 2}) check_stop(Stop::kBeforeCall, way, 4, stopped);
  }
  check_stop(Stop::kBeforeSums, Way::kTwoShot, 4, 1);
#if !defined(__SANITIZE_THREAD__)
  // Under ThreadSanitizer each ends in its report: see CMakeLists.txt.
  for (int m = 1; m < static_cast<int>(Mutation::kRelaxedStores); ++m) {
    // Mostly in the first runs; on a machine that is busy with other work threads meet less often.
    TPK_CHECK(goes_wrong(static_cast<Mutation>(m), 400), std::string("nothing came of ") + kMutations[m]);
  }
#endif
  return tpk::test::result("all_reduce_protocol", cases);
}

}  // namespace
}  // namespace tpk::all_reduce::test

int main(int argc, char** argv) { return tpk::all_reduce::test::run_all(argc, argv); }

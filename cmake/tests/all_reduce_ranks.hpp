// What ranks of host/all_reduce.hpp are when they run as threads: CTAs, and the order of a stream.
#pragma once

#include <barrier>

#include "all_reduce_ctas.hpp"

namespace tpk::all_reduce::test {

// A rank: its CTAs' threads, and between calls the order of a stream.
struct Rank {
  Group& g;
  int number;
  std::barrier<> stream;
  std::vector<uint32_t> partial;
  std::vector<uint32_t> out;
  std::atomic<bool> stops{false};     // before a call
  std::atomic<bool> failed{false};    // in one
  std::vector<std::jthread> threads;  // last: they use the rest

  Rank(Group& group, int rank)
      : g(group),
        number(rank),
        stream(group.o.threads),
        partial(ThreadCta::kWords * (kLargest + 2 * kMaxRanks)),
        out(partial.size()) {
    for (int t = 0; t < g.o.threads; ++t) threads.emplace_back([this, t] { run(t); });
  }

  void run(int thread) {
    Random random(g.o.seed * 131u + number * 17u + thread + 1u);
    for (int call = 0; call < g.o.calls; ++call) {
      Call c = g.make_call(call);
      c.rank = number;
      if (thread == 0) begin(call, random);
      stream.arrive_and_wait();
      if (stops.load()) return;
      if (thread < c.ctas && !runs(c, call, thread, random)) failed.store(true);
      stream.arrive_and_wait();
      if (failed.load()) return;
      if (thread == 0) end(c, call);
    }
  }
  void begin(int call, Random& random) {
    const bool last = g.o.stop == Stop::kBeforeCall && number == g.o.stop_rank && call == g.o.stop_call;
    if (last || (g.o.ends_when_wrong && g.wrong.load() != 0)) stops.store(true);
    for (size_t i = 0; i < partial.size(); ++i) partial[i] = value_of(call, number, static_cast<int>(i));
    std::fill(out.begin(), out.end(), kPoison);
    pause(random);
    if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
  bool runs(const Call& c, int call, int thread, Random& random) {
    ThreadCta cta{g, c, call, thread, partial.data(), out.data(), random};
    pause(random);
    try {
      if (c.way == Way::kPackets) return all_reduce::run<Way::kPackets>(cta, c);
      if (c.way == Way::kOneShot) return all_reduce::run<Way::kOneShot>(cta, c);
      if (c.way == Way::kTwoShot) return all_reduce::run<Way::kTwoShot>(cta, c);
      if (c.way == Way::kGather) return all_reduce::run<Way::kGather>(cta, c);
      return all_reduce::run<Way::kScatter>(cta, c);
    } catch (const Stopped&) {
      return false;
    }
  }
  std::vector<uint32_t> wanted(const Call& c, int call) const {
    std::vector<uint32_t> want;
    if (c.way == Way::kGather) {
      for (int r = 0; r < c.world; ++r) {
        for (int i = 0; i < ThreadCta::kWords * c.lengths[r]; ++i) want.push_back(value_of(call, r, i));
      }
      return want;
    }
    const int first = c.way == Way::kScatter ? first_of(c, number) : 0;
    const int units = c.way == Way::kScatter ? c.lengths[number] : c.units;
    for (int i = ThreadCta::kWords * first; i < ThreadCta::kWords * (first + units); ++i) {
      want.push_back(sum_of(call, g.o.world, i));
    }
    return want;
  }
  void end(const Call& c, int call) {
    const std::vector<uint32_t> want = wanted(c, call);
    int64_t wrong = 0;
    for (size_t i = 0; i < out.size(); ++i) wrong += out[i] != (i < want.size() ? want[i] : kPoison);
    g.wrong.fetch_add(wrong);
    g.checked.fetch_add(static_cast<int64_t>(want.size()) / ThreadCta::kWords);
    if (g.o.mutation != Mutation::kNone) return;
    // What was read is gone: whoever still wrote or read it shows.
    const uint32_t epoch = *c.pages[number].epoch();
    auto* const slots = reinterpret_cast<uint32_t*>(c.slot(number, epoch % 2, 0));
    std::fill(slots, slots + (kHalf - kPacketBytes) / 4, kPoison);
  }
};

inline void run(Group& group) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < group.o.world; ++r) ranks.push_back(std::make_unique<Rank>(group, r));
}

}  // namespace tpk::all_reduce::test

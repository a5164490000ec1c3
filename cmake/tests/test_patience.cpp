// comm::Patience by a clock of ours: exact where the clock is right, and bounded where it jumps.
#include <cstdint>
#include <string>

#include "check.hpp"
#include "comm/flags.cuh"

namespace {

using tpk::comm::Patience;
using u64 = tpk::comm::u64;

constexpr u64 kMs = 1000000;
constexpr u64 kStep = Patience::kMostPerLook;
constexpr u64 kHour = 3600000 * kMs;
long long cases = 0;

// Looks every `every` ns after `now`; the number of looks until the wait ends, at most `most`.
u64 looks(Patience& patience, u64& now, u64 every, u64 most = 1000000) {
  for (u64 look = 1; look <= most; ++look) {
    if (patience.ends(now += every)) return look;
  }
  return most + 1;
}

void check_looks(u64 timeout, u64 start, u64 every, u64 want) {
  ++cases;
  u64 now = start;
  Patience patience(timeout, now);
  const u64 got = looks(patience, now, every);
  TPK_CHECK(got == want, "timeout " + std::to_string(timeout) + ", start " + std::to_string(start) +
                             ", every " + std::to_string(every) + ": " + std::to_string(got) +
                             " looks, expected " + std::to_string(want));
}

// A jump of the clock after 100 looks of 1 ms, with a wait of one second: how many further looks it lasts.
u64 looks_after_jump(u64 jump) {
  ++cases;
  u64 now = 5 * kHour;
  Patience patience(1000 * kMs, now);
  TPK_CHECK(looks(patience, now, kMs, 100) == 101, "ended before the jump");
  now += jump;
  return looks(patience, now, kMs);
}

}  // namespace

int main() {
  // From everywhere, over the end of the clock too: exactly at the bound, and not one nanosecond before.
  for (const u64 start : {u64{0}, u64{12345}, 7 * kHour, u64{0} - 1, u64{0} - kMs, u64{1} << 63}) {
    check_looks(10 * kMs, start, kMs, 10);
    check_looks(10 * kMs + 1, start, kMs, 11);
    check_looks(10 * kMs - 1, start, kMs, 10);
    check_looks(1, start, 1, 1);
    check_looks(1000, start, 1, 1000);
    check_looks(30000 * kMs, start, 20 * kMs, 1500);
    check_looks(0, start, 0, 1);  // no patience at all
    check_looks(~u64{0}, start, kStep, 1000001);
    // Steps as long as may count, and longer ones, which count no more.
    check_looks(10 * kStep, start, kStep, 10);
    check_looks(10 * kStep, start, kStep + 1, 10);
    check_looks(10 * kStep, start, kHour, 10);
  }
  check_looks(1000, 0, 0, 1000001);  // a clock that stands still: nothing has passed

  TPK_CHECK(looks_after_jump(0) == 900, "no jump");
  // Forward: kMostPerLook at most. The look right after the jump counts for that instead of 1 ms.
  TPK_CHECK(looks_after_jump(kHour) == 901 - kStep / kMs, "an hour forward");
  TPK_CHECK(looks_after_jump(30 * 24 * kHour) == 901 - kStep / kMs, "a month forward");
  TPK_CHECK(looks_after_jump(9 * kMs) == 891, "9 ms forward: time that has passed");
  // Backward: nothing, also to before the wait began and to before zero.
  TPK_CHECK(looks_after_jump(u64{0} - kHour) == 901, "an hour back");
  TPK_CHECK(looks_after_jump(u64{0} - 50 * kMs) == 901, "50 ms back");
  TPK_CHECK(looks_after_jump(u64{0} - 24 * kHour) == 901, "to before zero");

  // Jumps at every look: still it ends, after at most timeout / kMostPerLook jumps forward.
  u64 now = 100 * kHour;
  Patience patience(1000 * kMs, now);
  int jumps = 0;
  while (!patience.ends(now += kHour)) {
    ++jumps;
    if (patience.ends(now -= kHour)) break;
  }
  ++cases;
  TPK_CHECK(jumps == 19, std::to_string(jumps) + " jumps forth and back before the end");

  // Epochs around their end.
  using tpk::comm::epoch_reached;
  TPK_CHECK(epoch_reached(5, 5) && epoch_reached(6, 5) && !epoch_reached(4, 5), "plain");
  TPK_CHECK(epoch_reached(0, 0xffffffffu) && !epoch_reached(0xffffffffu, 0), "wrapped");
  return tpk::test::result("patience", cases + 2);
}

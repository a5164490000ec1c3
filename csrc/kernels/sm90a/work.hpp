// What a cluster does next: a segment of the schedule as the kernel wants it. Shared by the launcher, which
// works out the first one of every worker, and by the kernel's scheduling thread, which works out the rest.
#pragma once

#include <cstdint>

#include "host/schedule.hpp"
#include "host/tile_order.hpp"

namespace tpk::sm90a {

struct Work {
  int32_t tile_m = 0;  // in tiles of the cluster
  int32_t tile_n = 0;
  int32_t batch = 0;
  int32_t k_begin = 0;  // in iterations
  int32_t iters = 0;    // 0: nothing to do
  int32_t slot = -1;    // see tpk::Segment
  int32_t first_slot = -1;
  int32_t end_slot = -1;
};

// shares: those of a split tile whose workers finish it together, 0 where one does; see divided_shares().
// Then every worker of a split tile has a slot of its own, the last one too.
TPK_HD Work describe_work(const Schedule& schedule, const TileOrder& order, int32_t shares,
                          const Segment& s) {
  const TileCoord tile = order.at(s.position);
  Work w;
  w.tile_m = static_cast<int32_t>(tile.m);
  w.tile_n = static_cast<int32_t>(tile.n);
  w.batch = static_cast<int32_t>(tile.batch);
  w.k_begin = static_cast<int32_t>(s.k_begin);
  w.iters = static_cast<int32_t>(s.k_end - s.k_begin);
  w.slot = static_cast<int32_t>(s.slot);
  w.first_slot = static_cast<int32_t>(s.first_slot);
  w.end_slot = static_cast<int32_t>(s.end_slot);
  if (shares > 0 && s.is_split()) {
    if (w.slot < 0) w.slot = w.end_slot;
    w.first_slot = static_cast<int32_t>(s.position - schedule.pieces[s.piece].first_tile) * shares;
    w.end_slot = w.first_slot + shares;
  }
  return w;
}

// The first work of workers 0, 1, ...: a kernel that works it out itself starts to load 4 us later, since its
// scheduling thread runs alone, through code and parameters that no cache holds yet.
constexpr int kMaxOpening = 132;
struct Opening {
  int32_t count = 0;
  Work work[kMaxOpening];
};

inline Opening open_schedule(const Schedule& schedule, const TileOrder& order, int32_t shares) {
  Opening o;
  o.count = static_cast<int32_t>(min64(schedule.workers, kMaxOpening));
  for (int32_t w = 0; w < o.count; ++w) {
    SegmentCursor cursor(schedule, w);
    Segment segment;
    if (cursor.next(&segment)) o.work[w] = describe_work(schedule, order, shares, segment);
  }
  return o;
}

}  // namespace tpk::sm90a

// Builds schedules: every known decomposition as a value of host/schedule.hpp. Host only.
//
// Workers that also communicate (tickets 0 ... comm_workers - 1) are charged comm_iters iterations each, so
// that all workers end together. Only streamed pieces can charge: waves are whole tiles.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "host/check.hpp"
#include "host/schedule.hpp"

namespace tpk {

enum class ScheduleKind : int32_t {
  kDataParallel,   // waves only
  kStreamK,        // textbook: all tiles streamed
  kSplitK,         // every tile cut into splits equal runs of K, one ticket each
  kHybridFirst,    // streamed remainder (one to two waves), then waves: the paper's two-tile hybrid
  kHybridLast,     // waves, then the streamed remainder
  kOwnFirst,       // remainder of the own shard streamed, waves, remainder of the others streamed
  kEveryShard,     // hybrid_first for every shard in turn
  kHybridAligned,  // waves, then the remainder, cut at few depths of K
};
constexpr int kNumScheduleKinds = 8;

inline const char* name(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kDataParallel:
      return "data_parallel";
    case ScheduleKind::kStreamK:
      return "stream_k";
    case ScheduleKind::kSplitK:
      return "split_k";
    case ScheduleKind::kHybridFirst:
      return "hybrid_first";
    case ScheduleKind::kHybridLast:
      return "hybrid_last";
    case ScheduleKind::kOwnFirst:
      return "own_first";
    case ScheduleKind::kEveryShard:
      return "every_shard";
    case ScheduleKind::kHybridAligned:
      return "hybrid_aligned";
  }
  return "unknown";
}

inline ScheduleKind parse_schedule_kind(std::string_view text) {
  for (int i = 0; i < kNumScheduleKinds; ++i) {
    const auto kind = static_cast<ScheduleKind>(i);
    if (text == name(kind)) return kind;
  }
  throw std::invalid_argument(
      "schedule must be one of data_parallel, stream_k, split_k, hybrid_first, hybrid_last, own_first, "
      "every_shard or hybrid_aligned, but it is '" +
      std::string(text) + "'.");
}

struct ScheduleOptions {
  int64_t workers = 1;
  int64_t min_iters = 4;  // a shorter run of iterations costs more in fix-up than it balances
  int64_t splits = 1;     // split_k: pieces of a tile; aligned kinds: depths at which one is cut, 1: the best
  int64_t comm_workers = 0;  // tickets 0 ... comm_workers - 1 also communicate,
  int64_t comm_iters = 0;    // which costs each of them as much as this many iterations
  // Tiles of every shard in time order (own first for an arrival, own last for a departure). Empty: one
  // shard.
  std::vector<int64_t> shard_tiles = {};
  // own_first, every_shard: remainders alone are cut, and at few depths, as hybrid_aligned does it. No
  // handicaps.
  bool aligned = false;
};

// Least share of a streamed piece. Snapping moves a cut by less than min_iters, so shares this long stay
// longer than min_iters. Where tiles are too short to be cut, any share will do.
inline int64_t least_share(int64_t k_iters, int64_t min_iters) {
  return k_iters < 2 * min_iters ? 1 : 2 * min_iters;
}

// How far a snapped cut can lie below the even one: shares keep their even length to within this.
inline int64_t snap_slack(int64_t k_iters, int64_t min_iters) {
  return (k_iters < 2 * min_iters ? k_iters : min_iters) - 1;
}

namespace detail {

class ScheduleBuilder {
 public:
  ScheduleBuilder(int64_t k_iters, const ScheduleOptions& o) {
    s_.k_iters = k_iters;
    s_.workers = o.workers;
    s_.min_iters = o.min_iters;
    comm_workers_ = o.comm_iters > 0 ? min64(o.comm_workers, o.workers) : 0;
    comm_iters_ = comm_workers_ > 0 ? o.comm_iters : 0;
    least_ = least_share(k_iters, o.min_iters);
  }

  // Tiles too short to be cut gain nothing from streaming, unless a handicap is to be charged.
  bool streams() const { return s_.k_iters >= 2 * s_.min_iters || comm_iters_ > 0; }

  // The streamed pieces to come share the charge evenly.
  void expect_streamed(int64_t pieces) { pieces_to_charge_ = pieces; }

  // How many of count tiles to stream so that the rest are full waves: none if they are already, otherwise
  // the remainder and one more tile a worker. Two tiles meet in a share then, so a finisher has one peer,
  // which has written its partial long before. A handicap may take more.
  int64_t remainder_tiles(int64_t count) const {
    const int64_t g = s_.workers;
    const int64_t rest = count % g;
    const int64_t handicap = next_charge();
    if (rest == 0 && handicap == 0) return 0;
    int64_t need = g;
    if (handicap > 0 && comm_workers_ < g) {
      need = max64(need, ceil_div((least_ + handicap) * g - comm_workers_ * handicap, s_.k_iters));
    }
    return min64(count, rest + ceil_div(max64(0, need - rest), g) * g);
  }

  void waves(int64_t count) {
    if (count <= 0) return;
    Piece p;
    p.num_tiles = count;
    push(p);
  }

  void streamed(int64_t count) {
    const int64_t handicap = next_charge();
    if (pieces_to_charge_ > 0) {
      charged_ += handicap;
      --pieces_to_charge_;
    }
    if (count <= 0) return;
    Piece p;
    p.kind = PieceKind::kStreamed;
    p.num_tiles = count;
    const int64_t g = s_.workers;
    const int64_t total = count * s_.k_iters;
    const int64_t h = handicap > 0 ? comm_workers_ : 0;
    if ((total + h * handicap) / g - handicap >= least_) {
      p.workers = g;
      p.handicapped = h;
      p.handicap = handicap;
    } else {  // the communicating workers get none, and no more of the others than get a decent share
      p.first_worker = h < g ? h : 0;
      p.workers = max64(1, min64(g - p.first_worker, total / least_));
    }
    push(p);
  }

  // How many of count tiles to cut at few depths: the remainder.
  int64_t aligned_tiles(int64_t count) const { return count % s_.workers; }

  // Tiles cut at multiples of K / granules, as many shares as there are workers or granules. Whole tiles if
  // that takes no longer.
  void aligned(int64_t count, int64_t granules) {
    if (count <= 0) return;
    const int64_t g = s_.workers;
    granules = granules > 1 ? min64(granules, s_.k_iters / s_.min_iters) : best_granules(count);
    // share_begin multiplies granules by k_iters, and by a share's number and the tiles: neither may wrap.
    constexpr int64_t kMost = int64_t{1} << 62;
    if (granules <= 1 || granules > kMost / s_.k_iters || granules > kMost / count / g) return waves(count);
    Piece p;
    p.kind = PieceKind::kStreamed;
    p.num_tiles = count;
    p.workers = min64(g, count * granules);
    p.granules = granules;
    push(p);
  }

  // As many shares as there are (tile, split) pairs, one ticket each; with no regard for communication.
  void split(int64_t count, int64_t splits) {
    splits = s_.k_iters < 2 * s_.min_iters ? 1 : min64(splits, s_.k_iters / least_);
    if (splits <= 1) return waves(count);
    if (count <= 0) return;
    require(count <= (int64_t{1} << 31) / splits, "split_k needs tiles * splits below 2^31, but it is " +
                                                      std::to_string(count) + " * " + std::to_string(splits) +
                                                      ": take hybrid_first.");
    Piece p;
    p.kind = PieceKind::kStreamed;
    p.num_tiles = count;
    p.workers = count * splits;
    constexpr int64_t kMost = int64_t{1} << 62;  // see aligned(); beyond it the even cuts of granules 0 do
    if (splits <= kMost / s_.k_iters && p.workers <= kMost / p.workers) p.granules = splits;
    s_.workers = p.workers;
    push(p);
  }

  // Drops tickets that would find nothing to do, except those that communicate.
  Schedule finish(int64_t comm_workers) {
    int64_t used = max64(1, min64(comm_workers, s_.workers));
    for (int64_t i = 0; i < s_.num_pieces; ++i) {
      const Piece& p = s_.pieces[i];
      const bool is_waves = p.kind == PieceKind::kWaves;
      used = max64(used, is_waves ? min64(s_.workers, p.num_tiles) : p.first_worker + p.workers);
      if (!is_waves) s_.num_slots += p.workers;
    }
    s_.workers = used;
    return s_;
  }

 private:
  // Up to a tile for two workers: as many shares of every tile as there are workers for, so that the workers
  // of a tile can finish it together (divided_shares). Else the granules with which the longest share is
  // shortest; fewer among equals. More than kMost cut it little finer.
  int64_t best_granules(int64_t count) const {
    constexpr int64_t kMost = 12;
    const int64_t g = s_.workers;
    const int64_t shortest = s_.k_iters / s_.min_iters;
    if (count <= g / 2) return max64(1, min64(min64(g / count, kMostShares), shortest));
    int64_t best = 1;
    for (int64_t n = 2; n <= min64(kMost, shortest); ++n) {
      // ceil(count * n / g) / n, the longest share in tiles.
      if (ceil_div(count * n, g) * best < ceil_div(count * best, g) * n) best = n;
    }
    return best;
  }

  int64_t next_charge() const {
    return pieces_to_charge_ > 0 ? ceil_div(comm_iters_ - charged_, pieces_to_charge_) : 0;
  }

  void push(Piece p) {
    p.first_tile = next_tile_;
    next_tile_ += p.num_tiles;
    s_.pieces[s_.num_pieces++] = p;
  }

  Schedule s_;
  int64_t comm_workers_ = 0;
  int64_t comm_iters_ = 0;
  int64_t charged_ = 0;
  int64_t pieces_to_charge_ = 1;
  int64_t least_ = 1;
  int64_t next_tile_ = 0;
};

// At most kMaxShardGroups groups without empty ones: neighbours share a group in larger worlds.
constexpr int64_t kMaxShardGroups = (kMaxPieces - 2) / 2;
inline std::vector<int64_t> group_shards(const std::vector<int64_t>& shard_tiles) {
  std::vector<int64_t> groups;
  for (const int64_t n : shard_tiles) {
    if (n > 0) groups.push_back(n);
  }
  const auto count = static_cast<int64_t>(groups.size());
  if (count <= kMaxShardGroups) return groups;
  std::vector<int64_t> merged(kMaxShardGroups, 0);
  for (int64_t i = 0; i < count; ++i) merged[i * kMaxShardGroups / count] += groups[i];
  return merged;
}

inline void check_ticket(const Schedule& s, int64_t ticket) {
  if (ticket < 0 || ticket >= s.tickets()) {
    throw std::invalid_argument("worker must lie in [0, " + std::to_string(s.tickets()) + "), but it is " +
                                std::to_string(ticket) + ".");
  }
}

// Keeps every sum and product below 2^63. The largest are (least share + handicap) * workers, at most 2^61
// for either term, and tiles * k_iters + handicapped * handicap, at most the same.
inline void check_options(int64_t tiles, int64_t k_iters, const ScheduleOptions& o) {
  // Plans are made by the hundred: sentences only where they are needed.
  require(tiles >= 0, [&] { return "tiles must not be negative, but it is " + std::to_string(tiles) + "."; });
  require(k_iters >= 1,
          [&] { return "k_iters must be at least 1, but it is " + std::to_string(k_iters) + "."; });
  require(tiles <= std::numeric_limits<int64_t>::max() / 4 / k_iters, [&] {
    return "tiles * k_iters must stay below 2^61, but it is " + std::to_string(tiles) + " * " +
           std::to_string(k_iters) + ": use larger tiles.";
  });
  check_count("workers", o.workers);
  check_count("min_iters", o.min_iters);
  check_count("splits", o.splits);
  require(o.comm_workers >= 0 && o.comm_workers <= o.workers, [&] {
    return "comm_workers must lie between 0 and workers (" + std::to_string(o.workers) + "), but it is " +
           std::to_string(o.comm_workers) + ".";
  });
  require(o.comm_iters >= 0 && o.comm_iters <= std::numeric_limits<int64_t>::max() / 4 / o.workers, [&] {
    return "comm_iters must not be negative, nor beyond 2^61 / workers, but it is " +
           std::to_string(o.comm_iters) + ".";
  });
  for (const int64_t n : o.shard_tiles) {
    require(n >= 0,
            [&] { return "shard_tiles must not be negative, but one is " + std::to_string(n) + "."; });
  }
  int64_t sum = 0;
  for (const int64_t n : o.shard_tiles) {
    require(n <= tiles - sum, [&] {
      return "shard_tiles must add up to the number of tiles (" + std::to_string(tiles) +
             "), but they add up to more.";
    });
    sum += n;
  }
  require(o.shard_tiles.empty() || sum == tiles, [&] {
    return "shard_tiles must add up to the number of tiles (" + std::to_string(tiles) +
           "), but they add up to " + std::to_string(sum) + ".";
  });
}

}  // namespace detail

// The schedule of tiles tiles of k_iters iterations each. Pure: equal arguments give equal schedules.
// Throws std::invalid_argument with a sentence where an option makes no sense.
inline Schedule make_schedule(ScheduleKind kind, int64_t tiles, int64_t k_iters, const ScheduleOptions& o) {
  detail::check_options(tiles, k_iters, o);
  detail::ScheduleBuilder b(k_iters, o);
  if (kind == ScheduleKind::kSplitK) {
    b.split(tiles, o.splits);
    return b.finish(o.comm_workers);
  }
  if (kind == ScheduleKind::kDataParallel || !b.streams()) {
    b.waves(tiles);
    return b.finish(o.comm_workers);
  }
  if (kind == ScheduleKind::kHybridAligned) {
    const int64_t tail = b.aligned_tiles(tiles);
    b.waves(tiles - tail);
    b.aligned(tail, o.splits);
    return b.finish(o.comm_workers);
  }
  const std::vector<int64_t> shards = o.shard_tiles.empty() ? std::vector<int64_t>{tiles} : o.shard_tiles;
  switch (kind) {
    case ScheduleKind::kStreamK:
      b.streamed(tiles);
      break;
    case ScheduleKind::kHybridFirst: {
      const int64_t head = b.remainder_tiles(tiles);
      b.streamed(head);
      b.waves(tiles - head);
      break;
    }
    case ScheduleKind::kHybridLast: {
      const int64_t tail = b.remainder_tiles(tiles);
      b.waves(tiles - tail);
      b.streamed(tail);
      break;
    }
    case ScheduleKind::kOwnFirst: {
      if (o.aligned) {
        const int64_t head = b.aligned_tiles(shards[0]);
        const int64_t tail = b.aligned_tiles(tiles - head);
        b.aligned(head, o.splits);
        b.waves(tiles - head - tail);
        b.aligned(tail, o.splits);
        break;
      }
      b.expect_streamed(shards[0] > 0 && shards[0] < tiles ? 2 : 1);
      const int64_t head = b.remainder_tiles(shards[0]);
      if (shards[0] > 0) b.streamed(head);
      const int64_t tail = b.remainder_tiles(tiles - head);
      b.waves(tiles - head - tail);
      b.streamed(tail);
      break;
    }
    case ScheduleKind::kEveryShard: {
      const std::vector<int64_t> groups = detail::group_shards(shards);
      b.expect_streamed(static_cast<int64_t>(groups.size()));
      for (const int64_t count : groups) {
        if (o.aligned) {
          const int64_t tail = b.aligned_tiles(count);
          b.waves(count - tail);
          b.aligned(tail, o.splits);
          continue;
        }
        const int64_t head = b.remainder_tiles(count);
        b.streamed(head);
        b.waves(count - head);
      }
      break;
    }
    default:
      break;
  }
  return b.finish(o.comm_workers);
}

}  // namespace tpk

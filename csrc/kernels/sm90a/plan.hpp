// Plans of the Hopper kernel: which tile, cluster, schedule and number of workers a product gets. Pure
// functions, so that the launcher, explain() and tests agree without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "host/plan.hpp"
#include "host/progress.hpp"
#include "kernels/sm90a/cost.hpp"
#include "kernels/sm90a/groups.hpp"
#include "kernels/sm90a/one_tile_cost.hpp"
#include "kernels/sm90a/placement.hpp"
#include "kernels/sm90a/tiles.hpp"

namespace tpk::sm90a {

struct GemmPlan {
  Plan plan;  // of the cluster's tile
  TileId tile = TileId::k128x256;
  ClusterShape cluster;
  RowBlocks blocks;
  bool waits_safely = true;  // nobody waits for another rank before all is drawn that others wait for
};

// Clusters that run at once, by tile and by index into kClusterShapes.
struct Residency {
  int64_t clusters[kNumAllTiles][kNumClusterShapes] = {};
};

// One CTA a multiprocessor: what a whole H100 or H200 holds. Clusters of 4 and 8 do not fill every group of
// multiprocessors: 30 and 15 run at once on 132.
inline int64_t clusters_that_fit(int64_t multiprocessors, int64_t size) {
  return size < 4 ? multiprocessors / size : multiprocessors * (120 / size) / 132;
}
inline Residency full_residency(int64_t multiprocessors) {
  Residency r;
  for (int t = 0; t < kNumAllTiles; ++t) {
    for (int i = 0; i < kNumClusterShapes; ++i) {
      if (takes_cluster(static_cast<TileId>(t), kClusterShapes[i]))
        r.clusters[t][i] = clusters_that_fit(multiprocessors, kClusterShapes[i].size());
    }
  }
  return r;
}

// The columns of a gated tile are half gate, half b, and boxes of an outer-major b are 64 wide. A straight
// tile of one_tile.cuh has one map for all its columns.
inline bool takes_gate(TileId id) {
  return tile_shape(id).bn % 128 == 0 && (!is_one_tile(id) || is_swapped(id));
}

// Tensor cores cut off what a sum in float32 has no room for: its error grows with the number of products
// that are added one behind the other. Results in 16 bits do not show it. For those in float32, where tiles
// of 128x128 leave half of the multiprocessors free, a long K is cut as Stream-K and cuBLAS cut it, not just
// among the eight CTAs of a cluster.
constexpr int64_t kLongestSumOfFew = 4096;
inline bool sums_too_much(const Problem& p, ClusterShape cluster, int64_t clusters) {
  return ceil_div(p.k, cluster.k) > kLongestSumOfFew &&
         2 * num_tiles(p, {128, 128, kBK}) <= clusters * cluster.size();
}

// Of tiles of one_tile.cuh, unless one is named, so many plans are among the candidates: the cheapest.
constexpr size_t kMostOneTile = 8;

// Adding what other ranks send takes registers beside the accumulators: tiles of 192 columns spill there,
// which costs 15 % of a product with K = 6144.
inline bool has_room_for_sums(TileId id) { return tile_shape(id).bn != 192; }

// For sentences.
inline std::string tile_names(bool scaled) {
  std::string names;
  for (int t = scaled ? kNumTiles : 0; t < (scaled ? kNumAllTiles : kNumWalkingTiles); ++t)
    names += (names.empty() ? "" : ", ") + name(static_cast<TileId>(t));
  if (scaled) return names;
  for (const OneTileKernel& k : kOneTileKernels) {
    const std::string rows = std::to_string(k.rows);
    names += (&k == kOneTileKernels ? ", of whole tiles " : ", ") + std::to_string(k.first) + "x" + rows +
             "x64s to " + std::to_string(k.last) + "x" + rows + "x64s";
  }
  return names + " in steps of 16 rows, and the same with rows and columns changed, as 64x16x64w";
}

inline bool is_tile_name(std::string_view text) { return find_tile(text).has_value(); }

// Kinds that an arrival cuts at few depths of K.
inline bool is_aligned(ScheduleKind kind) {
  return kind == ScheduleKind::kHybridAligned || kind == ScheduleKind::kOwnFirst ||
         kind == ScheduleKind::kEveryShard;
}

// Plans of one tile and cluster. The problem, and all else that it is made of, must outlive it.
class TilePlans {
 public:
  TilePlans(const Problem& p, TileId tile, int cluster_index, int64_t workers, const Demands& demands,
            const Residency& residency, const Ranks& ranks, const GroupedRows* groups)
      : p_(p),
        tile_(tile),
        cluster_(kClusterShapes[cluster_index]),
        demands_(demands),
        direction_(ranks.direction),
        addends_(ranks.rows.world - 1),
        resident_(max64(1, residency.clusters[static_cast<int>(tile)][cluster_index])),
        workers_(workers > 0 ? workers : resident_) {
    shape_ = cluster_tile(tile, cluster_);
    if (demands.gated) shape_.bn /= 2;
    placement_ = groups != nullptr ? place_grouped(p, shape_, *groups) : place_tiles(p, shape_, ranks);
    if (ranks.num_chunks > 0) expect(ranks);
  }

  // Some rows are not there at once.
  bool waits() const { return arrivals_.last > 0; }
  // Taking rows group by group, as they arrive, may be worth it.
  bool has_groups() const { return grouped_.order.num_bands > 1; }

  // The plan that the arguments name, as if all rows were there.
  GemmPlan make(ScheduleKind kind, int64_t splits) const {
    GemmPlan g;
    g.tile = tile_;
    g.cluster = cluster_;
    ScheduleOptions o;
    o.workers = workers_;
    o.splits = splits;
    o.aligned = direction_ == Direction::kArrival;
    const Placement& placement = grouped(kind) ? grouped_ : placement_;
    o.shard_tiles = placement.shard_tiles;
    g.blocks = placement.blocks;
    g.plan.tile = shape_;
    g.plan.kind = kind;
    g.plan.order = placement.order;
    g.plan.schedule = make_schedule(kind, g.plan.order.size(), iters_per_tile(p_, shape_), o);
    const Schedule& s = g.plan.schedule;
    const Piece& last = s.pieces[max64(0, s.num_pieces - 1)];
    g.plan.splits = last.granules > 0                                  ? last.granules
                    : kind == ScheduleKind::kSplitK && s.num_slots > 0 ? s.workers / g.plan.order.size()
                                                                       : 1;
    const double work = work_us(p_, s, tile_, cluster_, running(s), demands_, hopper_cost.get());
    g.plan.predicted_us =
        total_us(p_, s, tile_, cluster_, running(s), work, reread_bytes(kind), hopper_cost.get());
    if (direction_ == Direction::kDeparture) {
      g.plan.predicted_us +=
          departure_us(s, placement_.own_tiles, addends_, running(s),
                       work_cost(p_, tile_, cluster_, demands_, hopper_cost.get()).part, hopper_cost.get());
      for (const int64_t position : placement.turns) {
        Schedule& of = g.plan.schedule;
        g.waits_safely = g.waits_safely && of.num_pieces < kMaxPieces && tiles_apart(of, position);
        if (g.waits_safely) of = start_turn(of, position);
      }
    }
    return g;
  }

  // What it takes with the rows as they arrive: hardly less.
  double predict_arrival(const GemmPlan& g) const {
    const Schedule& s = g.plan.schedule;
    const double work =
        simulate_us(s, step_cost(p_, s, tile_, cluster_, running(s), demands_, hopper_cost.get()),
                    grouped(g.plan.kind) ? grouped_arrivals_ : arrivals_, running(s));
    return total_us(p_, s, tile_, cluster_, running(s), work, reread_bytes(g.plan.kind), hopper_cost.get());
  }

 private:
  bool grouped(ScheduleKind kind) const { return waits() && kind == ScheduleKind::kEveryShard; }
  int64_t running(const Schedule& s) const { return min64(resident_, s.workers); }

  // Groups are taken one after the other, and each reads all of B; those of a grouped product, a matrix each.
  double reread_bytes(ScheduleKind kind) const {
    if (demands_.matrices > 1)
      return static_cast<double>(demands_.matrices * (demands_.gated ? 2 : 1) - 1) * bytes_of_b();
    if (!waits() || fits_l2(p_, hopper_cost.get(), element_bytes(tile_))) return 0;
    const int64_t groups = kind == ScheduleKind::kEveryShard ? grouped_.order.num_bands
                           : kind == ScheduleKind::kOwnFirst ? 2
                                                             : 1;
    return static_cast<double>(max64(0, groups - 1)) * bytes_of_b();
  }
  double bytes_of_b() const { return static_cast<double>(p_.batch) * p_.n * p_.k * element_bytes(tile_); }

  void expect(const Ranks& ranks) {
    const TileOrder& order = placement_.order;
    const auto row_at = row_arrivals(ranks, chunk_arrivals(ranks, p_.k, kCostLink), order.tiles_m, shape_.bm);
    arrivals_ = tile_arrivals(order, row_at);
    if (!waits()) return;
    const auto [iter, epilogue, part] = work_cost(p_, tile_, cluster_, demands_, hopper_cost.get());
    const double least = fits_l2(p_, hopper_cost.get(), element_bytes(tile_))
                             ? 0
                             : bytes_of_b() / hopper_cost.get().bytes_per_us;
    const GroupCost cost{workers_,
                         iters_per_tile(p_, shape_),
                         ScheduleOptions{}.min_iters,
                         order.batch * order.tiles_n,
                         iter,
                         epilogue,
                         hopper_cost.get().publish_us * part,
                         hopper_cost.get().add_us * part,
                         least};
    grouped_ = place_groups(placement_, choose_groups(arrival_bands(order, row_at), cost));
    grouped_arrivals_ = tile_arrivals(grouped_.order, row_at);
  }

  const Problem& p_;
  TileId tile_;
  ClusterShape cluster_;
  const Demands& demands_;
  Direction direction_;
  int32_t addends_;   // departure
  int64_t resident_;  // clusters that run at once
  int64_t workers_;
  TileShape shape_;
  Placement placement_;
  TileArrivals arrivals_;
  Placement grouped_;  // every_shard: what lands together may be taken together
  TileArrivals grouped_arrivals_;
};

// A tile and cluster of one_tile.cuh, of which there are over a thousand: no more than what ranks them.
struct WholeTile {
  double us;
  TileId tile;
  ClusterShape cluster;
};

inline TileShape one_tile_extent(TileId tile, ClusterShape cluster, bool gated) {
  TileShape shape = cluster_tile(tile, cluster);
  if (gated) shape.bn /= 2;
  return shape;
}

// Nothing where the grid would be too large: a CTA for every tile, in whole clusters.
inline std::optional<WholeTile> rank_one_tile(const Problem& p, TileId tile, ClusterShape cluster,
                                              const Demands& demands, int64_t clusters) {
  const TileShape shape = one_tile_extent(tile, cluster, demands.gated);
  constexpr int64_t kMostBlocks = 65535;  // of the grid's second and third extents
  if (tiles_m(p, shape) > kMostBlocks || p.batch > kMostBlocks ||
      tiles_n(p, shape) * cluster.size() > std::numeric_limits<int32_t>::max()) {
    return std::nullopt;
  }
  const bool outer_columns = is_swapped(tile) ? demands.outer_rows : demands.outer_columns;
  return WholeTile{one_tile_us(p, tile, cluster, demands.gated, demands.rounds_alone(), outer_columns,
                               clusters, hopper_cost.get().whole),
                   tile, cluster};
}

// Its plan, with a worker for every tile: what it does, for those who ask.
inline GemmPlan plan_one_tile(const Problem& p, const WholeTile& whole, bool gated) {
  GemmPlan g;
  g.tile = whole.tile;
  g.cluster = whole.cluster;
  g.plan.tile = one_tile_extent(whole.tile, whole.cluster, gated);
  g.plan.kind = ScheduleKind::kDataParallel;
  g.plan.splits = 1;
  g.plan.predicted_us = whole.us;
  g.plan.order = make_tile_order(p, g.plan.tile);
  ScheduleOptions o;
  o.workers = max64(1, g.plan.order.size());
  g.plan.schedule =
      make_schedule(ScheduleKind::kDataParallel, g.plan.order.size(), iters_per_tile(p, g.plan.tile), o);
  return g;
}

// The best plan of every tile and cluster that `tile` allows ("" allows all, but few of one_tile.cuh's),
// cheapest first. schedule: a name of host/schedule_builder.hpp or "auto". workers: tickets that run at once,
// 0 for as many as fit. Throws std::invalid_argument with a sentence where an argument makes no sense.
inline std::vector<GemmPlan> candidates(const Problem& p, std::string_view schedule, int64_t workers,
                                        int64_t splits, std::string_view tile, const Demands& demands,
                                        const Residency& residency, const Ranks& ranks = {},
                                        const GroupedRows* groups = nullptr) {
  std::vector<GemmPlan> found;
  found.reserve(kNumWalkingTiles * kNumWalkingClusters + kMostOneTile);
  const std::optional<NamedTile> only = tile.empty() ? std::nullopt : find_tile(tile);
  bool named = false;
  bool unsafe = false;
  bool one_tile = false;  // was named
  std::vector<WholeTile> whole;
  const bool takes_whole =
      (schedule == "auto" || schedule == name(ScheduleKind::kDataParallel)) && workers == 0;
  const bool takes_one_tile =
      takes_whole && !demands.keeps_rows && ranks.direction == Direction::kNone && groups == nullptr;
  for (int t = 0; t < kNumAllTiles; ++t) {
    const auto id = static_cast<TileId>(t);
    if (is_scaled(id) != (demands.product != Product::kHalf)) continue;
    for (int c = 0; c < kNumClusterShapes; ++c) {
      if (!takes_cluster(id, kClusterShapes[c])) continue;
      if (!tile.empty() && (!only || only->id != id || (only->cluster >= 0 && only->cluster != c))) continue;
      named = true;
      if (is_one_tile(id)) {
        one_tile = !tile.empty();
        if (!takes_one_tile || residency.clusters[t][c] < 1 || (demands.gated && !takes_gate(id))) continue;
        if (demands.wide && !one_tile && sums_too_much(p, kClusterShapes[c], residency.clusters[t][c]))
          continue;
        if (const auto found_one = rank_one_tile(p, id, kClusterShapes[c], demands, residency.clusters[t][c]))
          whole.push_back(*found_one);
        continue;
      }
      if (demands.gated && !takes_gate(id)) continue;
      if (tile.empty() && ranks.direction == Direction::kDeparture && !has_room_for_sums(id)) continue;
      if (residency.clusters[t][c] < 1) continue;
      std::optional<GemmPlan> best;
      const TilePlans plans(p, id, c, workers, demands, residency, ranks, groups);
      const auto consider = [&](ScheduleKind kind, int64_t n) {
        GemmPlan plan = plans.make(kind, n);
        if (!plan.waits_safely) return;
        const auto is_best = [&] { return !best || plan.plan.predicted_us < best->plan.predicted_us; };
        if (!is_best()) return;
        if (plans.waits()) plan.plan.predicted_us = plans.predict_arrival(plan);
        if (is_best()) best = plan;
      };
      if (schedule != "auto") {
        const ScheduleKind kind = parse_schedule_kind(schedule);
        if (plans.waits() && splits == 1 && is_aligned(kind)) {
          for (const int64_t n : kDepths) consider(kind, n);
        } else {
          consider(kind, splits);
        }
      } else {
        consider(ScheduleKind::kDataParallel, 1);
        for (const int64_t n : kDepths) consider(ScheduleKind::kHybridAligned, n);
        for (const int64_t n : kDepths) {
          if (plans.waits()) consider(ScheduleKind::kOwnFirst, n);
          if (plans.has_groups()) consider(ScheduleKind::kEveryShard, n);
        }
      }
      if (best) {
        found.push_back(*best);
      } else {
        unsafe = true;
      }
    }
  }
  const auto cheaper = [](const GemmPlan& a, const GemmPlan& b) {
    return a.plan.predicted_us < b.plan.predicted_us;
  };
  std::stable_sort(whole.begin(), whole.end(),
                   [](const WholeTile& a, const WholeTile& b) { return a.us < b.us; });
  if (tile.empty() && whole.size() > kMostOneTile) whole.resize(kMostOneTile);
  for (const WholeTile& one : whole) found.push_back(plan_one_tile(p, one, demands.gated));
  std::stable_sort(found.begin(), found.end(), cheaper);
  if (!found.empty()) return found;
  if (unsafe) {
    throw std::invalid_argument(
        "schedule '" + std::string(schedule) +
        "' could make ranks wait for each other: its own tiles are not apart from those of others; "
        "use data_parallel or auto.");
  }
  if (one_tile && !takes_one_tile) {
    throw std::invalid_argument(
        "tile '" + std::string(tile) + "' is of the kernel whose CTAs take whole tiles, one each, " +
        (!takes_whole        ? "so that schedule must be 'auto' or 'data_parallel' and workers 0"
         : groups != nullptr ? "and no rows of groups"
                             : "and no rows of other ranks") +
        "; use another tile or none.");
  }
  if (one_tile && !demands.gated) {
    throw std::invalid_argument("tile '" + std::string(tile) +
                                "' takes all multiprocessors of a device, and no more than 65535 products "
                                "in a batch, but it is asked for " +
                                std::to_string(p.batch) + "; use another tile or none.");
  }
  if (named && demands.gated) {
    throw std::invalid_argument("tile '" + std::string(tile) +
                                "' takes no gate: its columns cannot be halved; use 128x256x64, 256x128x64, "
                                "128x128x64 or a swapped tile of 128 columns.");
  }
  if (named)
    throw std::invalid_argument("no cluster of tile '" + std::string(tile) + "' fits on the device.");
  throw std::invalid_argument(
      "tile must be one of " + tile_names(demands.product != Product::kHalf) +
      ", with or without a cluster such as /2x1, or empty for the cheapest, but it is '" + std::string(tile) +
      "'.");
}

inline GemmPlan plan_gemm(const Problem& p, std::string_view schedule, int64_t workers, int64_t splits,
                          std::string_view tile, const Demands& demands, const Residency& residency,
                          const Ranks& ranks = {}, const GroupedRows* groups = nullptr) {
  return candidates(p, schedule, workers, splits, tile, demands, residency, ranks, groups).front();
}

}  // namespace tpk::sm90a

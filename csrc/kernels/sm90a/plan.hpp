// Plans of the Hopper kernel: which tile, cluster, schedule and number of workers a product gets. Pure
// functions, so that the launcher, explain() and tests agree without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "host/plan.hpp"
#include "host/progress.hpp"
#include "kernels/sm90a/config.hpp"
#include "kernels/sm90a/cost.hpp"
#include "kernels/sm90a/placement.hpp"

namespace tpk::sm90a {

struct GemmPlan {
  Plan plan;  // of the cluster's tile
  TileId tile = TileId::k128x256;
  ClusterShape cluster;
  RowBlocks blocks;
  bool waits_safely = true;  // nobody waits for another rank before it has done what others wait for
};

// Clusters that run at once, by tile and by index into kClusterShapes.
struct Residency {
  int64_t clusters[kNumTiles][kNumClusterShapes] = {};
};

// One CTA a multiprocessor: what a whole H100 or H200 holds.
inline Residency full_residency(int64_t multiprocessors) {
  Residency r;
  for (auto& of_tile : r.clusters) {
    for (int i = 0; i < kNumClusterShapes; ++i) of_tile[i] = multiprocessors / kClusterShapes[i].size();
  }
  return r;
}

// The columns of a gated tile are half gate, half b, and boxes of an outer-major b are 64 wide.
inline bool takes_gate(TileId id) { return kTileShapes[static_cast<int>(id)].bn % 128 == 0; }

inline bool is_tile_name(std::string_view text) {
  for (int t = 0; t < kNumTiles; ++t) {
    for (const ClusterShape c : kClusterShapes) {
      const std::string full = name(static_cast<TileId>(t), c);
      if (text == full || text == std::string_view(full).substr(0, full.find('/'))) return true;
    }
  }
  return false;
}

// The plan that the arguments name; predicted_us is infinite where no cluster of this shape fits.
inline GemmPlan make_gemm_plan(const Problem& p, TileId tile, int cluster_index, ScheduleKind kind,
                               int64_t workers, int64_t splits, const Demands& demands,
                               const Residency& residency, const Ranks& ranks = {}) {
  GemmPlan g;
  g.tile = tile;
  g.cluster = kClusterShapes[cluster_index];
  TileShape shape = cluster_tile(tile, g.cluster);
  if (demands.gated) shape.bn /= 2;
  ScheduleOptions o;
  const int64_t resident = residency.clusters[static_cast<int>(tile)][cluster_index];
  o.workers = workers > 0 ? workers : max64(1, resident);
  o.splits = splits;
  const Placement placement = place_tiles(p, shape, ranks);
  o.shard_tiles = placement.shard_tiles;
  g.blocks = placement.blocks;
  g.plan.tile = shape;
  g.plan.kind = kind;
  g.plan.order = placement.order;
  g.plan.schedule = make_schedule(kind, g.plan.order.size(), iters_per_tile(p, shape), o);
  const Schedule& s = g.plan.schedule;
  // All workers must run at once: who waits for another rank keeps the next ticket from being taken.
  if (ranks.direction == Direction::kDeparture) {
    g.waits_safely = own_tiles_apart(s, placement.first_own) && s.workers <= max64(1, resident);
  }
  const Piece& last = s.pieces[max64(0, s.num_pieces - 1)];
  g.plan.splits = last.granules > 0                                  ? last.granules
                  : kind == ScheduleKind::kSplitK && s.num_slots > 0 ? s.workers / g.plan.order.size()
                                                                     : 1;
  g.plan.predicted_us =
      predict_us(p, s, tile, g.cluster, min64(max64(1, resident), s.workers), demands, kCostHopper);
  return g;
}

// The best plan of every tile and cluster that `tile` allows ("" allows all), cheapest first. schedule: a
// name of host/schedule_builder.hpp or "auto". workers: tickets that run at once, 0 for as many as fit.
// Throws std::invalid_argument with a sentence where an argument makes no sense.
inline std::vector<GemmPlan> candidates(const Problem& p, std::string_view schedule, int64_t workers,
                                        int64_t splits, std::string_view tile, const Demands& demands,
                                        const Residency& residency, const Ranks& ranks = {}) {
  std::vector<GemmPlan> found;
  bool named = false;
  bool unsafe = false;
  for (int t = 0; t < kNumTiles; ++t) {
    const auto id = static_cast<TileId>(t);
    for (int c = 0; c < kNumClusterShapes; ++c) {
      const std::string full = name(id, kClusterShapes[c]);
      if (!tile.empty() && tile != full && tile != std::string_view(full).substr(0, full.find('/'))) continue;
      named = true;
      if (demands.gated && !takes_gate(id)) continue;
      if (residency.clusters[t][c] < 1) continue;
      std::optional<GemmPlan> best;
      const auto consider = [&](ScheduleKind kind, int64_t n) {
        const GemmPlan plan = make_gemm_plan(p, id, c, kind, workers, n, demands, residency, ranks);
        if (!plan.waits_safely) return;
        if (!best || plan.plan.predicted_us < best->plan.predicted_us) best = plan;
      };
      if (schedule != "auto") {
        consider(parse_schedule_kind(schedule), splits);
      } else {
        consider(ScheduleKind::kDataParallel, 1);
        for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 11}) consider(ScheduleKind::kHybridAligned, n);
      }
      if (best) {
        found.push_back(*best);
      } else {
        unsafe = true;
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const GemmPlan& a, const GemmPlan& b) {
    return a.plan.predicted_us < b.plan.predicted_us;
  });
  if (!found.empty()) return found;
  if (unsafe) {
    throw std::invalid_argument(
        "schedule '" + std::string(schedule) +
        "' could make ranks wait for each other: its own tiles do not come after all others, "
        "or it has more workers than run at once; use data_parallel or auto.");
  }
  if (named && demands.gated) {
    throw std::invalid_argument(
        "tile '" + std::string(tile) +
        "' takes no gate: its columns cannot be halved; use 128x256x64, 256x128x64 or "
        "128x128x64.");
  }
  if (named)
    throw std::invalid_argument("no cluster of tile '" + std::string(tile) + "' fits on the device.");
  std::string names;
  for (int t = 0; t < kNumTiles; ++t) {
    const std::string full = name(static_cast<TileId>(t), kClusterShapes[0]);
    names += full.substr(0, full.find('/')) + ", ";
  }
  throw std::invalid_argument(
      "tile must be one of " + names +
      "with or without a cluster such as /2x1, or empty for the cheapest, but it is '" + std::string(tile) +
      "'.");
}

inline GemmPlan plan_gemm(const Problem& p, std::string_view schedule, int64_t workers, int64_t splits,
                          std::string_view tile, const Demands& demands, const Residency& residency,
                          const Ranks& ranks = {}) {
  return candidates(p, schedule, workers, splits, tile, demands, residency, ranks).front();
}

}  // namespace tpk::sm90a

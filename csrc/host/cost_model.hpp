// Predicted time of a schedule. Rough on purpose: it has to rank tiles, kinds and splits, not to tell time.
//
//   time = launch + max over workers (iterations * iter + epilogues + partials written + partials added)
//          + clear, where there are partials
//
// The constants are per architecture and per k-iteration of one worker that has a multiprocessor (or core) to
// itself while all others work too. They are rough and meant to be refitted on real kernels: `tpk calibrate`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "host/schedule.hpp"

namespace tpk {

// Times in microseconds.
struct CostConstants {
  double launch_us = 0;         // launch, and what is done once
  double mac_us = 0;            // one multiply-accumulate of one worker
  double load_us = 0;           // one operand element brought in, beside the products that hide it
  double iter_us = 0;           // one iteration, beside that
  double epilogue_us = 0;       // one tile, beside its elements
  double epilogue_elem_us = 0;  // one element stored
  double partial_us = 0;        // writing a partial tile and raising its flag, or waiting for one
  double partial_elem_us = 0;   // one element of it written, or read and added
  double clear_us = 0;          // zeroing the flags of partial tiles, where there are any
};

// Half precision by mma.sync on A100: 312 TFLOP/s over 108 multiprocessors at 75 %. An estimate; the portable
// kernel's own plans use kernels/sm80/cost.hpp, which knows each of its tiles.
inline constexpr CostConstants kCostSm80{5.0, 9.2e-7, 7.0e-6, 0.05, 0.8, 2.4e-5, 0.8, 3.0e-5};
// The same kernel on H100 and H200, about half of what wgmma reaches. An estimate.
inline constexpr CostConstants kCostSm90{5.0, 6.2e-7, 5.0e-6, 0.05, 0.8, 2.0e-5, 0.8, 2.4e-5};
// CPU executor, fp32, one thread a core, fitted on an EPYC with AVX-512: 54 to 74 GFLOP/s a core, tile for
// tile.
inline constexpr CostConstants kCostCpu{10.0, 2.6e-5, 3.3e-4, 0.2, 1.0, 5.0e-4, 2.0, 5.0e-4};

// Constants that plans are made with: those of this file until a calibration gives others. Each library has
// its own. Plans may be made meanwhile by other threads, so what was given is never freed: its address tells
// plans that were made with it from others.
template <typename Cost>
class CostInUse {
 public:
  constexpr explicit CostInUse(const Cost& cost) : cost_(&cost) {}
  const Cost& get() const { return *cost_.load(std::memory_order_acquire); }
  void set(const Cost& cost) { cost_.store(new Cost(cost), std::memory_order_release); }

 private:
  std::atomic<const Cost*> cost_;
};

inline constinit CostInUse<CostConstants> cpu_cost{kCostCpu};

// Calls visit(name, number) for every constant.
template <typename Cost, typename Visit>
void visit_constants(Cost& c, const Visit& visit)
  requires std::is_same_v<std::remove_const_t<Cost>, CostConstants>
{
  visit("launch_us", c.launch_us);
  visit("mac_us", c.mac_us);
  visit("load_us", c.load_us);
  visit("iter_us", c.iter_us);
  visit("epilogue_us", c.epilogue_us);
  visit("epilogue_elem_us", c.epilogue_elem_us);
  visit("partial_us", c.partial_us);
  visit("partial_elem_us", c.partial_elem_us);
}

inline CostConstants cost_constants(std::string_view arch) {
  if (arch == "cpu") return kCostCpu;
  if (arch == "sm80") return kCostSm80;
  if (arch == "sm90") return kCostSm90;
  throw std::invalid_argument("arch must be cpu, sm80 or sm90, but it is '" + std::string(arch) + "'.");
}

// What one worker does, counted without walking its segments.
struct WorkCounts {
  int64_t iterations = 0;
  int64_t epilogues = 0;  // tiles that it finishes
  int64_t partials_written = 0;
  int64_t partials_added = 0;
};

inline WorkCounts count_work(const Schedule& s, int64_t worker) {
  WorkCounts c;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& p = s.pieces[i];
    if (p.kind == PieceKind::kWaves) {
      const int64_t tiles = worker < p.num_tiles ? (p.num_tiles - 1 - worker) / s.workers + 1 : 0;
      c.iterations += tiles * s.k_iters;
      c.epilogues += tiles;
      continue;
    }
    const int64_t share = worker - p.first_worker;
    if (share < 0 || share >= p.workers) continue;
    const int64_t begin = share_begin(s, p, share);
    const int64_t end = share_begin(s, p, share + 1);
    if (begin == end) continue;
    c.iterations += end - begin;
    c.epilogues += end / s.k_iters - begin / s.k_iters;
    c.partials_written += end % s.k_iters != 0;
    const int64_t tile_begin = begin - begin % s.k_iters;
    if (begin > tile_begin && end >= tile_begin + s.k_iters) {
      int64_t first = 0;  // the last share that begins at or before the tile
      for (int64_t high = share - 1; first < high;) {
        const int64_t middle = first + (high - first + 1) / 2;
        if (share_begin(s, p, middle) <= tile_begin) {
          first = middle;
        } else {
          high = middle - 1;
        }
      }
      c.partials_added += share - first;
    }
  }
  return c;
}

inline double iteration_us(const TileShape& t, const CostConstants& c) {
  const double macs = static_cast<double>(t.bm) * t.bn * t.bk;
  const double loads = (static_cast<double>(t.bm) + t.bn) * t.bk;
  return c.iter_us + macs * c.mac_us + loads * c.load_us;
}

// Predicted time of a schedule with multiprocessors workers at a time; more tickets than that take turns.
inline double predict_us(const Schedule& s, const TileShape& t, const CostConstants& c,
                         int64_t multiprocessors) {
  const double elems = static_cast<double>(t.bm) * t.bn;
  const double iter = iteration_us(t, c);
  const double epilogue = c.epilogue_us + elems * c.epilogue_elem_us;
  const double partial = c.partial_us + elems * c.partial_elem_us;
  // Of more than 2 * kEnd tickets only the first and the last kEnd are looked at. The first have the most
  // whole tiles; the last take no handicap, and end with the finisher of the last tile, which adds its
  // partials.
  constexpr int64_t kEnd = 4096;
  double longest = 0;
  for (int64_t w = 0; w < s.workers; ++w) {
    if (w == kEnd) w = max64(w, s.workers - kEnd);
    const WorkCounts n = count_work(s, w);
    longest = std::max(longest, n.iterations * iter + n.epilogues * epilogue +
                                    (n.partials_written + n.partials_added) * partial);
  }
  const double once = c.launch_us + (s.num_slots > 0 ? c.clear_us : 0.0);
  return once + longest * ceil_div(s.workers, max64(1, multiprocessors));
}

}  // namespace tpk

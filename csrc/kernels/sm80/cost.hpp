// What the portable kernel's work costs, by element and tile. Rough on purpose: it has to rank tiles,
// schedules and splits, not to tell time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "host/cost_model.hpp"
#include "kernels/sm80/config.hpp"

namespace tpk::sm80 {

enum class Generation : int32_t { kAmpere, kHopper };

inline Generation generation_of(int compute_capability_major) {
  return compute_capability_major >= 9 ? Generation::kHopper : Generation::kAmpere;
}

// Microseconds. r CTAs that share a multiprocessor take max(alone, r * share) for an iteration of each.
struct TileCost {
  double alone;     // one iteration of a CTA that has a multiprocessor to itself
  double share;     // of a multiprocessor's time
  double epilogue;  // one tile, of a CTA alone
  double busy;      // of a multiprocessor's time, beside the iterations of one tile
  double partial;   // a partial tile written, or read and added
};

struct MachineCost {
  double launch_us;     // launch, and the first stages
  double cut_us;        // more where CTAs wait for each other
  double bytes_per_us;  // of the device's memory
};

constexpr MachineCost kMachineHopper{1.5, 1.1, 4.0e6};
constexpr MachineCost kMachineAmpere{3.0, 1.0, 1.6e6};  // an estimate
constexpr const MachineCost& machine_cost(Generation g) {
  return g == Generation::kAmpere ? kMachineAmpere : kMachineHopper;
}

// In the order of TilesOf<>.
// The other elements: fitted by hand to one run of the kernel that cleared flags, but for the time of a
// launch.
constexpr TileCost kHalfHopper[] = {
    {0.62, 0.62, 4.8, 1.0, 2.5}, {0.42, 0.335, 3.6, 1.0, 1.5}, {0.156, 0.108, 0.8, 0.2, 0.6}};
constexpr TileCost kTf32Hopper[] = {{0.67, 0.67, 4.8, 1.0, 2.5}, {0.215, 0.13, 0.8, 0.2, 0.6}};
constexpr TileCost kFp32Hopper[] = {{1.67, 1.67, 5.0, 1.0, 1.5}, {0.525, 0.44, 0.8, 0.2, 0.6}};
// Fitted to 18,700 plans of 890 products of the sweep's domain that take up to 5 ms, most of them up to 300
// us, on an H200, in graphs, operands in memory: by what the choice among them loses (2.2 % in the mean; on a
// quarter of them that a fit had not seen 2.5 %) and by the times of those within half of the fastest. Then
// 128x128 by long plans of 180 products one behind the other, since it takes less power than two CTAs of
// 128x64: in bursts it is no faster, under a full load by 6 to 15 %.
constexpr TileCost kFp64Hopper[] = {{1.02, 0.99, 0.02, 4.62, 2.87},   {0.610, 0.518, 0.59, 0.87, 3.47},
                                    {0.583, 0.530, 0.02, 1.44, 2.18}, {0.261, 0.261, 2.30, 0.02, 0.98},
                                    {0.332, 0.332, 0.81, 0.29, 2.22}, {0.252, 0.189, 0.87, 0.41, 0.68},
                                    {0.453, 0.165, 0.86, 0.02, 0.39}, {0.220, 0.124, 0.04, 0.11, 0.48}};

static_assert(std::size(kHalfHopper) == std::size(HalfTiles<Element::kBf16>::kFacts) &&
                  std::size(kTf32Hopper) == std::size(Tf32Tiles::kFacts) &&
                  std::size(kFp32Hopper) == std::size(Fp32Tiles::kFacts) &&
                  std::size(kFp64Hopper) == std::size(Fp64Tiles::kFacts),
              "Every tile has its costs.");

// An A100's multiprocessor against an H200's, by their peaks: an estimate.
constexpr double ampere_slower(Element e) { return e == Element::kFp64 || e == Element::kFp32 ? 2.8 : 1.25; }

inline TileCost tile_cost(Element e, int tile, Generation g) {
  TileCost t = e == Element::kTf32   ? kTf32Hopper[tile]
               : e == Element::kFp32 ? kFp32Hopper[tile]
               : e == Element::kFp64 ? kFp64Hopper[tile]
                                     : kHalfHopper[tile];
  if (g == Generation::kAmpere) {
    t.alone *= ampere_slower(e);
    t.share *= ampere_slower(e);
  }
  return t;
}

// Every operand read once, and the output written.
inline double memory_us(const Problem& p, Element e, const MachineCost& machine) {
  const auto elements = static_cast<double>(p.batch) * (static_cast<double>(p.m) * static_cast<double>(p.k) +
                                                        static_cast<double>(p.k) * static_cast<double>(p.n) +
                                                        static_cast<double>(p.m) * static_cast<double>(p.n));
  return machine.launch_us + elements * bytes_of(e) / machine.bytes_per_us;
}

// CTAs beside each other on a multiprocessor.
inline int64_t beside(int64_t ctas, int64_t multiprocessors) {
  return max64(1, ceil_div(ctas, multiprocessors));
}

// A CTA that does this much while r - 1 others on its multiprocessor do as much.
inline double work_us(const TileCost& t, const WorkCounts& n, int64_t r) {
  const auto iterations = static_cast<double>(n.iterations);
  const auto tiles = static_cast<double>(n.epilogues);
  const double fixup = static_cast<double>(n.partials_written + n.partials_added) * t.partial;
  return std::max(iterations * t.alone + tiles * t.epilogue + fixup,
                  static_cast<double>(r) * (iterations * t.share + tiles * t.busy) + fixup);
}

// The time of a schedule where a multiprocessor holds `resident` CTAs.
inline double predict_us(const Schedule& s, const TileCost& t, const MachineCost& machine,
                         int64_t multiprocessors, int64_t resident) {
  const int64_t at_once = min64(s.workers, multiprocessors * resident);
  const int64_t r = beside(at_once, multiprocessors);
  double time = 0;
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const Piece& p = s.pieces[i];
    if (p.kind == PieceKind::kWaves) {
      const WorkCounts one{s.k_iters, 1, 0, 0};
      const int64_t waves = p.num_tiles / at_once;
      const int64_t rest = p.num_tiles % at_once;
      time += static_cast<double>(waves) * work_us(t, one, r);
      // Behind other waves the rest goes where CTAs end first, and those of a multiprocessor end together.
      if (rest > 0) time += work_us(t, one, waves > 0 ? min64(r, rest) : beside(rest, multiprocessors));
      continue;
    }
    // Some of the workers, the last among them: it finishes the last tile.
    Schedule piece = s;
    piece.num_pieces = 1;
    piece.pieces[0] = p;
    const int64_t step = max64(1, p.workers / 24);
    double longest = 0;
    for (int64_t w = p.workers - 1; w >= 0; w -= step)
      longest = std::max(
          longest, work_us(t, count_work(piece, w), beside(min64(p.workers, at_once), multiprocessors)));
    time += static_cast<double>(ceil_div(p.workers, at_once)) * longest;
  }
  return machine.launch_us + (s.num_slots > 0 ? machine.cut_us : 0.0) + time;
}

}  // namespace tpk::sm80

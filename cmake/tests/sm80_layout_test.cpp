// Runs the portable kernel's data path on the CPU, exactly, for every tile, element and layout: global ->
// swizzled shared memory -> fragments -> products -> accumulators -> staged output tile, by the kernel's own
// code (see kernels/sm80/emulation), in which no access to shared memory may have a bank conflict. And its
// plans.
#include "kernels/sm80/emulation/cuda.hpp"
//
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#include "kernels/sm80/emulation/arrays.hpp"
#include "kernels/sm80/kernel.cuh"
#include "kernels/sm80/operands.hpp"
#include "kernels/sm80/plan.hpp"

using namespace tpk::sm80;

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  if (failures < 20) std::printf("FAILED: %s\n", what);
}

// The matrix [extent, K] of an operand that is K-major, outer-major, or neither.
tpk::emulation::Array operand(OperandLayout layout, tpk::Element e, int extent, int k, int seed) {
  using tpk::emulation::Memory;
  const Memory memory = layout == OperandLayout::kKMajor       ? Memory::kRows
                        : layout == OperandLayout::kOuterMajor ? Memory::kCols
                                                               : Memory::kStrided;
  return tpk::emulation::Array(
      1, extent, k, tpk::emulation::kind_of(e), memory, false,
      [=](int64_t r, int64_t c) { return static_cast<double>((r * (seed + 4) + c * (13 - seed)) % 17 - 8); });
}

// One stage of operands, all of it or (behind rows and K that there are) in part.
template <class Config, OperandLayout kA, OperandLayout kB>
void check_tile(int m, int n, int k) {
  const tpk::emulation::Array a = operand(kA, Config::kElement, m, k, 3);
  const tpk::emulation::Array b = operand(kB, Config::kElement, n, k, 7);
  const auto [operand_a, is_a] =
      read_operand(tpk::emulation::matrix(a), Config::kElementBytes, 1, m, a.row_stride, k, a.col_stride);
  const auto [operand_b, is_b] =
      read_operand(tpk::emulation::matrix(b), Config::kElementBytes, 1, n, b.row_stride, k, b.col_stride);
  expect(is_a == kA && is_b == kB, "operands lie as they should");
  using Sum = typename Config::Sum;
  std::vector<Sum> tile(static_cast<size_t>(Config::kBM) * Config::kBN, -1e30f);
  tpk::emulation::checks_banks = kA != OperandLayout::kStrided;
  tpk::emulation::launch(1, Config::kThreads, [&, from_a = operand_a, from_b = operand_b] {
    const int thread = thread_index_anew();
    const int warp = thread / 32;
    const FragmentReader<Config, FragmentOrder::kA, kA> reader_a(thread % 32,
                                                                 warp % Config::kWarpsM * Config::kWarpM);
    const FragmentReader<Config, FragmentOrder::kB, kB> reader_b(thread % 32,
                                                                 warp / Config::kWarpsM * Config::kWarpN);
    Loader<kA, Config::kBM, Config::kStageK, Config::kElementBytes, Config::kThreads> loader_a;
    Loader<kB, Config::kBN, Config::kStageK, Config::kElementBytes, Config::kThreads> loader_b;
    const uint32_t stages = shared_address(dynamic_shared());
    GemmParams p;
    p.a = from_a;
    p.b = from_b;
    p.problem = {m, n, k, 1};
    WorkItem item{};
    item.stages = (k + Config::kStageK - 1) / Config::kStageK;
    item.last_stage = k - (item.stages - 1) * Config::kStageK;
    start_segment<Config>(p, item, loader_a, loader_b, stages);
    Accumulators<Config> acc;
    clear<Config>(acc);
    mainloop<Config>(acc, p, loader_a, loader_b, reader_a, reader_b, stages, item.stages, item.last_stage);
    auto* const staged = reinterpret_cast<Sum*>(dynamic_shared());
    for (int part = 0; part < Config::kParts; ++part) {
      __syncthreads();
      stage_part<Config>(acc, staged, part);
      __syncthreads();
      constexpr int kRows = Config::kBM / Config::kParts;
      for (int i = thread; i < kRows * Config::kBN; i += Config::kThreads) {
        const int row = part_row<Config>(part, i / Config::kBN);
        tile[static_cast<size_t>(row * Config::kBN + i % Config::kBN)] =
            staged[output_offset<Config::kBN, Sum>(i / Config::kBN, i % Config::kBN)];
      }
    }
  });
  tpk::emulation::checks_banks = false;
  for (int r = 0; r < Config::kBM; ++r) {
    for (int c = 0; c < Config::kBN; ++c) {
      double want = 0;
      for (int i = 0; i < k && r < m && c < n; ++i) want += a(0, r, i) * b(0, c, i);
      expect(tile[static_cast<size_t>(r * Config::kBN + c)] == want, "the tile equals A * B");
    }
  }
}

// How the epilogue's accesses to the staged sums fall on the banks, in units of 8 or 16 bytes.
template <class Config>
void check_staging() {
  using Sum = typename Config::Sum;
  constexpr int kBytes = static_cast<int>(sizeof(Sum));
  std::set<uint32_t> used;
  for (int row = 0; row < Config::kBM / Config::kParts; ++row) {
    for (int col = 0; col < Config::kBN; ++col) {
      const uint32_t at = output_offset<Config::kBN, Sum>(row, col);
      expect(used.insert(at).second && at * kBytes < Config::kRingBytes, "sums have places of their own");
      constexpr int kUnit = kChunkBytes / kBytes;
      expect(at == output_offset<Config::kBN, Sum>(row, col / kUnit * kUnit) +
                       static_cast<uint32_t>(col % kUnit),
             "the columns that a thread stores lie side by side");
    }
  }
  uint32_t address[32];
  for (int row = 0; row < 16; row += 8) {
    for (int col = 0; col < Config::kBN; col += 8) {
      for (int lane = 0; lane < 32; ++lane) {
        address[lane] = kBytes * output_offset<Config::kBN, Sum>(row + accumulator_row(lane, 0),
                                                                 col + accumulator_col(lane, 0));
        expect(address[lane] % (2 * kBytes) == 0, "a pair of sums is aligned");
      }
      tpk::emulation::check_banks(address, 2 * kBytes);
    }
  }
  for (int first = 0; first < 8 * Config::kBN / (kChunkBytes / kBytes); first += 32) {
    for (int lane = 0; lane < 32; ++lane) {
      const int unit = (first + lane) * (kChunkBytes / kBytes);
      address[lane] = kBytes * output_offset<Config::kBN, Sum>(unit / Config::kBN, unit % Config::kBN);
    }
    tpk::emulation::check_banks(address, kChunkBytes);
  }
}

template <class Config>
void check_config() {
  constexpr auto kK = OperandLayout::kKMajor;
  constexpr auto kOuter = OperandLayout::kOuterMajor;
  constexpr auto kAny = OperandLayout::kStrided;
  check_staging<Config>();
  const int m = Config::kBM, n = Config::kBN, k = Config::kStageK;
  check_tile<Config, kK, kK>(m, n, k);
  check_tile<Config, kK, kOuter>(m, n, 2 * k - 5);
  check_tile<Config, kOuter, kK>(m - 3, n - 7, k);
  check_tile<Config, kOuter, kOuter>(m, n, k);
  check_tile<Config, kAny, kAny>(m - 1, n, k + 3);
}

template <class... Configs>
void check_configs(TileSet<Configs...>) {
  (check_config<Configs>(), ...);
}

// No finisher may wait for a slot that nobody writes, whatever plan a launch can get.
void check_plans(Element element) {
  const int64_t extents[] = {1, 63, 64, 129, 1000, 4096};
  const int64_t depths[] = {0, 1, 33, 256, 300, 1024, 5000};
  const char* names[] = {"auto",        "data_parallel", "stream_k",    "split_k",       "hybrid_first",
                         "hybrid_last", "own_first",     "every_shard", "hybrid_aligned"};
  for (const int64_t m : extents) {
    for (const int64_t n : extents) {
      for (const int64_t k : depths) {
        for (const char* schedule : names) {
          for (const int64_t workers : {0, 1, 7, 300}) {
            const int64_t splits = 1 + (m + k) % 5;
            const auto plan_of = [&](std::string_view tile) {
              return plan_gemm({m, n, k, 1}, element, Generation::kHopper, 20, schedule, workers, splits,
                               tile, full_residency(element));
            };
            const GemmPlan plan = plan_of("");
            const tpk::Schedule& s = plan.plan.schedule;
            std::vector<char> written(static_cast<size_t>(s.num_slots), 0);
            std::vector<char> wanted(static_cast<size_t>(s.num_slots), 0);
            int64_t iterations = 0;
            for (int64_t w = 0; w < s.workers; ++w) {
              tpk::SegmentCursor cursor(s, w);
              tpk::Segment segment;
              while (cursor.next(&segment)) {
                iterations += segment.k_end - segment.k_begin;
                expect(segment.k_end > segment.k_begin, "segments are not empty");
                if (segment.slot >= 0) written.at(static_cast<size_t>(segment.slot))++;
                for (int64_t i = segment.first_slot; i < segment.end_slot; ++i)
                  wanted.at(static_cast<size_t>(i))++;
              }
            }
            expect(written == wanted,
                   "every slot that is waited for is written once, and the other way round");
            expect(iterations == plan.plan.order.size() * s.k_iters, "all iterations are done");
            const auto shapes = tile_shapes(element);
            const tpk::TileShape t = shapes[static_cast<size_t>(plan.tile)];
            expect(t.bm == plan.plan.tile.bm && t.bn == plan.plan.tile.bn,
                   "the plan is for the kernel's tile");
            for (const tpk::TileShape& forced : shapes) {
              const GemmPlan other = plan_of(tpk::name(forced));
              expect(tpk::name(shapes[static_cast<size_t>(other.tile)]) == tpk::name(forced) &&
                         tpk::name(other.plan.tile) == tpk::name(forced),
                     "a tile that is named is taken");
              expect(other.plan.predicted_us >= plan.plan.predicted_us, "the free choice is the cheapest");
            }
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const Element e : tpk::emulation::kElements) {
    with_element(e, [](auto of) { check_configs(TilesOf<of.value>{}); });
    check_plans(e);
  }
  if (failures > 0) {
    std::printf("%d checks failed.\n", failures);
    return EXIT_FAILURE;
  }
  std::printf("sm80 layouts and plans: all checks passed.\n");
  return EXIT_SUCCESS;
}

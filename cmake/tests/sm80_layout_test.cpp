// Emulates the portable kernel's data path on the CPU: global -> swizzled shared memory -> ldmatrix ->
// mma.m16n8k16 -> accumulators -> staged output tile, with the kernel's own index maps and the instructions
// as the PTX manual defines them. Also checks that no access has a bank conflict, and how the loaders step
// from pass to pass.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#include "kernels/sm80/config.hpp"
#include "kernels/sm80/layout.hpp"
#include "kernels/sm80/plan.hpp"

using namespace tpk::sm80;

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  if (failures < 20) std::printf("FAILED: %s\n", what);
}

// Shared memory as 2-byte elements that hold small integers (floats stand for them).
struct Shared {
  std::vector<float> element;
  float& at(uint32_t byte) { return element.at(byte / 2); }
};

// Lane's two elements of one 8 x 8 block whose row r lies at row_address[r].
void ldmatrix(Shared& s, const uint32_t* row_address, bool transposed, int lane, float out[2]) {
  for (int e = 0; e < 2; ++e) {
    const int row = transposed ? 2 * (lane % 4) + e : lane / 4;
    const int col = transposed ? lane / 4 : 2 * (lane % 4) + e;
    out[e] = s.at(row_address[row] + 2 * static_cast<uint32_t>(col));
  }
}

// Fills an operand tile from value(outer, k) through the loader's chunk order.
template <class Tile, bool kOuterMajor, class Value>
void fill(Shared& s, uint32_t base, int threads, Value value) {
  std::set<uint32_t> used;
  for (int id = 0; id < Tile::kChunks; ++id) {
    const ChunkCoord c = Tile::chunk(id);
    const uint32_t at = kOuterMajor ? Tile::offset(c.outer / 8, c.k) : Tile::offset(c.outer, c.k / 8);
    expect(at % 16 == 0 && used.insert(at).second, "chunks have aligned places of their own");
    for (int e = 0; e < 8; ++e) {
      s.at(base + at + 2 * static_cast<uint32_t>(e)) =
          kOuterMajor ? value(c.outer + e, c.k) : value(c.outer, c.k + e);
    }
    // A pass moves every thread by whole rows without changing the swizzle.
    const int per_pass = threads / Tile::kChunksPerRow;
    const int pass = id / threads;
    const ChunkCoord first = Tile::chunk(id % threads);
    const uint32_t first_at =
        kOuterMajor ? Tile::offset(first.outer / 8, first.k) : Tile::offset(first.outer, first.k / 8);
    const int row_bytes = Tile::kChunksPerRow * 16;
    expect(at == first_at + static_cast<uint32_t>(pass * per_pass * row_bytes),
           "a pass adds a constant to the target");
    expect(kOuterMajor ? c.outer == first.outer && c.k == first.k + pass * per_pass
                       : c.k == first.k && c.outer == first.outer + pass * per_pass,
           "a pass adds a constant to the source");
  }
  for (int warp_first = 0; warp_first < Tile::kChunks; warp_first += 8) {
    std::set<uint32_t> banks;
    for (int id = warp_first; id < warp_first + 8; ++id) {
      const ChunkCoord c = Tile::chunk(id);
      banks.insert((kOuterMajor ? Tile::offset(c.outer / 8, c.k) : Tile::offset(c.outer, c.k / 8)) / 16 % 8);
    }
    expect(banks.size() == 8, "eight neighbouring threads write to different banks");
  }
}

// All lanes' registers of one 16 x 16 fragment: [lane][register][element].
template <class Tile>
void read_fragment(Shared& s, uint32_t base, FragmentOrder order, int first_outer, int f, int step,
                   float (&r)[32][4][2]) {
  for (int block = 0; block < 4; ++block) {
    uint32_t rows[8];
    std::set<uint32_t> banks;
    for (int i = 0; i < 8; ++i) {
      rows[i] = base + Tile::address(order, 8 * block + i, first_outer, Tile::address_index(f, step)) +
                Tile::address_bias(f, step);
      banks.insert(rows[i] / 16 % 8);
    }
    expect(banks.size() == 8, "ldmatrix reads eight different banks");
    for (int lane = 0; lane < 32; ++lane) ldmatrix(s, rows, Tile::kTransposed, lane, r[lane][block]);
  }
}

template <class Config, OperandLayout kA, OperandLayout kB>
void check_tile() {
  using TileA = OperandTile<kA, Config::kBM>;
  using TileB = OperandTile<kB, Config::kBN>;
  constexpr bool kOuterA = kA == OperandLayout::kOuterMajor;
  constexpr bool kOuterB = kB == OperandLayout::kOuterMajor;
  Shared s{std::vector<float>(Config::kStageBytes / 2, -1e30f)};
  const auto a = [](int m, int k) { return static_cast<float>((m * 7 + k * 13) % 17 - 8); };
  const auto b = [](int n, int k) { return static_cast<float>((n * 11 + k * 5) % 19 - 9); };
  fill<TileA, kOuterA>(s, 0, Config::kThreads, a);
  fill<TileB, kOuterB>(s, Config::kBytesA, Config::kThreads, b);

  std::vector<float> staged(Config::kBM * Config::kBN, -1e30f);
  for (int warp = 0; warp < Config::kWarpsM * Config::kWarpsN; ++warp) {
    const int first_m = warp % Config::kWarpsM * Config::kWarpM;
    const int first_n = warp / Config::kWarpsM * Config::kWarpN;
    for (int i = 0; i < Config::kFragmentsM; ++i) {
      for (int j = 0; j < Config::kFragmentsN; ++j) {
        float acc[32][4] = {};
        for (int step = 0; step < Config::kKSteps; ++step) {
          float fa[32][4][2];
          float fb[32][4][2];
          read_fragment<TileA>(s, 0, FragmentOrder::kA, first_m, i, step, fa);
          read_fragment<TileB>(s, Config::kBytesA, FragmentOrder::kB, first_n, j / 2, step, fb);
          // The matrices as mma.m16n8k16 sees them.
          float am[16][16];
          float bm[16][8];
          for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4;
            const int t = lane % 4;
            for (int e = 0; e < 2; ++e) {
              for (int r = 0; r < 4; ++r) am[g + 8 * (r % 2)][2 * t + e + 8 * (r / 2)] = fa[lane][r][e];
              for (int r = 0; r < 2; ++r) bm[2 * t + e + 8 * r][g] = fb[lane][j % 2 * 2 + r][e];
            }
          }
          for (int lane = 0; lane < 32; ++lane) {
            for (int r = 0; r < 4; ++r) {
              const int row = lane / 4 + 8 * (r / 2);
              const int col = 2 * (lane % 4) + r % 2;
              expect(row == accumulator_row(lane, r) && col == accumulator_col(lane, r), "accumulator map");
              for (int k = 0; k < 16; ++k) acc[lane][r] += am[row][k] * bm[k][col];
            }
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          for (int r = 0; r < 4; ++r) {
            const int row = first_m + i * 16 + accumulator_row(lane, r);
            const int col = first_n + j * 8 + accumulator_col(lane, r);
            staged.at(output_offset<Config::kBN>(row, col)) = acc[lane][r];
          }
        }
        // Writes of 8 bytes go half a warp at a time.
        for (int half = 0; half < 2; ++half) {
          std::set<uint32_t> banks;
          for (int lane = 16 * half; lane < 16 * half + 16; ++lane) {
            const uint32_t at = output_offset<Config::kBN>(first_m + i * 16 + accumulator_row(lane, 0),
                                                           first_n + j * 8 + accumulator_col(lane, 0));
            expect(at % 2 == 0, "a float2 is aligned");
            banks.insert(at / 2 % 16);
          }
          expect(banks.size() == 16, "staging writes have no bank conflict");
        }
      }
    }
  }
  for (int m = 0; m < Config::kBM; ++m) {
    for (int n = 0; n < Config::kBN; ++n) {
      float want = 0;
      for (int k = 0; k < Config::kBK; ++k) want += a(m, k) * b(n, k);
      expect(staged.at(output_offset<Config::kBN>(m, n)) == want, "staged tile equals A * B");
      if (n % 4 == 0) {
        const uint32_t at = output_offset<Config::kBN>(m, n);
        expect(at % 4 == 0, "a float4 is aligned");
        for (uint32_t e = 1; e < 4; ++e) {
          expect(output_offset<Config::kBN>(m, n + static_cast<int>(e)) == at + e,
                 "four columns lie side by side");
        }
      }
    }
  }
}

template <class Config>
void check_layouts() {
  constexpr auto kK = OperandLayout::kKMajor;
  constexpr auto kOuter = OperandLayout::kOuterMajor;
  check_tile<Config, kK, kK>();
  check_tile<Config, kK, kOuter>();
  check_tile<Config, kOuter, kK>();
  check_tile<Config, kOuter, kOuter>();
  check_tile<Config, OperandLayout::kStrided, OperandLayout::kStrided>();
}

// No finisher may wait for a slot that nobody writes, whatever plan a launch can get.
void check_plans() {
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
            const GemmPlan plan = plan_gemm({m, n, k, 1}, 20, tpk::kCostSm90, schedule, workers, splits);
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
            const tpk::TileShape t = tile_shape(plan.tile);
            expect(t.bm == plan.plan.tile.bm && t.bn == plan.plan.tile.bn,
                   "the plan is for the kernel's tile");
            for (const tpk::TileShape& forced : kTileShapes) {
              const GemmPlan other =
                  plan_gemm({m, n, k, 1}, 20, tpk::kCostSm90, schedule, workers, splits, tpk::name(forced));
              expect(tpk::name(tile_shape(other.tile)) == tpk::name(forced) &&
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
  check_layouts<Tile128x128>();
  check_layouts<Tile64x64>();
  check_plans();
  if (failures > 0) {
    std::printf("%d checks failed.\n", failures);
    return EXIT_FAILURE;
  }
  std::printf("sm80 layouts and plans: all checks passed.\n");
  return EXIT_SUCCESS;
}

// Products of 8-bit operands with scales: the main loop of a consumer warpgroup, and how scales get there.
//
// Hopper's tensor cores add fp8 products in accumulators of some 14 bits. So sums are made in two levels: the
// products of one stage, 128 of K, in the tensor cores, then added to fp32 registers (promoted) by the
// consumers, for which the other warpgroup's products leave time. That takes a second set of accumulators,
// of 64 x 128. `fast` does without: sums stay in the tensor cores.
//
// Scales of a tensor, of rows of A and of columns of B multiply what the main loop leaves, before anything
// else happens to it: partial tiles are scaled, too. Those of blocks of 128 of K multiply at each promotion.
// A warp of its own brings them into the stages, element by element, so that they may lie anyhow: 4-byte
// copies, whose latency the stages hide. Scales of A are read fastest where M is contiguous.
#pragma once

#include "kernels/sm90a/epilogue.cuh"

namespace tpk::sm90a {

constexpr int kProductColumns = 128;  // of what is promoted at a time

namespace detail {

constexpr int pair_number(Fp8 a, Fp8 b) { return 2 * static_cast<int>(a) + static_cast<int>(b); }

template <int kPair, int kN>
struct ScaledWgmma;
#define TPK_WGMMA(n, a, b, name)                                        \
  template <>                                                           \
  struct ScaledWgmma<pair_number(Fp8::a, Fp8::b), n> {                  \
    using Type = cute::SM90::GMMA::MMA_64x##n##x32_F32##name##_SS_TN<>; \
  };
#define TPK_WGMMAS(n)                  \
  TPK_WGMMA(n, kE4m3, kE4m3, E4M3E4M3) \
  TPK_WGMMA(n, kE4m3, kE5m2, E4M3E5M2) \
  TPK_WGMMA(n, kE5m2, kE4m3, E5M2E4M3) \
  TPK_WGMMA(n, kE5m2, kE5m2, E5M2E5M2)
TPK_WGMMAS(128)
TPK_WGMMAS(256)
#undef TPK_WGMMAS
#undef TPK_WGMMA

// This thread's number among all consumers, which have 64 rows of the tile each. Read anew where it is
// needed.
__device__ __forceinline__ uint32_t consumer_thread() {
  return static_cast<uint32_t>(thread_number()) - kWarpgroup;
}

// The lower word of an operand's descriptor, known to be the same in a warp: registers are scarce here, and
// what is made of it goes to uniform ones. The upper word is the same for all.
__device__ __forceinline__ uint32_t lower_word(const void* operand) {
  const auto word = static_cast<uint32_t>(descriptor<Major::kK>(shared_address(operand)));
  return __shfl_sync(~0u, word, 0);
}
__device__ __forceinline__ uint64_t with_upper_word(uint32_t lower) {
  return (descriptor_base<Major::kK>() & ~uint64_t{0xffffffff}) | lower;
}

constexpr uint32_t kStep32 = 32 >> 4;  // 32 elements of K, in units of 16 bytes

// acc = 64 x kN products of a stage, or, keep, acc += them; waits for nothing. a, b: lower words.
template <int kPair, int kN>
__device__ __forceinline__ void issue_stage(float (&acc)[kN / 2], uint32_t a, uint32_t b, bool keep) {
  using Atom = typename ScaledWgmma<kPair, kN>::Type;
#pragma unroll
  for (uint32_t k = 0; k < kScaledBK / 32; ++k) {
    fma<Atom>(with_upper_word(a + k * kStep32), with_upper_word(b + k * kStep32), acc,
              keep || k > 0 ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<kN / 2>{});
  }
}

// The rows of this warpgroup, of A of a stage.
__device__ __forceinline__ const unsigned char* own_rows(const unsigned char* a) {
  return a + consumer_thread() / kWarpgroup * (64 * kSwizzleBytes);
}

}  // namespace detail

template <int kCount>
__device__ __forceinline__ void pin(float (&acc)[kCount]) {
#pragma unroll
  for (float& x : acc) cute::warpgroup_fence_operand(x);
}

// One scale to shared memory, asynchronously; 0 beyond the extent.
__device__ __forceinline__ void copy_scale(const float* to, const Scales& s, int outer, int extent,
                                           int64_t k_offset) {
  const bool exists = outer < extent;
  const float* from = s.data + k_offset + (exists ? outer >> s.outer_shift : 0) * s.outer_stride;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}

// Asks for the scales of a tile's rows and columns, unless blocks have them. All 128 threads of a warpgroup.
template <class Tile>
__device__ __forceinline__ void request_scales(const GemmParams& p, SharedStorage<Tile>& s,
                                               const WorkItem& item, int row, int consumer, int barrier) {
  if (p.scaled.blocks) return;
  named_sync(barrier, kWarpgroup);  // all have read those of the tile before
  const int thread = thread_number() % kWarpgroup;
  const int m = static_cast<int>(p.problem.m);
  const int n = static_cast<int>(p.problem.n);
#pragma unroll
  for (int i = thread; i < Tile::kRows; i += kWarpgroup)
    copy_scale(&s.scales.rows[consumer][i], p.scaled.scale_a, item.m + row + i, m, 0);
#pragma unroll
  for (int i = thread; i < Tile::kBN; i += kWarpgroup)
    copy_scale(&s.scales.columns[consumer][i], p.scaled.scale_b, item.n + i, n, 0);
}

// Multiplies by what was asked for. First by the row's, then by the column's: their product may not be
// finite where the result is.
template <class Tile>
__device__ __forceinline__ void apply_scales(SharedStorage<Tile>& s, int consumer, int barrier,
                                             Accumulators<Tile>& acc) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  named_sync(barrier, kWarpgroup);
  const uint32_t thread = detail::consumer_thread() % kWarpgroup;
  const float* rows = &s.scales.rows[consumer][thread / 32 * 16 + thread % 32 / 4];
  const float* columns = &s.scales.columns[consumer][thread % 4 * 2];
  const float upper = rows[0];
  const float lower = rows[8];
#pragma unroll
  for (int j = 0; j < Tile::kAccumulators / 4; ++j) {
    const float2 c = *reinterpret_cast<const float2*>(columns + 8 * j);
    float* v = &acc[0][4 * j];
    v[0] = v[0] * upper * c.x;
    v[1] = v[1] * upper * c.y;
    v[2] = v[2] * lower * c.x;
    v[3] = v[3] * lower * c.y;
  }
}

// Sums of all stages in the tensor cores.
template <class Tile, int kPair>
__device__ __forceinline__ void fast_loop(Accumulators<Tile>& acc, SharedStorage<Tile>& s,
                                          RingPosition<Tile::kStages>& stage, int iters) {
  pin<Tile>(acc);
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    s.full_barrier(stage.index).wait(stage.phase);
    const uint32_t a = detail::lower_word(detail::own_rows(s.stages[stage.index].a));
    const uint32_t b = detail::lower_word(s.stages[stage.index].b);
    cute::warpgroup_arrive();
    detail::issue_stage<kPair, Tile::kBN>(acc[0], a, b, i > 0);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    release_stage(s, stage.index);
    stage.advance();
  }
  pin<Tile>(acc);
}

// Adds the products of 64 x 128 to sums; with block scales of a stage, times those. a: of this thread's upper
// row. b: of these columns, or, a word, of all of them.
__device__ __forceinline__ void promote(const float (&part)[64], float* sums) {
#pragma unroll
  for (int j = 0; j < 64; ++j) sums[j] += part[j];
}
__device__ __forceinline__ void promote_blocks(const float (&part)[64], float* sums, float upper,
                                               float lower) {
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    sums[j] = fmaf(part[j], upper, sums[j]);
    sums[j + 1] = fmaf(part[j + 1], upper, sums[j + 1]);
    sums[j + 2] = fmaf(part[j + 2], lower, sums[j + 2]);
    sums[j + 3] = fmaf(part[j + 3], lower, sums[j + 3]);
  }
}
__device__ __forceinline__ void promote_columns(const float (&part)[64], float* sums, float upper,
                                                float lower, const float* columns) {
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    const float2 c = *reinterpret_cast<const float2*>(columns + 2 * j);
    sums[j] = fmaf(part[j] * upper, c.x, sums[j]);
    sums[j + 1] = fmaf(part[j + 1] * upper, c.y, sums[j + 1]);
    sums[j + 2] = fmaf(part[j + 2] * lower, c.x, sums[j + 2]);
    sums[j + 3] = fmaf(part[j + 3] * lower, c.y, sums[j + 3]);
  }
}

// Sums of each stage in the tensor cores, of stages in registers.
template <class Tile, int kPair, bool kBlocks>
__device__ __forceinline__ void promoted_loop(const GemmParams& p, Accumulators<Tile>& acc,
                                              SharedStorage<Tile>& s, RingPosition<Tile::kStages>& stage,
                                              int iters) {
  constexpr int kProducts = Tile::kBN / kProductColumns;  // side by side
  constexpr int kStepColumns = kProductColumns / 64 * kStep64;
  constexpr int kValues = kProductColumns / 2;
#pragma unroll
  for (float& x : acc[0]) x = 0.0f;
  float part[kValues];
#pragma unroll 1
  for (; iters > 0; --iters) {
    s.full_barrier(stage.index).wait(stage.phase);
    const uint32_t b = detail::lower_word(s.stages[stage.index].b);
    const uint32_t a = detail::lower_word(detail::own_rows(s.stages[stage.index].a));
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const bool last = product + 1 == kProducts;
      float* sums = &acc[0][product * kValues];
      pin(part);
      cute::warpgroup_arrive();
      detail::issue_stage<kPair, kProductColumns>(part, a, b + product * kStepColumns, false);
      cute::warpgroup_commit_batch();
      const auto finish = [&] {
        cute::warpgroup_wait<0>();
        pin(part);
      };
      if constexpr (!kBlocks) {
        finish();
        if (last) release_stage(s, stage.index);
        promote(part, sums);
        continue;
      }
      const auto& scales = s.scales.stages[stage.index];
      const uint32_t thread = detail::consumer_thread();
      const float* rows = scales.a + thread / 32 * 16 + thread % 32 / 4;
      const float upper = rows[0];
      const float lower = rows[8];
      if (p.scaled.scale_b.outer_shift == 0) {
        finish();
        promote_columns(part, sums, upper, lower, scales.b + product * kProductColumns + thread % 4 * 2);
        __syncwarp();
        if (last) release_stage(s, stage.index);
      } else {
        const float c = scales.b[product];
        finish();
        if (last) release_stage(s, stage.index);
        promote_blocks(part, sums, upper * c, lower * c);
      }
    }
    stage.advance();
  }
}

// acc = the scaled products of `iters` stages from `stage` on.
template <class Tile>
__device__ __forceinline__ void scaled_mainloop(const GemmParams& p, Accumulators<Tile>& acc,
                                                SharedStorage<Tile>& s, RingPosition<Tile::kStages>& stage,
                                                int iters, int consumer, int barrier) {
  const auto run = [&]<int kPair>(std::integral_constant<int, kPair>) {
    if (p.scaled.fast) {
      fast_loop<Tile, kPair>(acc, s, stage, iters);
    } else if (p.scaled.blocks) {
      promoted_loop<Tile, kPair, true>(p, acc, s, stage, iters);
    } else {
      promoted_loop<Tile, kPair, false>(p, acc, s, stage, iters);
    }
  };
  switch (detail::pair_number(p.scaled.a, p.scaled.b)) {
    case 0:
      run(std::integral_constant<int, 0>{});
      break;
    case 1:
      run(std::integral_constant<int, 1>{});
      break;
    case 2:
      run(std::integral_constant<int, 2>{});
      break;
    default:
      run(std::integral_constant<int, 3>{});
      break;
  }
  if (!p.scaled.blocks) apply_scales<Tile>(s, consumer, barrier, acc);
}

// A whole tile with a bias, or one whose rows are no whole lines.
template <class Tile>
__device__ __forceinline__ void store_biased(const GemmParams& p, const WorkItem& item, int row,
                                             Accumulators<Tile>& acc, const float* bias,
                                             const StagingBuffer& staging) {
  if (p.fast) return store_activated<Tile, Activation::kNone>(p, item, row, acc, bias, staging);
  const auto sums = [&](int unit, bool, auto& v) { take_unit<Tile, false>(acc, unit, 1.0f, v); };
  store_units<Tile, false, 16>(p, item, row, 0, units_of<Tile, 16>(p), bias, staging, sums);
}

// The scales of blocks into the stages, beside what TMA brings. All threads of a warp of its own; each
// arrives at the barrier of every stage, of partial tiles and addends, too.
template <class Tile>
__device__ __forceinline__ void run_scale_loader(const GemmParams& p, SharedStorage<Tile>& s) {
  ItemReader<Tile> items{s, {}};
  RingPosition<Tile::kStages> stage;
  const Scales& scale_a = p.scaled.scale_a;
  const Scales& scale_b = p.scaled.scale_b;
  const int lane = thread_number() % 32;
  const int m = static_cast<int>(p.problem.m);
  const int n = static_cast<int>(p.problem.n);
  const int step_b = 1 << scale_b.outer_shift;
  wait_for_earlier_kernels();
  while (true) {
    const WorkItem& item = items.next();
    const int iters = item.iters;
    const int row = item.m;
    const int column = item.n;
    int64_t k = item.k / kScaledBK;
    const int more = fixup_stages<Tile>(item.partials()) +
                     addend_stages<Tile>(item.addends, p.out_kind == ScalarKind::kFp32);
    __syncwarp();
    items.release(lane == 0);
    if (iters == 0) break;
#pragma unroll 1
    for (int i = 0; i < iters + more; ++i, ++k) {
      s.empty_barrier(stage.index).wait(stage.phase ^ 1);
      auto& to = s.scales.stages[stage.index];
      if (i < iters) {
        const int64_t offset_a = k * scale_a.k_stride;
        const int64_t offset_b = k * scale_b.k_stride;
#pragma unroll
        for (int j = 0; j < Tile::kBM; j += 32)
          copy_scale(&to.a[j + lane], scale_a, row + j + lane, m, offset_a);
#pragma unroll 1
        for (int j = lane; j * step_b < Tile::kBN; j += 32)
          copy_scale(&to.b[j], scale_b, column + j * step_b, n, offset_b);
      }
      asm volatile(
          "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&s.full[stage.index]))
          : "memory");
      stage.advance();
    }
  }
}

}  // namespace tpk::sm90a

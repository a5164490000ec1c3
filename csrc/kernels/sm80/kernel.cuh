// The portable Stream-K GEMM: D = A * B on tensor cores of sm_80 and later (mma.sync, cp.async), or in plain
// fp32; fp32 sums, fp64 ones of fp64 operands.
//
// Contract. The kernel follows tpk::Schedule: a CTA is the worker of its number and walks that worker's
// segments in time order. A segment that does not end its tile leaves its partial sums in a slot; the segment
// with the tile's last K adds the partials in K order and runs the epilogue. Waits are for lower workers
// only, and bounded. The device starts the CTAs of a grid in the order of their numbers, which CUB's scans
// count on as well, so whom a CTA waits for runs or has ended, however few fit at a time. The result depends
// on the schedule, not on timing.
#pragma once

#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/fixup.cuh"
#include "kernels/sm80/launch.hpp"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/sm80/scheduler.cuh"

namespace tpk::sm80 {

// CTAs per multiprocessor that the registers must allow. The strided loader needs more of them for its
// addresses, and an outer-major operand in fp64 a few more.
template <class Tile, OperandLayout kLayoutA, OperandLayout kLayoutB>
constexpr int kMinCtas =
    kLayoutA == OperandLayout::kStrided && Tile::kMinCtas > 1 ? Tile::kMinCtas * 3 / 4
    : Tile::kElement == Element::kFp64 && Tile::kMinCtas > 2 &&
            (kLayoutA == OperandLayout::kOuterMajor || kLayoutB == OperandLayout::kOuterMajor)
        ? Tile::kMinCtas - 1
        : Tile::kMinCtas;

// Whether segments are loaded while the one before is stored. It takes registers, which tiles of half
// precision and of plain fp32 have not. Outputs of the former are rounded, and take the way by shared memory,
// as a rule.
template <class Tile>
constexpr bool kOverlaps = Tile::kElement == Element::kFp64 || Tile::kElement == Element::kTf32;

template <class Tile, OperandLayout kLayoutA, OperandLayout kLayoutB>
__global__ void __launch_bounds__(Tile::kThreads, kMinCtas<Tile, kLayoutA, kLayoutB>)
    streamk_gemm_kernel(const __grid_constant__ GemmParams p) {
  using Sum = typename Tile::Sum;
  unsigned char* const shared = dynamic_shared();
  __shared__ WorkerState state;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_m = warp % Tile::kWarpsM;
  const int warp_n = warp / Tile::kWarpsM;
  const uint32_t stages = shared_address(shared);
  const FragmentReader<Tile, FragmentOrder::kA, kLayoutA> reader_a(lane, warp_m * Tile::kWarpM);
  const FragmentReader<Tile, FragmentOrder::kB, kLayoutB> reader_b(lane, warp_n * Tile::kWarpN);

  // What depends on nothing but parameters may run while earlier kernels still do.
  if (threadIdx.x == 0) ::new (state.walker) Walker(static_cast<int32_t>(blockIdx.x));
  fetch_segment<Tile>(p, &state, 0);
  wait_for_earlier_kernels();
  allow_later_kernels();  // not before: launches would pile up, their CTAs spread unevenly
  __syncthreads();
  if (state.item[0].stages == 0) return;
  Loader<kLayoutA, Tile::kBM, Tile::kStageK, Tile::kElementBytes, Tile::kThreads> loader_a;
  Loader<kLayoutB, Tile::kBN, Tile::kStageK, Tile::kElementBytes, Tile::kThreads> loader_b;
  start_segment<Tile>(p, state.item[0], loader_a, loader_b, stages);

  int now = 0;
  bool has_next;
  do {
    const WorkItem& item = state.item[now];
    now = now < 2 ? now + 1 : 0;
    const WorkItem& next = state.item[now];
    fetch_segment<Tile>(p, &state, now);  // while the first stage is under way
    Accumulators<Tile> acc;
    clear<Tile>(acc);
    mainloop<Tile>(acc, p, loader_a, loader_b, reader_a, reader_b, stages, item.stages, item.last_stage);
    __syncthreads();  // all warps have read their last stage
    has_next = next.stages > 0;
    // Where nothing else needs the stages' memory, the next segment's loads are under way during what
    // follows.
    const bool needs_memory = !kOverlaps<Tile> || (item.slot < 0 && !p.plain);
    if (has_next && !needs_memory) start_segment<Tile>(p, next, loader_a, loader_b, stages);

    if (item.slot >= 0) {
      publish_partial<Tile>(p, item.slot, acc);
    } else {
      if (item.first_slot >= 0) add_partials<Tile>(p, item.first_slot, item.end_slot, acc);
      if (p.plain) {
        store_plain<Tile>(p, item, acc);
      } else {
        store_staged<Tile>(p, item, acc, reinterpret_cast<Sum*>(shared));
      }
    }
    if (has_next && needs_memory) {
      __syncthreads();  // all warps have read what was staged
      start_segment<Tile>(p, next, loader_a, loader_b, stages);
    }
  } while (has_next);
}

template <class Tile, OperandLayout kLayoutA, OperandLayout kLayoutB>
KernelInfo describe() {
  return {reinterpret_cast<const void*>(&streamk_gemm_kernel<Tile, kLayoutA, kLayoutB>), Tile::kThreads,
          Tile::kSharedBytes};
}

template <OperandLayout kLayoutA, OperandLayout kLayoutB, class... Tiles>
KernelInfo describe_one_of(TileSet<Tiles...>, int tile) {
  const KernelInfo all[] = {describe<Tiles, kLayoutA, kLayoutB>()...};
  return all[tile];
}

template <Element kElement, OperandLayout kLayoutA, OperandLayout kLayoutB>
KernelInfo kernel_info(int tile) {
  return describe_one_of<kLayoutA, kLayoutB>(TilesOf<kElement>{}, tile);
}

}  // namespace tpk::sm80

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
// addresses.
template <class Tile, OperandLayout kLayout>
constexpr int kMinCtas =
    kLayout == OperandLayout::kStrided && Tile::kMinCtas > 1 ? Tile::kMinCtas * 3 / 4 : Tile::kMinCtas;

template <class Tile, OperandLayout kLayoutA, OperandLayout kLayoutB>
__global__ void __launch_bounds__(Tile::kThreads, kMinCtas<Tile, kLayoutA>)
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
  const WorkItem& item = state.item;

  if (threadIdx.x == 0) ::new (state.walker) Walker(static_cast<int32_t>(blockIdx.x));
  fetch_segment<Tile>(p, &state);
  allow_later_kernels();
  wait_for_earlier_kernels();
  __syncthreads();
  for (; item.stages > 0; next_segment<Tile>(p, &state)) {
    Loader<kLayoutA, Tile::kBM, Tile::kStageK, Tile::kElementBytes, Tile::kThreads> loader_a;
    Loader<kLayoutB, Tile::kBN, Tile::kStageK, Tile::kElementBytes, Tile::kThreads> loader_b;
    loader_a.start(p.a, item.a_offset, static_cast<int>(min64(Tile::kBM, p.problem.m - item.m)));
    loader_b.start(p.b, item.b_offset, static_cast<int>(min64(Tile::kBN, p.problem.n - item.n)));

    Accumulators<Tile> acc;
    clear<Tile>(acc);
    mainloop<Tile>(acc, loader_a, loader_b, reader_a, reader_b, p.a, p.b, stages, item.stages, item.k_left);

    if (item.slot >= 0) {
      publish_partial<Tile>(p, item.slot, acc);
      continue;
    }
    if (item.first_slot >= 0) add_partials<Tile>(p, item.first_slot, item.end_slot, acc);
    Sum* const staged = reinterpret_cast<Sum*>(shared);
#pragma unroll 1
    for (int part = 0; part < Tile::kParts; ++part) {
      __syncthreads();  // all warps have read their last stage, or the part before
      if (part == 0) {
        stage_part<Tile>(acc, staged, 0);
      } else {
        stage_part<Tile>(acc, staged, Tile::kParts - 1);
      }
      __syncthreads();
      store_part<Tile>(p, item, staged, part);
    }
  }
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

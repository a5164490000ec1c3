// Quantisation to FP8 in one pass over memory: kernels, for any source. Included by quantize_SOURCE.cu.
//
// A CTA reads a square of 128 x 128 elements into registers, and from there finds the largest values of its
// rows' and columns' blocks, and of all, makes scales, and writes the square and the transposed one. So what
// is quantised along rows and along columns, by scales of its own each, is read once. All loads of a thread
// are under way together, and two to four CTAs of a multiprocessor overlap, which is as fast as memory.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm80/quantize_tile.cuh"

namespace tpk::sm80 {

template <class S>
constexpr int kCtas = S::kCount == 4   ? 2
                      : S::kCount == 8 ? 3
                                       : 4;        // of a multiprocessor
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890  // conversions to FP8 are functions, which take registers
template <class S>
constexpr int kStripCtas = 2;
#else
template <class S>
constexpr int kStripCtas = kCtas<S>;
#endif

// Blocks, squares, or all by p.amax: then the last tiles come first, which find_largest has left in L2.
template <class S, Fp8Format kTo, bool kPlain, bool kTurned>
__global__ void __launch_bounds__(kQuantizeThreads, kCtas<S>)
    quantize_tiles(const __grid_constant__ QuantizeParams p) {
  __shared__ Peaks peaks;
  __shared__ Factors factors;
  const uint32_t tile = p.sharing == ScaleSharing::kTensor ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int row_tile = static_cast<int>(tile / static_cast<uint32_t>(p.column_tiles));
  const int column_tile = static_cast<int>(tile % static_cast<uint32_t>(p.column_tiles));
  Part<S> x;
  load<S>(p, row_tile, column_tile, x);
  if (p.sharing == ScaleSharing::kBlocks) {
    if constexpr (kPlain) find_rows<S>(x, peaks);
    if constexpr (kTurned) find_columns<S>(x, peaks);
  } else if (p.sharing == ScaleSharing::kSquares) {
    if constexpr (!S::kScaled) {
      const uint32_t peak = __reduce_max_sync(~0u, S::all_bits(peak_of_part<S>(x)));
      if (threadIdx.x % 32 == 0) peaks.of_all[threadIdx.x / 32] = peak;
    }
  }
  __syncthreads();
  make_scales<kTo, kPlain, kTurned>(p, row_tile, column_tile, peaks, factors);
  __syncthreads();
  if constexpr (kPlain) write_plain<S, kTo>(p, row_tile, column_tile, x, factors);
  if constexpr (kTurned) {
    __shared__ Turned turned;
    turn_scaled<S, kTo>(x, factors, turned);
    __syncthreads();
    write_turned<S>(p, row_tile, column_tile, turned);
  }
}

// turned of kRow: every column's largest value is that of all its tiles. Tasks are dealt out in an order in
// which a strip of columns is read again soon after it was read, while it is in L2: groups of strips, the
// next group's largest values before this one is written. A CTA asks for its next task while it has one, so
// that the answer does not take time. Of all tasks that are not done the first is somebody's present one, and
// waits for none: earlier ones are done.
template <class S, Fp8Format kTo>
__global__ void __launch_bounds__(kQuantizeThreads, kStripCtas<S>)
    quantize_strips(const __grid_constant__ QuantizeParams p) {
  __shared__ Peaks peaks;
  __shared__ Factors factors;
  __shared__ Turned turned;
  __shared__ uint32_t ticket;
  const int groups = (p.column_tiles + p.group - 1) / p.group;
  const auto tasks = static_cast<uint32_t>(p.group) * static_cast<uint32_t>(p.row_tiles);  // of a round
  // Thread 0's. The strip that this CTA found largest values of, and has not yet said so: it takes a fence,
  // which is no loss behind the next loads.
  int pending = -1;
  const auto tell = [&] {
    if (pending < 0) return;
    comm::add_release<comm::Scope::kGpu>(p.tickets + 1 + pending, 1u);
    pending = -1;
  };
  uint32_t next = threadIdx.x == 0 ? comm::take_ticket(p.tickets) : 0;
#pragma unroll 1
  for (;;) {
    __syncthreads();  // nobody needs shared memory any more, and all have sent what they found
    if (threadIdx.x == 0) {
      ticket = next;
      next = comm::take_ticket(p.tickets);
    }
    __syncthreads();
    // Find 0, find 1, write 0, find 2, write 1, ..., write the last.
    const auto round = static_cast<int>(ticket / tasks);
    const auto task = static_cast<int>(ticket % tasks);
    if (round >= 2 * groups) break;
    const bool finds = round == 0 || (round % 2 == 1 && round < 2 * groups - 1);
    const int group = (round + 1) / 2 - (finds ? 0 : 1);
    const int row_tile = task / p.group;
    const int column_tile = group * p.group + task % p.group;
    if (column_tile >= p.column_tiles) continue;
    const int64_t column = int64_t{column_tile} * kQuantizeBlock + threadIdx.x;
    const bool has_column = threadIdx.x < kQuantizeBlock && column < p.columns;
    Part<S> x;
    load<S>(p, row_tile, column_tile, x);
    if (threadIdx.x == 0) tell();
    if (finds) {
      find_columns<S>(x, peaks);
      __syncthreads();
      if (has_column) {
        atomicMax(p.column_peaks + column, largest_of(&peaks.of_columns[0][threadIdx.x], kQuantizeBlock));
      }
      pending = column_tile;
      continue;
    }
    if (threadIdx.x == 0) {
      const uint32_t* const arrived = p.tickets + 1 + column_tile;
      const auto all = static_cast<uint32_t>(p.row_tiles);
      while (comm::load_acquire<comm::Scope::kGpu>(arrived) < all) __nanosleep(32);
    }
    __syncthreads();
    if (threadIdx.x < kQuantizeBlock) {
      const float scale = scale_of<kTo>(has_column ? __ldcg(p.column_peaks + column) : 0u, p.power_of_2);
      factors.of_columns[threadIdx.x] = reciprocal(scale);
      if (has_column && row_tile == 0) p.turned_scale[column] = scale;
    }
    __syncthreads();
    turn_scaled<S, kTo>(x, factors, turned);
    __syncthreads();
    write_turned<S>(p, row_tile, column_tile, turned);
  }
  if (threadIdx.x == 0) tell();
}

template <int kThreads>  // of a CTA
constexpr int kRowsThreads = kThreads < kQuantizeThreads ? kQuantizeThreads : kThreads;

// kHeld units of a row stay in a thread's registers, kThreads of which have a row; what lies behind is read
// again.
template <class S, Fp8Format kTo, int kThreads, int kHeld>
__global__ void __launch_bounds__(kRowsThreads<kThreads>, 1024 / kRowsThreads<kThreads>)
    quantize_rows(const __grid_constant__ QuantizeParams p) {
  constexpr int kStep = kThreads * S::kCount;
  const int t = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / kThreads) + threadIdx.x / kThreads;
  uint4 held[kHeld];
  uint32_t peak = 0;
  const bool has_row = row < p.rows;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = int64_t{t} * S::kCount + i * kStep;
    held[i] = make_uint4(0, 0, 0, 0);
    if (has_row && column < p.columns) held[i] = load_unit<S>(p, row, column);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) peak = S::larger(peak, peak_of<S>(held[i]));
  const int64_t first = int64_t{t} * S::kCount + kHeld * kStep;
  if (has_row) {
#pragma unroll 2
    for (int64_t column = first; column < p.columns; column += kStep) {
      peak = S::larger(peak, peak_of<S>(load_unit<S>(p, row, column)));
    }
  }
  uint32_t bits = __reduce_max_sync(~0u, S::all_bits(peak));
  if constexpr (kThreads > 32) {
    __shared__ uint32_t of_warps[kThreads / 32];
    if (t % 32 == 0) of_warps[t / 32] = bits;
    __syncthreads();
    bits = of_warps[0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) bits = max(bits, of_warps[w]);
  }
  if (!has_row) return;
  const float scale = scale_of<kTo>(bits, p.power_of_2);
  const float factor = reciprocal(scale);
  if (t == 0) p.plain_scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = int64_t{t} * S::kCount + i * kStep;
    if (column < p.columns) store_unit<S, kTo>(p, held[i], row, column, factor);
  }
#pragma unroll 2
  for (int64_t column = first; column < p.columns; column += kStep) {
    store_unit<S, kTo>(p, load_unit<S>(p, row, column), row, column, factor);
  }
}

template <class S>
__global__ void __launch_bounds__(kQuantizeThreads, kCtas<S>)
    find_largest(const __grid_constant__ QuantizeParams p) {
  __shared__ uint32_t of_warps[kWarps];
  uint32_t peak = 0;
  const int64_t tiles = int64_t{p.row_tiles} * p.column_tiles;
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Part<S> x;
    load<S>(p, static_cast<int>(tile / p.column_tiles), static_cast<int>(tile % p.column_tiles), x);
    peak = S::larger(peak, peak_of_part<S>(x));
  }
  const uint32_t bits = __reduce_max_sync(~0u, S::all_bits(peak));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(const_cast<uint32_t*>(p.amax), min(largest_of(of_warps, 1), kInfinityBits));
}

template <class S, Fp8Format kTo>
QuantizeLaunch strips_launch(const QuantizeParams& p) {
  const int64_t groups = (p.column_tiles + p.group - 1) / p.group;
  return {reinterpret_cast<const void*>(&quantize_strips<S, kTo>), 2 * groups * p.group * p.row_tiles,
          kQuantizeThreads, kStripCtas<S>};
}

template <class S, Fp8Format kTo>
QuantizeLaunch quantize_launch(QuantizeKernel kernel, const QuantizeParams& p) {
  const auto function = [](auto* f) { return reinterpret_cast<const void*>(f); };
  const int64_t tiles = int64_t{p.row_tiles} * p.column_tiles;
  if (kernel == QuantizeKernel::kLargest) {
    return {function(&find_largest<S>), tiles, kQuantizeThreads, kCtas<S>};
  }
  if (kernel == QuantizeKernel::kStrips) return strips_launch<S, kTo>(p);
  if (kernel == QuantizeKernel::kTiles) {
    if (p.turned == nullptr) return {function(&quantize_tiles<S, kTo, true, false>), tiles};
    if (p.plain == nullptr) return {function(&quantize_tiles<S, kTo, false, true>), tiles};
    return {function(&quantize_tiles<S, kTo, true, true>), tiles};
  }
  // A warp, 8 warps or 16 a row: as few as hold it, since waiting for each other costs time.
  constexpr int kRowsOfWarps = kQuantizeThreads / 32;
  if (p.columns <= 32 * 8 * S::kCount) {
    return {function(&quantize_rows<S, kTo, 32, 8>), (p.rows + kRowsOfWarps - 1) / kRowsOfWarps};
  }
  if (p.columns <= 256 * 4 * S::kCount) return {function(&quantize_rows<S, kTo, 256, 4>), p.rows, 256};
  if (p.columns <= 256 * 8 * S::kCount) return {function(&quantize_rows<S, kTo, 256, 8>), p.rows, 256};
  return {function(&quantize_rows<S, kTo, 512, 8>), p.rows, 512};
}

}  // namespace tpk::sm80

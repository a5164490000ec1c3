// Quantisation to FP8 in one pass over memory: kernels, for any source. Included by quantize_SOURCE.cu.
//
// A CTA reads a square of 128 x 128 elements into registers, and from there finds the largest values of its
// rows' and columns' blocks, and of all, makes scales, and writes the square and the transposed one. So what
// is quantised along rows and along columns, by scales of its own each, is read once. All loads of a thread
// are under way together, and two to four CTAs of a multiprocessor overlap, which is as fast as memory.
#pragma once

#include "comm/flags.cuh"
#include "kernels/sm80/quantize_source.cuh"

namespace tpk::sm80 {

constexpr int kWarps = kQuantizeThreads / 32;
constexpr int kQuads = kQuantizeBlock / 4;  // of rows: what becomes a word of a row of the transposed square

// A thread's part of the square: kParts times 4 rows one after the other, of kCount columns.
template <class S>
struct Part {
  static constexpr int kLanes = kQuantizeBlock / S::kCount;  // threads of a row
  static constexpr int kOwners = kQuantizeThreads / kLanes;  // quads that are read at once
  static constexpr int kParts = kQuads / kOwners;

  uint4 units[kParts][4];
  float scales[S::kScaled ? kParts : 1][4];  // of the source's rows
  bool rounds;                               // FP8 times these as bfloat16: not all of them exact

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static __device__ __forceinline__ int column() { return lane() * S::kCount; }
  static __device__ __forceinline__ int quad(int part) {
    return part * kOwners + static_cast<int>(threadIdx.x) / kLanes;
  }
  __device__ __forceinline__ float scale(int part, int i) const {
    return S::kScaled ? scales[S::kScaled ? part : 0][i] : 1.0f;
  }
};

template <class S>
__device__ __forceinline__ void load(const QuantizeParams& p, int row_tile, int column_tile, Part<S>& x) {
  using P = Part<S>;
  const int64_t row = int64_t{row_tile} * kQuantizeBlock;
  const int64_t column = int64_t{column_tile} * kQuantizeBlock + P::column();
  // Without conditions between them, loads do not wait for each other.
  if (p.in_units && row + kQuantizeBlock <= p.rows && column - P::column() + kQuantizeBlock <= p.columns) {
    const auto* const from =
        static_cast<const typename S::Element*>(p.x) + (row + 4 * P::quad(0)) * p.stride + column;
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.units[part][i] = *reinterpret_cast<const uint4*>(from + (4 * part * P::kOwners + i) * p.stride);
      }
    }
  } else {
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = row + 4 * P::quad(part) + i;
        x.units[part][i] = make_uint4(0, 0, 0, 0);
        if (at < p.rows && column < p.columns) x.units[part][i] = load_unit<S>(p, at, column);
      }
    }
  }
  if constexpr (S::kScaled) {
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = row + 4 * P::quad(part) + i;
        x.scales[part][i] = 1.0f;
        if (p.x_scale != nullptr && at < p.rows) {
          x.scales[part][i] = p.x_scale[at * p.x_scale_row + column_tile * p.x_scale_block];
        }
      }
    }
    // A power of two that leaves even the smallest FP8 value a normal number rounds nothing.
    x.rounds = false;
    if (p.power_of_2) {
#pragma unroll
      for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = x.scales[part][i];
          x.rounds |= !(scale >= 0x1p-100f && (__float_as_uint(scale) & 0x007fffffu) == 0);
        }
      }
      x.rounds = __any_sync(~0u, x.rounds);
    }
  }
}

// Largest values, as bits of floats.
struct alignas(16) Peaks {
  uint32_t of_columns[kWarps][kQuantizeBlock];
  uint32_t of_rows[kQuantizeBlock];
  uint32_t of_all[kWarps];
};

struct alignas(16) Factors {  // reciprocals of scales
  float of_rows[kQuantizeBlock];
  float of_columns[kQuantizeBlock];
};

// The transposed square, a word for 4 rows. Words of a column are permuted so that no bank is asked twice,
// neither by a warp that writes (kCount columns apart, 32 / kLanes quads) nor by one that reads (a column).
struct alignas(16) Turned {
  uint32_t words[kQuantizeBlock][kQuads];
};

template <class S>
__device__ __forceinline__ int turned_place(int column, int quad) {
  return quad ^ (column / S::kCount * (S::kCount / 4));
}

// Of a unit.
template <class S>
__device__ __forceinline__ uint32_t peak_of(const uint4& unit) {
  static_assert(!S::kScaled, "Rows of FP8 sources are not quantised.");
  const auto word = [&](int i) { return S::peak(unit, i, 1.0f, Exact()); };
  return S::larger(S::larger(word(0), word(1)), S::larger(word(2), word(3)));
}

// Over the first `lanes` lanes of aligned groups of a warp.
template <class S, int kLanes>
__device__ __forceinline__ uint32_t peak_of_lanes(uint32_t peak) {
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(~0u, S::all_bits(peak));
  } else {
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) peak = S::larger(peak, __shfl_xor_sync(~0u, peak, d));
    return S::all_bits(peak);
  }
}

template <class S>
__device__ __forceinline__ void find_rows(const Part<S>& x, Peaks& peaks) {
  using P = Part<S>;
#pragma unroll
  for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t peak = peak_of_lanes<S, P::kLanes>(peak_of<S>(x.units[part][i]));
      if (P::lane() == 0) peaks.of_rows[4 * P::quad(part) + i] = peak;
    }
  }
}

// Calls f with the rounding of x.
template <class S, class F>
__device__ __forceinline__ void by_rounding(const Part<S>& x, const F& f) {
  if constexpr (S::kScaled) {
    if (x.rounds) return f(ToBf16());
  }
  f(Exact());
}

template <class S>
__device__ __forceinline__ void find_columns(const Part<S>& x, Peaks& peaks) {
  using P = Part<S>;
  uint32_t peak[S::kPeaks] = {};
  by_rounding(x, [&](auto rounding) {
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < S::kPeaks; ++j) {
          peak[j] = S::larger(peak[j], S::peak(x.units[part][i], j, x.scale(part, i), rounding));
        }
      }
    }
  });
#pragma unroll
  for (int d = P::kLanes; d < 32; d *= 2) {
#pragma unroll
    for (int j = 0; j < S::kPeaks; ++j) peak[j] = S::larger(peak[j], __shfl_xor_sync(~0u, peak[j], d));
  }
  if (threadIdx.x % 32 < P::kLanes) {
    auto* const to = reinterpret_cast<uint4*>(&peaks.of_columns[threadIdx.x / 32][P::column()]);
#pragma unroll
    for (int j = 0; j < S::kCount; j += 4) {
      to[j / 4] =
          make_uint4(S::bits(peak, j), S::bits(peak, j + 1), S::bits(peak, j + 2), S::bits(peak, j + 3));
    }
  }
}

// Of all that the thread has, in one word.
template <class S>
__device__ __forceinline__ uint32_t peak_of_part(const Part<S>& x) {
  uint32_t peak = 0;
#pragma unroll
  for (int part = 0; part < Part<S>::kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = S::larger(peak, peak_of<S>(x.units[part][i]));
  }
  return peak;
}

__device__ __forceinline__ uint32_t largest_of(const uint32_t* of_warps, int step) {
  uint32_t peak = of_warps[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) peak = max(peak, of_warps[w * step]);
  return peak;
}

// Thread t makes the scale of row t, the next 128 those of columns. Scales are written by one of the CTAs
// that share them.
template <Fp8Format kTo, bool kPlain, bool kTurned>
__device__ __forceinline__ void make_scales(const QuantizeParams& p, int row_tile, int column_tile,
                                            const Peaks& peaks, Factors& factors) {
  const int t = static_cast<int>(threadIdx.x) % kQuantizeBlock;
  const bool of_columns = threadIdx.x >= kQuantizeBlock;
  if (of_columns ? !kTurned : !kPlain) return;
  uint32_t peak;
  if (p.sharing == ScaleSharing::kTensor) {
    peak = *p.amax;
  } else if (p.sharing == ScaleSharing::kSquares) {
    peak = largest_of(peaks.of_all, 1);
  } else if (of_columns) {
    peak = largest_of(&peaks.of_columns[0][t], kQuantizeBlock);
  } else {
    peak = peaks.of_rows[t];
  }
  const float scale = scale_of<kTo>(peak, p.power_of_2);
  (of_columns ? factors.of_columns : factors.of_rows)[t] = reciprocal(scale);
  float* const to = of_columns ? p.turned_scale : p.plain_scale;
  const int tile = of_columns ? column_tile : row_tile;   // of the output's rows
  const int block = of_columns ? row_tile : column_tile;  // within them
  const int64_t blocks = of_columns ? p.row_tiles : p.column_tiles;
  if (p.sharing == ScaleSharing::kTensor) {
    if (t == 0 && tile == 0 && block == 0) *to = scale;
  } else if (p.sharing == ScaleSharing::kSquares) {
    if (t == 0) to[tile * blocks + block] = scale;
  } else {
    const int64_t row = int64_t{tile} * kQuantizeBlock + t;
    if (row < (of_columns ? p.columns : p.rows)) to[row * blocks + block] = scale;
  }
}

template <class S, Fp8Format kTo>
__device__ __forceinline__ void write_plain(const QuantizeParams& p, int row_tile, int column_tile,
                                            const Part<S>& x, const Factors& factors) {
  using P = Part<S>;
  const int64_t column = int64_t{column_tile} * kQuantizeBlock + P::column();
  if (column >= p.columns) return;
#pragma unroll
  for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * P::quad(part) + i;
      const int64_t row = int64_t{row_tile} * kQuantizeBlock + r;
      if (row < p.rows) store_unit<S, kTo>(p, x.units[part][i], row, column, factors.of_rows[r]);
    }
  }
}

// word(part, j): column j of the thread's, the 4 rows of that part.
template <class S, class Word>
__device__ __forceinline__ void turn(Turned& turned, const Word& word) {
  using P = Part<S>;
#pragma unroll
  for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
    for (int j = 0; j < S::kCount; ++j) {
      const int column = P::column() + j;
      turned.words[column][turned_place<S>(column, P::quad(part))] = word(part, j);
    }
  }
}

template <class S, Fp8Format kTo>
__device__ __forceinline__ void turn_scaled(const Part<S>& x, const Factors& factors, Turned& turned) {
  float factor[S::kCount];
#pragma unroll
  for (int j = 0; j < S::kCount; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&factors.of_columns[Part<S>::column() + j]);
    factor[j] = four.x, factor[j + 1] = four.y, factor[j + 2] = four.z, factor[j + 3] = four.w;
  }
  by_rounding(x, [&](auto rounding) {
    turn<S>(turned, [&](int part, int j) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = __fmul_rn(S::value(x.units[part][i], j, x.scale(part, i), rounding), factor[j]);
      }
      return packed<kTo>(v[0], v[1], v[2], v[3]);
    });
  });
}

// A warp writes a column's 128 bytes.
template <class S>
__device__ __forceinline__ void write_turned(const QuantizeParams& p, int row_tile, int column_tile,
                                             const Turned& turned) {
  const int quad = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = int64_t{row_tile} * kQuantizeBlock + 4 * quad;
#pragma unroll
  for (int c = static_cast<int>(threadIdx.x) / 32; c < kQuantizeBlock; c += kWarps) {
    const int64_t column = int64_t{column_tile} * kQuantizeBlock + c;
    if (column >= p.columns || row >= p.rows) continue;
    const uint32_t word = turned.words[c][turned_place<S>(c, quad)];
    uint8_t* const to = p.turned + column * p.rows + row;
    if (p.turned_words) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + i < p.rows) to[i] = static_cast<uint8_t>(word >> (8 * i));
      }
    }
  }
}

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

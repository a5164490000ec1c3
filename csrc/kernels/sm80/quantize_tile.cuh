// A CTA's square of 128 x 128 elements in the kernels of quantize.cuh: reading it, its largest values, its
// scales, and writing it and its transposed in FP8.
#pragma once

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

}  // namespace tpk::sm80

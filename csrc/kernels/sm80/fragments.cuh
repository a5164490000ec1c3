// Fragments: what a lane holds of its warp's operands for one K step, and how it reads them from a stage.
#pragma once

#include "kernels/sm80/layout.hpp"
#include "kernels/sm80/ptx.cuh"

namespace tpk::sm80 {

// Registers of a fragment (16 elements of M or N by one K step). For the tensor cores one of each block, as
// layout.hpp orders them; a K step of fp64 is one block long, so there are two. For plain fp32 all four
// elements of K of each row that the lane sums, 2 of M, or 4 of N, of which the first 2 are of the first n8
// block.
template <Element kElement, FragmentOrder kOrder>
struct FragmentOf {
  using Register = std::conditional_t<kElement == Element::kFp64, double,
                                      std::conditional_t<kElement == Element::kFp32, float, uint32_t>>;
  static constexpr int kRegisters = kElement == Element::kFp64    ? 2
                                    : kElement != Element::kFp32  ? 4
                                    : kOrder == FragmentOrder::kA ? 8
                                                                  : 16;
};

// One operand's fragments of one K step, and where this lane finds them.
template <class Config, FragmentOrder kOrder, OperandLayout kLayout>
class FragmentReader {
 public:
  static constexpr bool kIsA = kOrder == FragmentOrder::kA;
  static constexpr int kFragments = kIsA ? Config::kFragmentsM : Config::kFragmentsN / 2;
  static constexpr Element kElement = Config::kElement;
  using Fragment = FragmentOf<kElement, kOrder>;
  using Fragments = typename Fragment::Register[kFragments][Fragment::kRegisters];
  using Tile = OperandTile<kLayout, kIsA ? Config::kBM : Config::kBN, Config::kStageK, Config::kElementBytes>;

  __device__ __forceinline__ FragmentReader(int lane, int first_outer) {
    if constexpr (kByLdmatrix) {
#pragma unroll
      for (int i = 0; i < kAddresses; ++i) address_[i] = Matrix::address(kOrder, lane, first_outer, i);
    } else if constexpr (kElement == Element::kFp32) {
      start_plain(lane, first_outer);
    } else {
      start_lanes(lane, first_outer);
    }
  }

  __device__ __forceinline__ void read(Fragments& f, uint32_t stage, int k_step) const {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) read(f, stage, k_step, i);
  }
  // The i-th alone.
  __device__ __forceinline__ void read(Fragments& f, uint32_t stage, int k_step, int i) const {
    if constexpr (kByLdmatrix) {
      load_matrix_x4<Matrix::kTransposed>(
          f[i], stage + address_[Matrix::address_index(i, k_step)] + Matrix::address_bias(i, k_step));
    } else if constexpr (kElement == Element::kFp32) {
      read_plain(f[i], stage, i, k_step);
    } else {
      read_lanes(f[i], stage, i, k_step);
    }
    if constexpr (kElement == Element::kTf32) {
#pragma unroll
      for (int r = 0; r < 4; ++r) f[i][r] = round_tf32(f[i][r]);
    }
  }

 private:
  static constexpr bool kIsOuterMajor = kLayout == OperandLayout::kOuterMajor;
  static constexpr int kRowBytes = Tile::kRowBytes;
  // ldmatrix moves blocks of 8 rows by 16 bytes as they are, and transposes elements of 2 bytes only.
  static constexpr bool kByLdmatrix =
      Config::kElementBytes == 2 || (kElement == Element::kTf32 && !kIsOuterMajor);
  using Matrix = std::conditional_t<kIsOuterMajor, OuterMajorAddresses<Tile, kFragments>,
                                    KMajorAddresses<Tile, Config::kKSteps>>;
  static constexpr int kAddresses = kByLdmatrix ? Matrix::kCount : kElement == Element::kTf32 ? 4 : 2;
  static constexpr int kChunk = kChunkBytes;
  static_assert(kByLdmatrix || (kIsA ? Config::kWarpM : Config::kWarpN) % (8 * Tile::kChunkElements) == 0,
                "A warp's part begins at a multiple of eight chunks.");

  // The tensor cores' registers by ordinary loads: lane 4 g + t has element g of M or N and t of K of a
  // block.
  __device__ __forceinline__ void start_lanes(int lane, int first_outer) {
    const int g = lane / 4;
    const int t = lane % 4;
    constexpr int kPer = Tile::kChunkElements;
    if constexpr (!kIsOuterMajor) {
      address_[0] =
          Tile::offset(first_outer + g, t / kPer) + static_cast<uint32_t>(t % kPer * Config::kElementBytes);
    } else {
#pragma unroll
      for (int i = 0; i < kAddresses; ++i) {
        const int outer = first_outer + 8 * i + g;
        address_[i] =
            Tile::offset(outer / kPer, t) + static_cast<uint32_t>(outer % kPer * Config::kElementBytes);
      }
    }
  }

  __device__ __forceinline__ void read_lanes(typename Fragment::Register (&f)[Fragment::kRegisters],
                                             uint32_t stage, int i, int k_step) const {
#pragma unroll
    for (int r = 0; r < Fragment::kRegisters; ++r) {
      const BlockCoord b = Fragment::kRegisters == 2 ? BlockCoord{r, 0} : fragment_block(kOrder, r);
      const int k = Config::kStep * k_step + 4 * b.k;
      uint32_t address;
      if constexpr (!kIsOuterMajor) {  // fp64
        address = (address_[0] ^ static_cast<uint32_t>(k * Config::kElementBytes)) +
                  static_cast<uint32_t>((16 * i + 8 * b.outer) * kRowBytes);
      } else {
        // Eight chunks further on the swizzle is the same; a fragment of fp64 is as wide, of tf32 half of it.
        constexpr int kPerAddresses = kAddresses / 2;
        address = address_[i % kPerAddresses * 2 + b.outer] +
                  static_cast<uint32_t>(i / kPerAddresses * 8 * kChunk + k * kRowBytes);
      }
      typename Fragment::Register v[1];
      load_shared(v, stage + address);
      f[r] = v[0];
    }
  }

  // Plain fp32: rows g and g + 8 of a fragment of A; 2 t, 2 t + 1, and the same 8 further on, of one of B.
  __device__ __forceinline__ void start_plain(int lane, int first_outer) {
    const int first = kIsA ? lane / 4 : 2 * (lane % 4);
    if constexpr (kIsOuterMajor) {
      address_[0] = static_cast<uint32_t>(first_outer * 4 + first * 4);
    } else {
      address_[0] = Tile::offset(first_outer + first, 0);
      if constexpr (!kIsA) address_[1] = Tile::offset(first_outer + first + 1, 0);
    }
  }

  __device__ __forceinline__ void read_plain(float (&f)[Fragment::kRegisters], uint32_t stage, int i,
                                             int k_step) const {
    constexpr int kNeighbours = kIsA ? 1 : 2;
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      if constexpr (!kIsOuterMajor) {
#pragma unroll
        for (int e = 0; e < kNeighbours; ++e) {
          float v[4];
          const uint32_t row = address_[e] ^ static_cast<uint32_t>(k_step * kChunk);
          load_shared(v, stage + row + static_cast<uint32_t>((16 * i + 8 * o) * kRowBytes));
#pragma unroll
          for (int k = 0; k < 4; ++k) f[(o * kNeighbours + e) * 4 + k] = v[k];
        }
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float v[kNeighbours];
          const int chunk = (4 * i + 2 * o) ^ Tile::swizzle(k);
          load_shared(
              v, stage + address_[0] + static_cast<uint32_t>(chunk * kChunk + (4 * k_step + k) * kRowBytes));
#pragma unroll
          for (int e = 0; e < kNeighbours; ++e) f[(o * kNeighbours + e) * 4 + k] = v[e];
        }
      }
    }
  }

  uint32_t address_[kAddresses];
};

// d += a * b for a block of 16 x 8 sums: a fragment of A and one n8 block of B.
template <Element kElement, int kA, int kB, class Register, class Sum>
__device__ __forceinline__ void multiply(Sum (&d)[4], const Register (&a)[kA], const Register (&b)[kB],
                                         int block) {
  if constexpr (kElement == Element::kFp32) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) d[r] = multiply_add(a[r / 2 * 4 + k], b[block * 8 + r % 2 * 4 + k], d[r]);
    }
  } else if constexpr (kElement == Element::kFp64) {
    mma<kElement>(d, a, b[block]);
  } else {
    mma<kElement>(d, a, b[2 * block], b[2 * block + 1]);
  }
}

}  // namespace tpk::sm80

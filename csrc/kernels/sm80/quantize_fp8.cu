// Transposed copies of what is FP8 already: with scales along the other dimension, or the same bytes.
#include "kernels/sm80/quantize.cuh"

namespace tpk::sm80 {
namespace {

__global__ void __launch_bounds__(kQuantizeThreads, 4) turn_bytes(const __grid_constant__ QuantizeParams p) {
  using Source = Fp8Source<Fp8Format::kE4m3>;
  __shared__ Turned turned;
  const int row_tile = static_cast<int>(blockIdx.x / static_cast<uint32_t>(p.column_tiles));
  const int column_tile = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.column_tiles));
  Part<Source> x;
  load<Source>(p, row_tile, column_tile, x);
  turn<Source>(turned, [&](int part, int j) {
    const auto word = [&](int i) { return word_of(x.units[part][i], j / 4); };
    const uint32_t pick = j % 4 | (4 + j % 4) << 4;  // byte j of either
    const uint32_t low = __byte_perm(word(0), word(1), pick);
    const uint32_t high = __byte_perm(word(2), word(3), pick);
    return __byte_perm(low, high, 0x5410);
  });
  __syncthreads();
  write_turned<Source>(p, row_tile, column_tile, turned);
}

template <Fp8Format kTo>
QuantizeLaunch scaled(QuantizeKernel kernel, const QuantizeParams& p) {
  using Source = Fp8Source<kTo>;
  const int64_t tiles = int64_t{p.row_tiles} * p.column_tiles;
  if (kernel == QuantizeKernel::kStrips) return strips_launch<Source, kTo>(p);
  return {reinterpret_cast<const void*>(&quantize_tiles<Source, kTo, false, true>), tiles};
}

}  // namespace

QuantizeLaunch quantize_fp8(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params) {
  if (params.x_scale == nullptr) {
    return {reinterpret_cast<const void*>(&turn_bytes), int64_t{params.row_tiles} * params.column_tiles};
  }
  return to == Fp8Format::kE4m3 ? scaled<Fp8Format::kE4m3>(kernel, params)
                                : scaled<Fp8Format::kE5m2>(kernel, params);
}

}  // namespace tpk::sm80

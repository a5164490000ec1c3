// Quantisation of bfloat16 to FP8.
#include "kernels/sm80/quantize.cuh"

namespace tpk::sm80 {

QuantizeLaunch quantize_bf16(QuantizeKernel kernel, Fp8Format to, const QuantizeParams& params) {
  using Source = PairSource<__nv_bfloat16>;
  return to == Fp8Format::kE4m3 ? quantize_launch<Source, Fp8Format::kE4m3>(kernel, params)
                                : quantize_launch<Source, Fp8Format::kE5m2>(kernel, params);
}

}  // namespace tpk::sm80

// torch.ops.tpkernels.quantize_fp8 and find_largest: checks, then the kernels. Stable ABI, no host
// synchronisation.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>

#include "kernels/sm80/device.hpp"
#include "kernels/sm80/quantize.hpp"
#include "ops/arguments.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::ops::View;
using tpk::sm80::check_cuda;
using tpk::sm80::Fp8Format;
using tpk::sm80::kQuantizeBlock;
using tpk::sm80::kQuantizeUnitBytes;
using tpk::sm80::QuantizeKernel;
using tpk::sm80::QuantizeLaunch;
using tpk::sm80::QuantizeParams;
using tpk::sm80::QuantizeSource;
using tpk::sm80::ScaleSharing;

// x that strips read twice, and what is made of it, has to stay in L2 in between: two groups of them.
constexpr int64_t kGroupBytes = int64_t{8} << 20;

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, op, ": ", __VA_ARGS__)

int64_t blocks_of(int64_t extent) { return (extent + kQuantizeBlock - 1) / kQuantizeBlock; }

QuantizeSource source_of(const char* op, const View& x) {
  switch (x.type) {
    case ScalarType::BFloat16:
      return QuantizeSource::kBf16;
    case ScalarType::Half:
      return QuantizeSource::kFp16;
    case ScalarType::Float:
      return QuantizeSource::kFp32;
    case ScalarType::Float8_e4m3fn:
      return QuantizeSource::kE4m3;
    default:
      REQUIRE(x.type == ScalarType::Float8_e5m2,
              "x must be bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, but it is ", x.type, ".");
      return QuantizeSource::kE5m2;
  }
}

Fp8Format format_of(const char* op, const View& v) {
  REQUIRE(v.type == ScalarType::Float8_e4m3fn || v.type == ScalarType::Float8_e5m2, v.name,
          " must be float8_e4m3fn or float8_e5m2, but it is ", v.type, ".");
  return v.type == ScalarType::Float8_e4m3fn ? Fp8Format::kE4m3 : Fp8Format::kE5m2;
}

ScaleSharing sharing_of(const char* op, const std::string& scaling) {
  if (scaling == "tensorwise") return ScaleSharing::kTensor;
  if (scaling == "rowwise") return ScaleSharing::kRow;
  if (scaling == "blockwise_1x128") return ScaleSharing::kBlocks;
  REQUIRE(scaling == "blockwise_128x128",
          "scaling must be tensorwise, rowwise, blockwise_1x128 or blockwise_128x128, but it is '", scaling,
          "'.");
  return ScaleSharing::kSquares;
}

void check_beside(const char* op, const Tensor& t, const View& v, const View& x) {
  REQUIRE(v.device_type == x.device_type && v.device_index == x.device_index, v.name,
          " must be on the device of x, cuda:", x.device_index, ": move it.");
  REQUIRE(t.is_contiguous(), v.name, " must be contiguous: pass ", v.name, ".contiguous().");
}

QuantizeParams params_of(const char* op, const View& x) {
  REQUIRE(x.device_type == aoti_torch_device_type_cuda() && x.dim == 2,
          "x must be a CUDA tensor [rows, columns], but it has shape ", tpk::ops::shape_text(x), ".");
  REQUIRE(x.stride(1) <= 1, "x must have contiguous columns, but its stride along them is ", x.stride(1),
          ": pass x.contiguous().");
  QuantizeParams p{};
  p.x = x.data;
  p.rows = x.sizes[0];
  p.columns = x.sizes[1];
  p.stride = x.stride(0);
  REQUIRE(blocks_of(p.rows) * blocks_of(p.columns) < int64_t{1} << 29,
          "x must have fewer than 2^29 squares of 128, but it has shape ", tpk::ops::shape_text(x),
          ": divide it.");
  p.row_tiles = static_cast<int32_t>(blocks_of(p.rows));
  p.column_tiles = static_cast<int32_t>(blocks_of(p.columns));
  p.in_units = reinterpret_cast<uintptr_t>(x.data) % kQuantizeUnitBytes == 0 &&
               p.stride * x.element_bytes % kQuantizeUnitBytes == 0;
  return p;
}

float* scale_for(const char* op, const char* name, const std::optional<Tensor>& scale, const View& x,
                 ScaleSharing sharing, int64_t rows, int64_t columns) {
  REQUIRE(scale.has_value(), name, " must be given with its data.");
  const View v = tpk::ops::view_of(name, *scale);
  check_beside(op, *scale, v, x);
  REQUIRE(v.type == ScalarType::Float, name, " must be float32, but it is ", v.type, ".");
  if (sharing == ScaleSharing::kTensor) {
    tpk::ops::check_shape(op, v, {1}, "[1]");
  } else if (sharing == ScaleSharing::kRow) {
    tpk::ops::check_shape(op, v, {rows, 1}, "[rows, 1]");
  } else {
    const bool squares = sharing == ScaleSharing::kSquares;
    tpk::ops::check_shape(
        op, v, {squares ? blocks_of(rows) : rows, blocks_of(columns)},
        squares ? "[ceil(rows / 128), ceil(columns / 128)]" : "[rows, ceil(columns / 128)]");
  }
  return static_cast<float*>(v.data);
}

void launch(const char* op, const QuantizeLaunch& l, const QuantizeParams& p, int device,
            cudaStream_t stream) {
  int64_t ctas = l.ctas;
  if (l.most > 0) {
    const auto facts = tpk::sm80::DeviceCache::instance().facts(device);
    ctas = std::min(ctas, int64_t{facts.multiprocessors} * l.most);
  }
  void* arguments[] = {const_cast<QuantizeParams*>(&p)};
  check_cuda(cudaLaunchKernel(l.function, dim3(static_cast<unsigned>(ctas)),
                              dim3(static_cast<unsigned>(l.threads)), arguments, 0, stream),
             (std::string("The launch of ") + op).c_str());
}

cudaStream_t stream_of(const char* op, int device) {
  void* stream = nullptr;
  REQUIRE(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
          "torch could not name the current CUDA stream.");
  return static_cast<cudaStream_t>(stream);
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    int current = -1;
    (void)cudaGetDevice(&current);
    if (current != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

QuantizeLaunch find_kernel(QuantizeSource source, QuantizeKernel kernel, Fp8Format to,
                           const QuantizeParams& p) {
  switch (source) {
    case QuantizeSource::kBf16:
      return tpk::sm80::quantize_bf16(kernel, to, p);
    case QuantizeSource::kFp16:
      return tpk::sm80::quantize_fp16(kernel, to, p);
    case QuantizeSource::kFp32:
      return tpk::sm80::quantize_fp32(kernel, to, p);
    default:
      return tpk::sm80::quantize_fp8(kernel, to, p);
  }
}

// What the strips count, at first 0.
Tensor counters(const Tensor& x, QuantizeParams& p, int64_t element_bytes, cudaStream_t stream) {
  const int64_t words = p.columns + 1 + p.column_tiles;
  Tensor memory = torch::stable::new_empty(x, {words}, ScalarType::Int);
  p.column_peaks = static_cast<uint32_t*>(memory.data_ptr());
  p.tickets = p.column_peaks + p.columns;
  const int64_t strip_bytes = p.rows * kQuantizeBlock * element_bytes;
  p.group = static_cast<int32_t>(std::clamp<int64_t>(kGroupBytes / strip_bytes, 1, p.column_tiles));
  check_cuda(cudaMemsetAsync(p.column_peaks, 0, static_cast<size_t>(words) * 4, stream), "cudaMemsetAsync");
  return memory;
}

void quantize_fp8(const Tensor& x, const std::optional<Tensor>& x_scale, const std::optional<Tensor>& amax,
                  const std::optional<Tensor>& plain, const std::optional<Tensor>& plain_scale,
                  const std::optional<Tensor>& turned, const std::optional<Tensor>& turned_scale,
                  const std::string& scaling, bool power_of_2) {
  constexpr const char* op = "tpkernels::quantize_fp8";
  const View from = tpk::ops::view_of("x", x);
  QuantizeParams p = params_of(op, from);
  const QuantizeSource source = source_of(op, from);
  const bool is_fp8 = source == QuantizeSource::kE4m3 || source == QuantizeSource::kE5m2;
  p.sharing = sharing_of(op, scaling);
  p.power_of_2 = power_of_2;
  REQUIRE(plain || turned, "plain or turned must be given: there is nothing to write.");
  REQUIRE(!is_fp8 || !plain, "plain must be None: x is in FP8 already.");
  const bool moves_bytes = is_fp8 && !x_scale;
  View scale;
  if (x_scale) {
    REQUIRE(is_fp8, "x_scale must be None: x is not in FP8.");
    REQUIRE(p.sharing == ScaleSharing::kRow || p.sharing == ScaleSharing::kBlocks,
            "x_scale must be None: the transposed copy has the scales of x with scaling '", scaling, "'.");
    scale = tpk::ops::view_of("x_scale", *x_scale);
    check_beside(op, *x_scale, scale, from);
    REQUIRE(scale.type == ScalarType::Float, "x_scale must be float32, but it is ", scale.type, ".");
    const bool of_rows = p.sharing == ScaleSharing::kRow;
    tpk::ops::check_shape(op, scale, {p.rows, of_rows ? 1 : p.column_tiles},
                          of_rows ? "[rows, 1]" : "[rows, ceil(columns / 128)]");
    p.x_scale = static_cast<const float*>(scale.data);
    p.x_scale_row = of_rows ? 1 : p.column_tiles;
    p.x_scale_block = of_rows ? 0 : 1;
  }
  if (p.sharing == ScaleSharing::kTensor && !moves_bytes) {
    REQUIRE(amax.has_value(), "amax must be given with scaling 'tensorwise': see find_largest.");
    const View v = tpk::ops::view_of("amax", *amax);
    check_beside(op, *amax, v, from);
    REQUIRE(v.type == ScalarType::Float, "amax must be float32, but it is ", v.type, ".");
    tpk::ops::check_shape(op, v, {1}, "[1]");
    p.amax = static_cast<const uint32_t*>(v.data);
  }
  Fp8Format to{};
  if (plain) {
    const View v = tpk::ops::view_of("plain", *plain);
    check_beside(op, *plain, v, from);
    tpk::ops::check_shape(op, v, {p.rows, p.columns}, "[rows, columns]");
    tpk::ops::check_separate(op, from, v);
    to = format_of(op, v);
    p.plain = static_cast<uint8_t*>(v.data);
    const int64_t bytes = kQuantizeUnitBytes / from.element_bytes;
    p.plain_units = p.columns % bytes == 0 && reinterpret_cast<uintptr_t>(v.data) % bytes == 0;
    p.plain_scale = scale_for(op, "plain_scale", plain_scale, from, p.sharing, p.rows, p.columns);
  }
  if (turned) {
    const View v = tpk::ops::view_of("turned", *turned);
    check_beside(op, *turned, v, from);
    tpk::ops::check_shape(op, v, {p.columns, p.rows}, "[columns, rows]");
    tpk::ops::check_separate(op, from, v);
    const Fp8Format format = format_of(op, v);
    REQUIRE(!plain || format == to, "turned must have the dtype of plain, but it is ", v.type, ".");
    REQUIRE(!is_fp8 || v.type == from.type, "turned must have the dtype of x, ", from.type, ", but it is ",
            v.type, ".");
    to = format;
    p.turned = static_cast<uint8_t*>(v.data);
    p.turned_words = p.rows % 4 == 0 && reinterpret_cast<uintptr_t>(v.data) % 4 == 0;
    if (!moves_bytes) {
      p.turned_scale = scale_for(op, "turned_scale", turned_scale, from, p.sharing, p.columns, p.rows);
    }
  }
  if (from.is_empty()) return;  // and there are no scales, or the caller's
  const OnDevice guard(from.device_index);
  const cudaStream_t stream = stream_of(op, from.device_index);
  const auto run = [&](QuantizeKernel kernel) {
    launch(op, find_kernel(source, kernel, to, p), p, from.device_index, stream);
  };
  if (p.sharing != ScaleSharing::kRow || moves_bytes) return run(QuantizeKernel::kTiles);
  if (plain) run(QuantizeKernel::kRows);
  if (turned) {
    // torch may hand it out again behind this call: in stream order that is behind the kernel.
    const Tensor memory = counters(x, p, from.element_bytes, stream);
    run(QuantizeKernel::kStrips);
  }
}

void find_largest(const Tensor& x, const Tensor& amax) {
  constexpr const char* op = "tpkernels::find_largest";
  const View from = tpk::ops::view_of("x", x);
  QuantizeParams p = params_of(op, from);
  const QuantizeSource source = source_of(op, from);
  REQUIRE(source != QuantizeSource::kE4m3 && source != QuantizeSource::kE5m2,
          "x must be bfloat16, float16 or float32, but it is ", from.type, ".");
  const View v = tpk::ops::view_of("amax", amax);
  check_beside(op, amax, v, from);
  REQUIRE(v.type == ScalarType::Float, "amax must be float32, but it is ", v.type, ".");
  tpk::ops::check_shape(op, v, {1}, "[1]");
  tpk::ops::check_separate(op, from, v);
  const OnDevice guard(from.device_index);
  const cudaStream_t stream = stream_of(op, from.device_index);
  check_cuda(cudaMemsetAsync(v.data, 0, sizeof(float), stream), "cudaMemsetAsync");
  if (from.is_empty()) return;
  p.amax = static_cast<const uint32_t*>(v.data);
  launch(op, find_kernel(source, QuantizeKernel::kLargest, Fp8Format::kE4m3, p), p, from.device_index,
         stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8));
  m.impl("find_largest", TORCH_BOX(&find_largest));
}

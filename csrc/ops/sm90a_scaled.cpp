// torch.ops.tpkernels.scaled_gemm: products of 8-bit operands with scales, by the Hopper kernel. It takes
// what TMA can load, and says in a sentence what it cannot: the caller then converts the operands. No host
// synchronisation, so that it can be captured into CUDA graphs.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "host/schedule_builder.hpp"
#include "kernels/sm90a/plan.hpp"
#include "ops/arguments.hpp"
#include "ops/hopper_call.hpp"

namespace {

using tpk::Fp8;
using tpk::kScaleBlock;
using tpk::ops::ScalarType;
using tpk::ops::Tensor;
using tpk::ops::View;

constexpr const char* kOp = "tpkernels::scaled_gemm";

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

// A tensor of 16 or 32 bits on the device of a.
View view_beside(const char* name, const Tensor& t, const View& a) {
  const View v = tpk::ops::view_of(name, t);
  REQUIRE(t.is_cuda() && v.device_index == a.device_index, name,
          " must be on the device of a, cuda:", a.device_index, ": move it there.");
  return v;
}

Fp8 kind_of_fp8(const View& v) {
  REQUIRE(v.type == ScalarType::Float8_e4m3fn || v.type == ScalarType::Float8_e5m2, v.name,
          " must be float8_e4m3fn or float8_e5m2, but it is ", v.type, ": quantise it.");
  return v.type == ScalarType::Float8_e4m3fn ? Fp8::kE4m3 : Fp8::kE5m2;
}

// What TMA takes: rows of contiguous K. outer: which dimension counts the rows.
void check_loadable(const View& v, int outer) {
  const int64_t k_stride = v.stride(1 - outer);
  const int64_t row_stride = v.stride(outer);
  REQUIRE(k_stride <= 1, v.name, " must have K contiguous, but its stride along K is ", k_stride,
          ": Hopper multiplies 8-bit operands in no other layout. Pass ",
          outer == 0 ? "a row-major a." : "b as the .t() of a row-major [N, K].");
  REQUIRE(row_stride % 16 == 0 && (row_stride > 0 || v.sizes[outer] <= 1), v.name,
          " must have rows that start at multiples of 16 bytes, which TMA needs, but they are ", row_stride,
          " bytes apart: pad K with zeros.");
  REQUIRE(reinterpret_cast<uintptr_t>(v.data) % 16 == 0 || v.is_empty(), v.name,
          " must start at a multiple of 16 bytes, which TMA needs: clone it.");
}

int64_t blocks_of(int64_t extent) { return (extent + kScaleBlock - 1) / kScaleBlock; }

bool has_shape(const View& v, int64_t rows, int64_t columns) {
  return v.dim == 2 && v.sizes[0] == rows && v.sizes[1] == columns;
}

int64_t count_of(const View& v) {
  int64_t n = 1;
  for (int64_t i = 0; i < v.dim; ++i) n *= v.sizes[i];
  return n;
}

// scale_a: outer is dimension 0, K dimension 1. scale_b: the other way round.
tpk::Scales scales_of(const View& v, int outer, int64_t extent, int64_t k) {
  REQUIRE(v.type == ScalarType::Float, v.name, " must be float32, but it is ", v.type, ": convert it.");
  tpk::Scales s;
  s.data = static_cast<const float*>(v.data);
  if (count_of(v) == 1) return s;
  const auto fits = [&](int64_t along_outer, int64_t along_k) {
    return outer == 0 ? has_shape(v, along_outer, along_k) : has_shape(v, along_k, along_outer);
  };
  const bool of_rows = fits(extent, 1) || fits(extent, blocks_of(k));
  const bool of_blocks = outer == 1 && fits(blocks_of(extent), blocks_of(k));
  if (outer == 0) {
    REQUIRE(of_rows, v.name, " must have one element, shape [M, 1] = [", extent,
            ", 1] or [M, ceil(K / 128)] = [", extent, ", ", blocks_of(k), "], but it has shape ",
            tpk::ops::shape_text(v), ".");
  } else {
    REQUIRE(of_rows || of_blocks, v.name, " must have one element, shape [1, N] = [1, ", extent,
            "], [ceil(K / 128), N] = [", blocks_of(k), ", ", extent,
            "] or [ceil(K / 128), ceil(N / 128)] = [", blocks_of(k), ", ", blocks_of(extent),
            "], but it has shape ", tpk::ops::shape_text(v), ".");
  }
  s.outer_stride = v.stride(outer);
  s.k_stride = v.stride(1 - outer);
  s.outer_shift = of_rows ? 0 : 7;
  static_assert(kScaleBlock == 1 << 7);
  return s;
}

// K = 0: nothing is multiplied.
void fill(Tensor out, const std::optional<Tensor>& bias) {
  if (bias) {
    torch::stable::copy_(out, *bias);
  } else {
    torch::stable::zero_(out);
  }
}

void scaled_gemm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const std::optional<Tensor>& bias, const Tensor& out, bool fast_accumulation,
                 const std::string& schedule, int64_t workers, int64_t splits, const std::string& tile,
                 int64_t multiprocessors) {
  const View va = tpk::ops::view_of("a", a);
  const View vb = view_beside("b", b, va);
  REQUIRE(va.dim == 2 && vb.dim == 2 && va.sizes[1] == vb.sizes[0],
          "a and b must have shapes [M, K] and [K, N], but they have ", tpk::ops::shape_text(va), " and ",
          tpk::ops::shape_text(vb), ".");
  tpk::ScaledOperands scaled;
  scaled.a = kind_of_fp8(va);
  scaled.b = kind_of_fp8(vb);
  const int64_t m = va.sizes[0];
  const int64_t k = va.sizes[1];
  const int64_t n = vb.sizes[1];
  const View view_scale_a = view_beside("scale_a", scale_a, va);
  const View view_scale_b = view_beside("scale_b", scale_b, va);
  scaled.scale_a = scales_of(view_scale_a, 0, m, k);
  scaled.scale_b = scales_of(view_scale_b, 1, n, k);
  scaled.blocks = scaled.scale_a.k_stride != 0 || scaled.scale_b.k_stride != 0;
  scaled.fast = fast_accumulation;
  REQUIRE(!scaled.blocks || !scaled.fast,
          "fast_accumulation must be False with scales that change along K: they are applied where sums are "
          "promoted to float32.");

  const View vo = view_beside("out", out, va);
  tpk::ops::check_shape(kOp, vo, {m, n}, "[M, N]");
  const auto is_once = [](ScalarType t) {
    return t == ScalarType::BFloat16 || t == ScalarType::Half || t == ScalarType::Float;
  };
  REQUIRE(is_once(vo.type), "out must be bfloat16, float16 or float32, but it is ", vo.type, ".");
  for (int d = 0; d < 2; ++d) {
    REQUIRE(vo.sizes[d] <= 1 || vo.strides[d] != 0, "out must not be broadcast (its stride along dimension ",
            d, " is 0): several results would be written to one element.");
  }
  View view_bias;
  if (bias) {
    view_bias = view_beside("bias", *bias, va);
    tpk::ops::check_shape(kOp, view_bias, {n}, "[N]");
    REQUIRE(is_once(view_bias.type), "bias must be bfloat16, float16 or float32, but it is ", view_bias.type,
            ".");
  }
  const View* const read[] = {&va, &vb, &view_scale_a, &view_scale_b, &view_bias};
  for (const View* v : read) tpk::ops::check_separate(kOp, *v, vo);
  REQUIRE(workers >= 0 && splits >= 1,
          "workers must be 0 (as many as fit) or more and splits at least 1, but "
          "they are ",
          workers, " and ", splits, ".");

  int major = 0;
  int minor = 0;
  int present = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, va.device_index);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, va.device_index);
  (void)cudaDeviceGetAttribute(&present, cudaDevAttrMultiProcessorCount, va.device_index);
  REQUIRE(major == 9 && minor == 0,
          "the device must be a Hopper GPU (compute capability 9.0), but cuda:", va.device_index, " has ",
          major, ".", minor, ": convert the operands.");
  REQUIRE(multiprocessors >= 0 && multiprocessors <= present, "multiprocessors must be 0 (all) to ", present,
          ", but it is ", multiprocessors, ".");
  try {
    if (schedule != "auto") tpk::parse_schedule_kind(schedule);
  } catch (const std::invalid_argument& error) {
    REQUIRE(false, error.what());
  }
  if (vo.is_empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(va.device_index);
  if (k == 0) return fill(out, bias);
  check_loadable(va, 0);
  check_loadable(vb, 1);

  tpk::GemmCall c;
  c.problem = {m, n, k, 1};
  c.element = tpk::Element::kFp8;
  c.scaled = &scaled;
  c.a = tpk::ops::matrix_of(a);
  c.b = tpk::ops::matrix_of(b);
  c.out = tpk::ops::matrix_of(out);
  if (bias) c.bias = tpk::ops::matrix_of(*bias);
  c.schedule = schedule;
  c.tile = tile;
  c.workers = workers;
  c.splits = splits;
  c.timeout_ns = static_cast<uint64_t>(tpk::ops::timeout_seconds(30.0) * 1e9);
  tpk::ops::set_device(c, va.device_index, multiprocessors);
  tpk::ops::Workspace workspace(a);
  tpk::ops::run_hopper(kOp, c, workspace, tpk::ops::current_stream(kOp, va.device_index));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) { m.impl("scaled_gemm", TORCH_BOX(&scaled_gemm)); }

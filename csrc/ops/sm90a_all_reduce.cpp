// torch.ops.tpkernels.fused_all_reduce, fused_all_gather and fused_reduce_scatter: small collectives, each in
// one kernel. What it does: host/all_reduce.hpp.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/sm90a/all_reduce.hpp"
#include "kernels/sm90a/device.hpp"
#include "ops/hopper_call.hpp"

namespace {

using tpk::all_reduce::Call;
using tpk::all_reduce::kMaxRanks;
using tpk::all_reduce::kUnitBytes;
using tpk::all_reduce::Page;
using tpk::all_reduce::Way;
using tpk::ops::kind_of;
using tpk::ops::Tensor;
using tpk::sm90a::AllReduceParams;

using tpk::ScalarKind;

constexpr const char* kReduce = "tpkernels::fused_all_reduce";
constexpr const char* kGather = "tpkernels::fused_all_gather";
constexpr const char* kScatter = "tpkernels::fused_reduce_scatter";

Way parse_way(const std::string& way) {
  if (way == "packets") return Way::kPackets;
  if (way == "one-shot") return Way::kOneShot;
  TPK_REQUIRE(way == "two-shot", kReduce, ": way must be one of packets, one-shot or two-shot, but it is '",
              way, "'.");
  return Way::kTwoShot;
}

// The arguments that all three have. buffer_bytes: of each rank's memory, the page included.
struct Place {
  const char* op;
  int64_t rank;
  const std::vector<int64_t>& addresses;
  int64_t buffer_bytes;
  double timeout_s;
  int64_t ctas;

  int world() const { return static_cast<int>(addresses.size()); }
  void check() const {
    TPK_REQUIRE(world() >= 2 && world() <= kMaxRanks, op, ": addresses must name 2 to ", kMaxRanks,
                " ranks, but it names ", world(), ".");
    TPK_REQUIRE(rank >= 0 && rank < world(), op, ": rank must lie in [0, ", world(), "), but it is ", rank,
                ".");
    TPK_REQUIRE(ctas >= 0 && ctas <= tpk::all_reduce::kMaxCtas, op, ": ctas must lie in [0, ",
                tpk::all_reduce::kMaxCtas, "], where 0 leaves the choice to the op, but it is ", ctas, ".");
    for (int r = 0; r < world(); ++r) {
      TPK_REQUIRE(addresses[r] != 0 && addresses[r] % kUnitBytes == 0, op,
                  ": addresses must be those of symmetric memory, but entry ", r, " is ", addresses[r], ".");
    }
  }
};

// Fills what is the same for all three; call.units, or lengths, are there already. units: of all ranks.
void complete(AllReduceParams& params, Way way, int64_t units, const char* way_name, const Place& place) {
  Call& c = params.call;
  c.world = place.world();
  c.rank = static_cast<int32_t>(place.rank);
  c.way = way;
  c.ctas = place.ctas > 0
               ? static_cast<int32_t>(place.ctas)
               : tpk::all_reduce::ctas_for(static_cast<int32_t>(units), tpk::sm90a::kAllReduceThreads);
  // Whole lines.
  c.half_bytes = (place.buffer_bytes - static_cast<int64_t>(Page::kBytes)) / 2 / 128 * 128;
  for (int r = 0; r < c.world; ++r) c.pages[r] = Page::at(static_cast<uint64_t>(place.addresses[r]));
  c.cut();
  TPK_REQUIRE(c.fits(), place.op, ": ", units * kUnitBytes, " bytes of ", c.world,
              " ranks do not fit a buffer of ", place.buffer_bytes, " bytes by way of ", way_name,
              ": make the workspace larger.");
  params.timeout_ns = static_cast<uint64_t>(place.timeout_s * 1e9);
  params.fault = tpk::sm90a::DeviceCache::instance().fault();
}

// Lengths and begins of shards, each of shard_rows[r] rows; returns the units that they take.
int64_t cut_shards(AllReduceParams& params, const std::vector<int64_t>& shard_rows, int64_t row_elements,
                   ScalarKind kind, const Place& place) {
  TPK_REQUIRE(static_cast<int>(shard_rows.size()) == place.world(), place.op,
              ": shard_rows must have an entry for each of the ", place.world(), " ranks, but it has ",
              shard_rows.size(), ".");
  int64_t rows = 0;
  int64_t longest = 0;
  for (const int64_t each : shard_rows) {
    TPK_REQUIRE(each >= 0, place.op, ": shard_rows must not be negative, but an entry is ", each, ".");
    longest = std::max(longest, each);
    rows += each;
  }
  // Of the longest for each: that is how the memory is cut.
  const int64_t size = tpk::bytes_of(kind);
  const int64_t most = static_cast<int64_t>(tpk::all_reduce::kMostUnits) * kUnitBytes;
  const int64_t row_bytes = row_elements * size;
  TPK_REQUIRE(rows > 0 && row_bytes > 0 && row_bytes < most && longest < most / row_bytes / place.world(),
              place.op, ": shards must have elements, and less than 2 GiB together, but the longest has ",
              longest, " rows of ", row_bytes, " bytes.");
  int64_t elements = 0;
  for (int r = 0; r < place.world(); ++r) {
    params.firsts[r] = static_cast<int32_t>(elements);
    params.call.lengths[r] =
        static_cast<int32_t>(tpk::ceil_div(shard_rows[r] * row_bytes, int64_t{kUnitBytes}));
    elements += shard_rows[r] * row_elements;
  }
  params.firsts[place.world()] = static_cast<int32_t>(elements);
  return tpk::ceil_div(longest * row_bytes, int64_t{kUnitBytes}) * place.world();
}

bool known(const Tensor& t) {
  using torch::headeronly::ScalarType;
  return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half ||
         t.scalar_type() == ScalarType::Float;
}

void check_first(const char* op, const char* name, const Tensor& t) {
  TPK_REQUIRE(t.is_cuda() && t.dim() == 2 && t.is_contiguous(), op, ": ", name,
              " must be a contiguous CUDA tensor of two dimensions.");
  TPK_REQUIRE(known(t), op, ": ", name, " must be bfloat16, float16 or float32, but it is ", t.scalar_type(),
              ".");
}

void check_like(const char* op, const char* name, const Tensor& t, int64_t rows, const Tensor& first,
                const char* first_name) {
  TPK_REQUIRE(t.is_cuda() && t.dim() == 2 && t.size(0) == rows && t.size(1) == first.size(1), op, ": ", name,
              " must be a CUDA tensor of shape [", rows, ", ", first.size(1), "].");
  TPK_REQUIRE(t.is_contiguous() && t.scalar_type() == first.scalar_type(), op, ": ", name,
              " must be contiguous and of ", first_name, "'s dtype, ", first.scalar_type(), ", but it is ",
              t.scalar_type(), ".");
  TPK_REQUIRE(t.get_device_index() == first.get_device_index(), op, ": ", name, " must be on the device of ",
              first_name, ".");
}

// Terms that are added to sums of `rows` rows, and where these go.
void set_terms(AllReduceParams& params, const char* op, const Tensor& partial, int64_t rows,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, const Tensor& out) {
  check_like(op, "out", out, rows, partial, "partial");
  if (residual) check_like(op, "residual", *residual, rows, partial, "partial");
  if (bias) {
    TPK_REQUIRE(bias->is_cuda() && bias->dim() == 1 && bias->size(0) == partial.size(1) &&
                    bias->is_contiguous() && known(*bias),
                op, ": bias must be a contiguous CUDA tensor [N] of bfloat16, float16 or float32.");
  }
  params.partial = partial.data_ptr();
  params.out = out.data_ptr();
  params.residual = residual ? residual->data_ptr() : nullptr;
  params.bias = bias ? bias->data_ptr() : nullptr;
  params.bias_kind = bias ? kind_of(*bias) : ScalarKind::kFp32;
  params.n = static_cast<int32_t>(partial.size(1));
}

void launch(const AllReduceParams& params, const char* op, const Tensor& like) {
  const int device = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.call.ctas));
  config.blockDim = dim3(tpk::sm90a::kAllReduceThreads);
  config.stream = tpk::ops::current_stream(op, device);
  config.attrs = &early;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<AllReduceParams*>(&params)};
  const void* const function = tpk::sm90a::all_reduce_function(params.call.way, kind_of(like));
  const cudaError_t error = cudaLaunchKernelExC(&config, function, arguments);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string fault = tpk::sm90a::fault_sentence(*params.fault);
  TPK_REQUIRE(false, op, ": ",
              fault.empty() ? std::string("the launch failed: ") + cudaGetErrorString(error) + "."
                            : "an earlier launch was stopped: " + fault);
}

void fused_all_reduce(const Tensor& partial, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, const Tensor& out, const std::string& way,
                      int64_t rank, const std::vector<int64_t>& addresses, int64_t buffer_bytes,
                      double timeout_s, int64_t ctas) {
  const Place place{kReduce, rank, addresses, buffer_bytes, timeout_s, ctas};
  place.check();
  check_first(kReduce, "partial", partial);
  AllReduceParams params;
  set_terms(params, kReduce, partial, partial.size(0), bias, residual, out);
  const int64_t bytes = partial.numel() * tpk::bytes_of(kind_of(partial));
  const int64_t units = tpk::ceil_div(bytes, kUnitBytes);
  TPK_REQUIRE(units > 0 && units < tpk::all_reduce::kMostUnits, kReduce,
              ": partial must have elements, and less than 2 GiB, but it has ", bytes, " bytes.");
  params.elements = static_cast<int32_t>(partial.numel());
  params.call.units = static_cast<int32_t>(units);
  complete(params, parse_way(way), units, way.c_str(), place);
  launch(params, kReduce, partial);
}

void fused_all_gather(const Tensor& shard, const Tensor& out, const std::vector<int64_t>& shard_rows,
                      int64_t rank, const std::vector<int64_t>& addresses, int64_t buffer_bytes,
                      double timeout_s, int64_t ctas) {
  const Place place{kGather, rank, addresses, buffer_bytes, timeout_s, ctas};
  place.check();
  check_first(kGather, "shard", shard);
  AllReduceParams params;
  const int64_t units = cut_shards(params, shard_rows, shard.size(1), kind_of(shard), place);
  TPK_REQUIRE(shard.size(0) == shard_rows[rank], kGather, ": shard must have the ", shard_rows[rank],
              " rows that shard_rows says of rank ", rank, ", but it has ", shard.size(0), ".");
  check_like(kGather, "out", out, params.firsts[place.world()] / shard.size(1), shard, "shard");
  params.partial = shard.data_ptr();
  params.out = out.data_ptr();
  complete(params, Way::kGather, units, "gather", place);
  launch(params, kGather, shard);
}

void fused_reduce_scatter(const Tensor& partial, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& residual, const Tensor& out,
                          const std::vector<int64_t>& shard_rows, int64_t rank,
                          const std::vector<int64_t>& addresses, int64_t buffer_bytes, double timeout_s,
                          int64_t ctas) {
  const Place place{kScatter, rank, addresses, buffer_bytes, timeout_s, ctas};
  place.check();
  check_first(kScatter, "partial", partial);
  AllReduceParams params;
  const int64_t units = cut_shards(params, shard_rows, partial.size(1), kind_of(partial), place);
  const int64_t rows = params.firsts[place.world()] / partial.size(1);
  TPK_REQUIRE(partial.size(0) == rows, kScatter, ": partial must have the ", rows,
              " rows that shard_rows has, but it has ", partial.size(0), ".");
  set_terms(params, kScatter, partial, shard_rows[rank], bias, residual, out);
  complete(params, Way::kScatter, units, "scatter", place);
  launch(params, kScatter, partial);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_all_reduce", TORCH_BOX(&fused_all_reduce));
  m.impl("fused_all_gather", TORCH_BOX(&fused_all_gather));
  m.impl("fused_reduce_scatter", TORCH_BOX(&fused_reduce_scatter));
}

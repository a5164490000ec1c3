// torch.ops.tpkernels.fused_all_gather_matmul: one rank's part of a product of rows that all ranks have a
// shard of. They travel by the copy engine while the Hopper kernel multiplies; who writes which word, and
// when: host/protocol.hpp. Nothing waits on the host: captured into graphs after a first call.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "ops/arguments.hpp"
#include "ops/gather_pushes.hpp"

namespace {

using namespace tpk::ops;
using tpk::GemmCall;
using tpk::GemmHooks;

constexpr const char* kGather = "tpkernels::fused_all_gather_matmul";

void fused_all_gather_matmul(const Tensor& a_shard, const std::vector<Tensor>& bs,
                             const std::vector<Tensor>& biases, const std::vector<int64_t>& bias_of,
                             const std::string& activation, const std::vector<Tensor>& outs,
                             const std::vector<Tensor>& preacts, const std::optional<Tensor>& gathered,
                             const std::vector<int64_t>& shard_rows, int64_t rank,
                             const std::vector<int64_t>& addresses, double timeout_s,
                             const std::string& schedule, const std::string& tile, int64_t multiprocessors,
                             bool whole) {
#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kGather, ": ", __VA_ARGS__)
  REQUIRE(a_shard.is_cuda() && a_shard.dim() == 2, "a_shard must be a CUDA tensor [rows, K].");
  const auto device = a_shard.get_device_index();
  const DeviceGuard guard(device);
  Group g = group_of(kGather, shard_rows, rank, addresses, timeout_s, device);
  const int64_t k = a_shard.size(1);
  const int64_t own = g.rows_of(g.rank());
  const int64_t first = g.rows.begin(g.rank());
  const int64_t m = g.total();
  const GatherPushes pushes(kGather, a_shard, g, shard_rows);
  REQUIRE(!bs.empty() && outs.size() == bs.size() && (preacts.empty() || preacts.size() == bs.size()),
          "there must be an output for each of bs, and a preact for each or none.");
  REQUIRE(bias_of.size() == biases.size(), "bias_of must name a weight for each of biases.");
  const tpk::Element element = tpk::ops::element_of(kGather, a_shard);
  for (size_t i = 0; i < bs.size(); ++i) {
    REQUIRE(bs[i].scalar_type() == a_shard.scalar_type(), "bs must be of a_shard's dtype.");
    check_matrix(kGather, "b", bs[i], k, bs[i].size(1));
    check_matrix(kGather, "out", outs[i], m, bs[i].size(1));
    REQUIRE(bs[i].size(1) > 0, "b must have columns.");
    if (!preacts.empty()) {
      check_matrix(kGather, "preact", preacts[i], m, bs[i].size(1));
      REQUIRE(preacts[i].scalar_type() == outs[i].scalar_type(), "preact must be of its output's dtype.");
    }
  }
  if (gathered) {
    check_matrix(kGather, "gathered", *gathered, m, k);
    REQUIRE(gathered->is_contiguous() && gathered->scalar_type() == a_shard.scalar_type(),
            "gathered must be contiguous and of a_shard's dtype.");
  }

  const tpk::protocol::ChunkList& chunks = pushes.chunks();
  const int64_t pitch = pushes.pitch();
  const int64_t own_stride = pushes.stride();
  const Rows buffer = pushes.buffer(g.rank());
  // TMA takes the own rows where they are, or they are copied to those of the others.
  const bool in_place =
      own > 0 && reinterpret_cast<uintptr_t>(a_shard.data_ptr()) % 16 == 0 && own_stride % 8 == 0;

  GemmHooks hooks;
  tpk::ArrivalHook& arrival = hooks.arrival;
  arrival.flags = g.mine().arrived(0);
  arrival.epoch = g.mine().epoch();
  arrival.num_chunks = chunks.count;
  std::copy(chunks.row_end, chunks.row_end + chunks.count, arrival.row_end);
  arrival.ranks = g.rows;
  if (in_place) arrival.own = {a_shard.data_ptr(), 0, own_stride, 1, tpk::ops::kind_of(a_shard)};
  GemmHooks later = hooks;  // products behind the first find all rows there
  later.arrival.landed = true;
  std::vector<GemmCall> calls(bs.size());
  std::vector<tpk::ops::Workspace> workspaces(bs.size(), tpk::ops::Workspace(a_shard));
  int64_t head = 0;  // own rows, at the beginning and at the end, of which a tile has rows of others too
  int64_t tail = 0;
  for (size_t i = 0; i < bs.size(); ++i) {
    GemmCall& c = calls[i];
    c.problem = {m, bs[i].size(1), k, 1};
    c.element = element;
    c.a = {buffer.data, 0, pitch, 1, tpk::ops::kind_of(a_shard)};
    c.b = matrix_of(bs[i]);
    c.out = matrix_of(outs[i]);
    if (!preacts.empty()) c.preact = matrix_of(preacts[i]);
    const auto bias = std::find(bias_of.begin(), bias_of.end(), static_cast<int64_t>(i));
    if (bias != bias_of.end()) {
      const Tensor& t = biases[bias - bias_of.begin()];
      REQUIRE(t.is_cuda() && t.dim() == 1 && t.size(0) == bs[i].size(1), "biases must be CUDA tensors [N].");
      c.bias = matrix_of(t);
    }
    c.activation = tpk::ops::parse_activation(kGather, activation);
    c.hooks = i == 0 ? &hooks : &later;
    set_plan(c, schedule, tile, multiprocessors, g, device);
    const int64_t bm = tpk::ops::prepare_hopper(kGather, c, workspaces[i]);
    head = std::max(head, (bm - first % bm) % bm);
    if (first + own < m) tail = std::max(tail, (first + own) % bm);
  }

  g.sync.here_begin = chunks.first[g.rank()];
  g.sync.here_end = chunks.first[g.rank() + 1];
  launch_sync(kGather, tpk::sm90a::enter_function(), g);
  CopyEngine::Call engine(CopyEngine::of(device), g.stream);
  pushes.enqueue(engine);
  // In front of the product, not beside it: a copy on this device may need multiprocessors, which a product
  // that waits for it would hold.
  if (!in_place || head + tail >= own) head = own, tail = 0;
  pushes.copy_own(kGather, buffer.from(first), 0, head);
  pushes.copy_own(kGather, buffer.from(first), own - tail, own);
  for (size_t i = 0; i < calls.size(); ++i) tpk::ops::run_hopper(kGather, calls[i], workspaces[i], g.stream);
  engine.join();
  if (whole) pushes.copy_own(kGather, buffer.from(first), head, own - tail);
  if (gathered) {
    const Rows out{gathered->data_ptr(), pushes.row_bytes()};
    pushes.copy_rows(kGather, out, buffer, first);
    pushes.copy_own(kGather, out.from(first), 0, own);
    pushes.copy_rows(kGather, out.from(first + own), buffer.from(first + own), m - first - own);
  }
#undef REQUIRE
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_all_gather_matmul", TORCH_BOX(&fused_all_gather_matmul));
}

// From a GemmCall to a launch: operands, plan, tensor maps, workspace. No host synchronisation, nothing kept
// between calls but facts and plans, so that it can be captured into CUDA graphs and used on several streams
// and devices at once.
#include "kernels/sm90a/entry.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels/sm90a/clear.hpp"
#include "kernels/sm90a/device.hpp"
#include "kernels/sm90a/matrices.hpp"
#include "kernels/sm90a/one_tile_launch.hpp"
#include "kernels/sm90a/operands.hpp"
#include "kernels/sm90a/params.hpp"
#include "kernels/sm90a/tensor_map.hpp"

namespace tpk::sm90a {
namespace {

// Nothing is wrong, but another kernel has to do it.
struct Refusal {
  std::string sentence;
};

OperandView take_operand(const char* name, const std::optional<OperandView>& view) {
  if (view) return *view;
  throw Refusal{
      std::string(name) +
      " cannot be loaded by TMA: it takes one contiguous dimension, the other strides multiples of 16 "
      "bytes, and an address that is one."};
}

bool lie_alike(const OperandView& x, const OperandView& y) {
  return x.major == y.major && x.batch_step == y.batch_step;
}

Operands read_operands(const GemmCall& c) {
  const Problem& p = c.problem;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;  // coordinates are 32-bit
  if (p.k == 0) throw Refusal{"K is 0, which leaves nothing to load."};
  if (c.groups != nullptr && (c.hooks != nullptr || c.num_more > 0))
    throw Refusal{"a grouped product has no hooks and no further pairs of factors."};
  if (p.m > kMost || p.n > kMost || whole_problem(c).k > kMost || p.batch > kMost ||
      (c.groups != nullptr && c.groups->matrices > kMost)) {
    throw Refusal{"M, N, K and batch must stay below 2^31 - 1024."};
  }
  Operands o;
  const int bytes = c.element == Element::kFp8 ? 1 : kElementBytes;
  const auto view_a = [&](const Matrix& m, int64_t k) {
    return view_operand(m, p.batch, p.m, m.row_stride, k, m.col_stride, bytes);
  };
  const int64_t matrices = c.groups != nullptr ? c.groups->matrices : p.batch;
  const auto view_b = [&](const Matrix& m, int64_t k) {
    return view_operand(m, matrices, p.n, m.col_stride, k, m.row_stride, bytes);
  };
  o.a = take_operand("a", view_a(c.a, p.k));
  o.b = take_operand("b", view_b(c.b, p.k));
  if (c.groups != nullptr && o.a.major == Major::kOuter) {
    for (int32_t i = 0; i < c.groups->count; ++i) {  // TMA's boxes begin at multiples of 16 bytes
      if (c.groups->rows[i].begin % 8 != 0)
        throw Refusal{"every group must begin at a multiple of 8 rows where a has M contiguous."};
    }
  }
  for (int i = 0; i < c.num_more; ++i) {
    if (c.more[i].k == 0) throw Refusal{"K of a pair is 0, which leaves nothing to load."};
    o.more[i].a = take_operand("a of another pair", view_a(c.more[i].a, c.more[i].k));
    o.more[i].b = take_operand("b of another pair", view_b(c.more[i].b, c.more[i].k));
    if (!lie_alike(o.more[i].a, o.a) || !lie_alike(o.more[i].b, o.b)) {
      throw Refusal{
          "all a, and all b, of a sum of products must lie in memory alike: the same dimension contiguous, "
          "broadcast in all or none."};
    }
  }
  if (c.gate.data != nullptr) {
    if (c.num_more > 0) throw Refusal{"a gated product is no sum of products."};
    o.gate = take_operand("gate", view_b(c.gate, p.k));
    if (!lie_alike(o.gate, o.b)) {
      throw Refusal{
          "gate must lie in memory as b does: the same dimension contiguous, broadcast in both or neither."};
    }
  }
  if (c.hooks != nullptr && c.hooks->arrival.flags != nullptr && c.num_more > 0)
    throw Refusal{"a product of rows that arrive is no sum of products."};
  if (c.hooks != nullptr && c.hooks->blocks.flags != nullptr &&
      (c.gate.data != nullptr || p.batch != 1 || c.hooks->arrival.flags != nullptr ||
       c.hooks->departure.ranks.world > 0)) {
    throw Refusal{"a product of blocks that arrive has no gate, one batch, and no rows that come or go."};
  }
  if (c.hooks != nullptr && c.hooks->arrival.own.data != nullptr) {
    const ArrivalHook& h = c.hooks->arrival;
    const int64_t rows = h.ranks.row_end[h.ranks.rank] - h.ranks.begin(h.ranks.rank);
    o.own = take_operand("own", view_operand(h.own, 1, rows, h.own.row_stride, p.k, h.own.col_stride, bytes));
    if (o.own.major != Major::kK || o.a.major != Major::kK)
      throw Refusal{"a and the own rows must have K contiguous."};
  }
  return o;
}

void fill_maps(GemmParams& p, const GemmCall& c, const Operands& o, const GemmPlan& plan) {
  const TileShape tile = tile_shape(plan.tile);
  const int32_t share_a = plan.cluster.n;
  const int32_t share_b = plan.cluster.m;
  const auto maps = [&](const PairView& v) {
    return PairMaps{
        operand_map(v.a, c.element, tile.bm, share_a),
        operand_map(v.b, c.element, p.gated ? tile.bn / 2 : tile.bn, p.gated ? 1 : share_b, share_b)};
  };
  p.pair_ends = pair_ends(c);
  p.pairs[0] = maps(o);
  for (int i = 0; i < c.num_more; ++i) p.pairs[i + 1] = maps(o.more[i]);
  if (p.gated) p.map_gate = maps({o.a, o.gate}).b;
  if (o.own.tensor.data != nullptr) {
    const RankRows& ranks = c.hooks->arrival.ranks;
    p.map_own = operand_map(o.own, c.element, tile.bm, share_a);
    p.own_begin = ranks.begin(ranks.rank);
    // Nothing comes behind the last row.
    const int32_t end = ranks.row_end[ranks.rank];
    p.own_end = end == c.problem.m ? std::numeric_limits<int32_t>::max() : end;
  }
  p.batch_step_a = c.groups != nullptr ? 0 : o.a.batch_step;
  p.batch_step_b = o.b.batch_step;
}

// Blocks of own rows that are added: see owner.cuh. box_rows: 64, or of all parts of a tile. batches of
// [rows, N], rows rounded up to 16 bytes.
CUtensorMap addend_map(const void* data, ScalarKind kind, int64_t box_rows, int64_t rows, int64_t row_stride,
                       int64_t batches, int64_t batch_stride) {
  const TensorView view{
      const_cast<void*>(data), row_stride / bytes_of(kind), rows, batches, row_stride, batch_stride};
  return encode_tensor_map(view, kind, static_cast<uint32_t>(kSwizzleBytes / bytes_of(kind)),
                           static_cast<uint32_t>(box_rows));
}

void fill_departure(GemmParams& p, const GemmCall& c, TileId tile) {
  const DepartureHook& h = c.hooks->departure;
  const ScalarKind kind = c.out.kind;
  const int32_t first = h.ranks.begin(h.ranks.rank);
  Problem q = c.problem;
  q.m = h.ranks.row_end[h.ranks.rank] - first;
  p.departs = p.plain = true;
  p.out = output_of(h.others, c.problem);
  Output own = output_of(c.out, q);
  // As far apart as a slot's, also where there is one row alone: other ranks' memory is addressed alike.
  p.out.row_stride = own.row_stride = h.row_stride;
  own.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(own.data) - first * own.row_stride);
  own.aligned = p.out.aligned = true;  // rows have room for whole units
  p.own_rows = {first, static_cast<int32_t>(first + q.m), own, h.ranks.world - 1};
  if (q.m == 0) return;
  // Parts of a tile follow each other where each is one block of 64 rows.
  const int64_t parts = parts_per_cta(tile);
  const int64_t box_rows = tile_shape(tile).bm == 64 * parts ? 64 * parts : 64;
  p.map_slots = addend_map(h.slots, kind, box_rows, q.m, h.row_stride, h.ranks.world, h.slot_stride);
  if (c.residual.data == nullptr) return;
  p.map_residual = addend_map(c.residual.data, kind, box_rows, q.m, h.row_stride, 1, h.row_stride * q.m);
  ++p.own_rows.addends;
}

void fill_epilogue(GemmParams& p, const GemmCall& c, TileId tile) {
  const Problem& q = c.problem;
  p.out_kind = c.out.kind;
  if (c.hooks != nullptr) p.hooks = *c.hooks;
  if (c.preact.data != nullptr) p.preact = output_of(c.preact, q);
  p.bias = c.bias.data;
  p.bias_kind = c.bias.kind;
  p.bias_batch_stride = c.bias.batch_stride * bytes_of(c.bias.kind);
  p.bias_stride = c.problem.n > 1 ? c.bias.col_stride * bytes_of(c.bias.kind) : 0;
  p.activation = c.activation;
  p.alpha = c.alpha;
  if (ranks_of(c.hooks).direction == Direction::kDeparture) return fill_departure(p, c, tile);
  p.out = output_of(c.out, q);
  p.reduce = c.accumulate && c.out.kind == ScalarKind::kFp32 && p.out.aligned;
  const auto add_late = [&](const Matrix& m) {
    if (p.num_late == 0)
      p.late_staged = p.preact.data == nullptr && bytes_of(m.kind) == 2 && output_of(m, q).aligned;
    p.late[p.num_late++] = addend_of(m, q);
  };
  if (c.residual.data != nullptr) add_late(c.residual);
  if (c.accumulate && !p.reduce) add_late(c.out);
  p.fast = p.out.aligned && p.preact.data == nullptr && p.num_late == (p.late_staged ? 1 : 0);
  p.plain = p.out.aligned && !p.gated && p.alpha == 1.0f && p.bias == nullptr && p.preact.data == nullptr &&
            p.activation == Activation::kNone && p.num_late == 0;
}

// How much all warps will say that they have stored of the tiles of each chunk.
void fill_doorbell_targets(GemmParams& p, const GemmPlan& plan) {
  DoorbellHook& h = p.hooks.doorbell;
  if (h.counters == nullptr) return;
  const TileShape tile = tile_shape(plan.tile);
  const int64_t columns = ceil_div(p.problem.n, p.gated ? tile.bn / 2 : tile.bn);
  // A CTA's warps count what they store in units: 64 rows, of all its warps, times 32 columns.
  const int64_t units = int64_t{4} * (tile.bm / 64) * (tile.bn / 32);
  int64_t begin = 0;
  for (int32_t c = 0; c < h.num_chunks; ++c) {
    const int64_t end = std::min<int64_t>(h.row_end[c], p.problem.m);
    // Rows of tiles begin anew with every chunk, or go through all of M.
    const int64_t first = plan.blocks.count > 0 ? begin : 0;
    const int64_t rows = end <= begin ? 0 : ceil_div(end - first, tile.bm) - (begin - first) / tile.bm;
    h.target[c] = static_cast<uint32_t>(rows * columns * units);
    begin = std::max(begin, end);
  }
}

// Workspace of a call: [ticket | flags | partials], only where tickets are drawn from it. The first two start
// at zero.
struct Workspace {
  static constexpr int64_t kLine = 256;
  int64_t flag_bytes = 0;
  int64_t bytes = 0;  // 0: none
};

Workspace workspace_of(const GemmPlan& plan, const GemmHooks* hooks) {
  const Schedule& s = plan.plan.schedule;
  const bool has_ticket = hooks != nullptr && hooks->departure.ticket != nullptr;
  if (s.num_slots == 0 && (s.turns <= 1 || has_ticket)) return {};
  constexpr int64_t kLine = Workspace::kLine;
  const TileShape tile = tile_shape(plan.tile);
  const int64_t parts = plan.cluster.size() * parts_per_cta(plan.tile);
  const int64_t flag_bytes = ceil_div(s.num_slots * parts * 4, kLine) * kLine;
  const int64_t slot_bytes = plan.cluster.size() * tile.bm * tile.bn * static_cast<int64_t>(sizeof(float));
  return {flag_bytes, kLine + flag_bytes + s.num_slots * slot_bytes + kLine};
}

void fill_workspace(GemmParams& p, const GemmPlan& plan, const Allocator& allocator, cudaStream_t stream) {
  constexpr int64_t kLine = Workspace::kLine;
  const auto [flag_bytes, bytes] = workspace_of(plan, &p.hooks);
  if (bytes == 0) {
    if (p.schedule.turns > 1) p.ticket = p.hooks.departure.ticket;
    return;
  }
  auto base = reinterpret_cast<uintptr_t>(allocator.allocate(allocator.context, bytes));
  if (base == 0) throw std::runtime_error(no_memory(bytes));
  base = (base + kLine - 1) / kLine * kLine;
  p.ticket = reinterpret_cast<uint32_t*>(base);
  p.flags = reinterpret_cast<uint32_t*>(base + kLine);
  p.partials = reinterpret_cast<float*>(base + kLine + flag_bytes);
  auto* words = reinterpret_cast<void*>(base);
  int count = static_cast<int>((kLine + flag_bytes) / 16);
  void* arguments[] = {&words, &count};
  const ClearLaunch launch(stream);
  check_cuda(cudaLaunchKernelExC(&launch.config, clear_function(), arguments),
             "The launch that clears flags");
}

// Others wait for rows of tiles, or tiles for rows.
bool serves_ranks(const GemmHooks* hooks) {
  return hooks != nullptr && (hooks->arrival.flags != nullptr || hooks->blocks.flags != nullptr ||
                              hooks->doorbell.counters != nullptr || hooks->departure.ranks.world > 0);
}

Product product_of(const GemmCall& c) {
  return c.scaled == nullptr ? Product::kHalf
         : c.scaled->blocks  ? Product::kBlocks
         : c.scaled->fast    ? Product::kFast
                             : Product::kPromoted;
}

// All that is decided before anything is launched. Loads the kernel, too.
struct Prepared {
  Operands operands;
  LaunchPlan plan;
  KernelInfo kernel;
  int64_t resident = 1;  // clusters that run at once
};

Prepared prepare(const GemmCall& call) {
  // A thread that has not called CUDA before has no context, which encoding a tensor map needs (autograd's
  // threads).
  check_cuda(cudaSetDevice(call.device), "cudaSetDevice");
  Prepared out;
  out.operands = read_operands(call);
  DeviceCache& cache = DeviceCache::instance();
  Residency residency = cache.residency(call.device);
  for (int t = 0; t < kNumAllTiles; ++t) {
    // A CTA of one_tile.cuh goes wherever there is room: it leaves nothing to others.
    const bool takes_all = is_one_tile(static_cast<TileId>(t));
    const bool is_all = call.multiprocessors >= residency.clusters[t][cluster_index({1, 1})];
    for (int i = 0; i < kNumClusterShapes; ++i) {
      int64_t& clusters = residency.clusters[t][i];
      clusters = std::min<int64_t>(
          clusters, takes_all && !is_all ? 0 : call.multiprocessors / kClusterShapes[i].size());
    }
  }
  const Demands demands{call.gate.data != nullptr,
                        call.gate.data != nullptr || call.bias.data != nullptr ||
                            call.residual.data != nullptr || call.preact.data != nullptr ||
                            call.activation != Activation::kNone ||
                            (call.accumulate && call.out.kind != ScalarKind::kFp32),
                        out.operands.a.major == Major::kOuter && out.operands.b.major == Major::kOuter,
                        call.groups != nullptr ? call.groups->count : 1,
                        product_of(call),
                        serves_ranks(call.hooks),
                        out.operands.a.major == Major::kOuter,
                        out.operands.b.major == Major::kOuter,
                        rounds_alone(call),
                        call.out.kind == ScalarKind::kFp32};
  out.plan = cache.plan(call, demands, residency);
  const GemmPlan& plan = out.plan.gemm;
  out.kernel = find_kernel(plan.tile, call.element, out.operands.a.major, out.operands.b.major);
  cache.prepare(call.device, out.kernel);
  out.resident =
      std::max<int64_t>(1, residency.clusters[static_cast<int>(plan.tile)][cluster_index(plan.cluster)]);
  return out;
}

void launch(const GemmCall& call, cudaStream_t stream, const Allocator& allocator) {
  const Prepared prepared = prepare(call);
  const GemmPlan& plan = prepared.plan.gemm;
  if (is_one_tile(plan.tile)) {
    return launch_one_tile(call, prepared.operands, plan, prepared.kernel, prepared.resident, stream);
  }
  GemmParams p;
  p.problem = whole_problem(call);
  p.gated = call.gate.data != nullptr;
  p.cluster_m = plan.cluster.m;
  p.cluster_n = plan.cluster.n;
  p.schedule = plan.plan.schedule;
  p.blocks = plan.blocks;
  p.shares = prepared.plan.shares;
  p.opening = prepared.plan.opening;
  p.order = plan.plan.order;
  p.timeout_ns = call.timeout_ns;
  p.fault = DeviceCache::instance().fault();
  if (call.scaled != nullptr) p.scaled = *call.scaled;
  fill_maps(p, call, prepared.operands, plan);
  fill_epilogue(p, call, plan.tile);
  fill_doorbell_targets(p, plan);
  fill_workspace(p, plan, allocator, stream);

  const auto clusters = static_cast<unsigned>(std::min<int64_t>(p.schedule.workers, prepared.resident));
  // Never all, where a cluster has more than one worker: it may not wait for what it has yet to do itself.
  p.clusters_started = p.schedule.workers > clusters ? ~0u : clusters;
  ClusterLaunch launch(dim3(clusters), plan.cluster, prepared.kernel, stream);
  launch.start_early();
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernelExC(&launch.config, prepared.kernel.function, arguments),
             "The launch of the Hopper Stream-K kernel");
}

void say(char* message, size_t bytes, const std::string& sentence) {
  std::snprintf(message, bytes, "%s", sentence.c_str());
}

// Runs `work`, and turns what it throws into an outcome and a sentence.
template <class Work>
GemmOutcome outcome_of(Work work, char* message, size_t message_bytes) {
  try {
    work();
    return GemmOutcome::kDone;
  } catch (const Refusal& refusal) {
    say(message, message_bytes, refusal.sentence);
    return GemmOutcome::kRefused;
  } catch (const std::exception& error) {
    std::string sentence = error.what();
    try {
      const std::string fault = fault_sentence(*DeviceCache::instance().fault());
      if (!fault.empty()) sentence = "an earlier launch was stopped: " + fault;
    } catch (const std::exception&) {
    }
    say(message, message_bytes, sentence);
    return GemmOutcome::kFailed;
  }
}

}  // namespace

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes) {
  return outcome_of([&] { launch(call, static_cast<cudaStream_t>(stream), allocator); }, message,
                    message_bytes);
}

GemmOutcome find_needs(const GemmCall& call, Needs* needs, char* message, size_t message_bytes) {
  return outcome_of(
      [&] {
        const GemmPlan& plan = prepare(call).plan.gemm;
        *needs = {tile_shape(plan.tile).bm, workspace_of(plan, call.hooks).bytes};
      },
      message, message_bytes);
}

}  // namespace tpk::sm90a

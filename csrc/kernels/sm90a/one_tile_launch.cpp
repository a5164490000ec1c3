#include "kernels/sm90a/one_tile_launch.hpp"

#include <bit>

#include "kernels/sm90a/device.hpp"
#include "kernels/sm90a/matrices.hpp"
#include "kernels/sm90a/one_tile_params.hpp"

namespace tpk::sm90a {
namespace {

int32_t log2_of(int32_t power) { return std::countr_zero(static_cast<uint32_t>(power)); }

void fill_shape(OneTileParams& p, const GemmPlan& plan, const OneTileMemory& memory) {
  const TileShape tile = tile_shape(plan.tile);
  const ClusterShape& cluster = plan.cluster;
  p.tile_rows = static_cast<int32_t>(tile.bm);
  p.cluster_m = cluster.m;
  p.cluster_n = cluster.n;
  p.cluster_k = cluster.k;
  p.log_m = log2_of(cluster.m);
  p.log_n = log2_of(cluster.n);
  p.log_k = log2_of(cluster.k);
  p.iterations = static_cast<int32_t>(iters_per_tile(p.problem, tile));
  p.part_a = static_cast<int32_t>(p.gated ? tile.bn / 2 : tile.bn) / cluster.m;
  p.part_b = p.tile_rows / cluster.n;
  p.stages = memory.stages;
  p.stage_bytes = memory.stage_bytes;
  p.meeting_bytes = memory.meeting_bytes;
  p.most_units = most_units(p.tile_rows / kUnit, cluster.k);
}

// The kernel's A is the product's B.
void fill_operands(OneTileParams& p, const GemmCall& c, const Operands& o, const GemmPlan& plan) {
  const TileShape tile = tile_shape(plan.tile);
  const auto weights = [&](const OperandView& v) {
    return operand_map(v, c.element, p.gated ? tile.bn / 2 : tile.bn, plan.cluster.m);
  };
  const auto maps = [&](const PairView& v) {
    return PairMaps{weights(v.b), operand_map(v.a, c.element, tile.bm, plan.cluster.n)};
  };
  p.pair_ends = pair_ends(c);
  p.pairs[0] = maps(o);
  for (int i = 0; i < c.num_more; ++i) p.pairs[i + 1] = maps(o.more[i]);
  if (p.gated) p.map_gate = weights(o.gate);
  p.batch_step_a = o.b.batch_step;
  p.batch_step_b = o.a.batch_step;
}

void fill_epilogue(OneTileParams& p, const GemmCall& c) {
  const Problem& q = c.problem;
  p.out_kind = c.out.kind;
  p.out = output_of(c.out, q);
  if (c.preact.data != nullptr) p.preact = output_of(c.preact, q);
  p.bias = c.bias.data;
  p.bias_kind = c.bias.kind;
  p.bias_batch_stride = c.bias.batch_stride * bytes_of(c.bias.kind);
  p.bias_stride = q.n > 1 ? c.bias.col_stride * bytes_of(c.bias.kind) : 0;
  p.activation = c.activation;
  p.alpha = static_cast<float>(c.alpha);
  p.reduce = c.accumulate && c.out.kind == ScalarKind::kFp32 && p.out.aligned;
  const auto add_late = [&](const Matrix& m) {
    if (bytes_of(m.kind) == 2 && output_of(m, q).aligned) p.late_whole |= 1u << p.num_late;
    p.late[p.num_late++] = addend_of(m, q);
  };
  if (c.residual.data != nullptr) add_late(c.residual);
  if (c.accumulate && !p.reduce) add_late(c.out);
  p.plain = p.out.aligned && bytes_of(c.out.kind) == 2 && !p.gated && p.alpha == 1.0f && p.bias == nullptr &&
            p.preact.data == nullptr && p.activation == Activation::kNone && p.num_late == 0;
}

}  // namespace

void launch_one_tile(const GemmCall& call, const Operands& operands, const GemmPlan& plan,
                     const KernelInfo& kernel, int64_t clusters, cudaStream_t stream) {
  OneTileParams p;
  p.problem = whole_problem(call);
  p.gated = call.gate.data != nullptr;
  const bool crowded = plan.plan.order.size() > clusters;
  const OneTileMemory memory =
      one_tile_memory(plan.tile, plan.cluster, iters_per_tile(p.problem, plan.plan.tile),
                      operands.a.major == Major::kOuter, crowded);
  fill_shape(p, plan, memory);
  fill_operands(p, call, operands, plan);
  fill_epilogue(p, call);
  const TileOrder& order = plan.plan.order;
  if (order.size() == 0) return;
  KernelInfo fitted = kernel;
  fitted.shared_bytes = static_cast<size_t>(memory.total());
  const dim3 grid(static_cast<unsigned>(order.tiles_m), static_cast<unsigned>(order.tiles_n),
                  static_cast<unsigned>(order.batch));
  ClusterLaunch launch(grid, plan.cluster, fitted, stream);
  launch.start_early();
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernelExC(&launch.config, fitted.function, arguments),
             "The launch of the Hopper kernel of swapped tiles");
}

}  // namespace tpk::sm90a

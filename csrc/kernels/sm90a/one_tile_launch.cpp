#include "kernels/sm90a/one_tile_launch.hpp"

#include <algorithm>
#include <bit>

#include "kernels/sm90a/device.hpp"
#include "kernels/sm90a/matrices.hpp"
#include "kernels/sm90a/one_tile_params.hpp"

namespace tpk::sm90a {
namespace {

int32_t log_of(int32_t power) { return std::countr_zero(static_cast<uint32_t>(power)); }

void fill_shape(OneTileParams& p, const GemmPlan& plan, const OneTileMemory& memory) {
  const OneTileShape tile = one_tile_shape(plan.tile);
  const Sharers sharers = sharers_of(plan.tile, plan.cluster);
  p.swapped = tile.swapped;
  p.columns = tile.columns;
  p.share_rows = sharers.rows;
  p.share_columns = sharers.columns;
  p.depth = sharers.depth;
  p.log_rows = log_of(sharers.rows);
  p.log_columns = log_of(sharers.columns);
  p.log_depth = log_of(sharers.depth);
  p.iterations = static_cast<int32_t>(iters_per_tile(p.problem, tile_shape(plan.tile)));
  p.part_a = (p.gated ? tile.rows / 2 : tile.rows) / sharers.rows;
  p.part_b = tile.columns / sharers.columns;
  p.stages = memory.stages;
  p.stage_bytes = memory.stage_bytes;
  p.meeting_bytes = memory.meeting_bytes;
  p.most_units = most_units(tile.columns / kUnit, sharers.depth);
}

// Swapped, the kernel's rows are columns of the product, hence of its B.
void fill_operands(OneTileParams& p, const GemmCall& c, const Operands& o, const GemmPlan& plan) {
  const OneTileShape tile = one_tile_shape(plan.tile);
  const auto rows = [&](const OperandView& v) {
    return operand_map(v, c.element, p.gated ? tile.rows / 2 : tile.rows, p.share_rows);
  };
  const auto maps = [&](const PairView& v) {
    return PairMaps{rows(tile.swapped ? v.b : v.a),
                    operand_map(tile.swapped ? v.a : v.b, c.element, tile.columns, p.share_columns)};
  };
  p.pair_ends = pair_ends(c);
  p.pairs[0] = maps(o);
  for (int i = 0; i < c.num_more; ++i) p.pairs[i + 1] = maps(o.more[i]);
  if (p.gated) p.map_gate = rows(o.gate);
  p.batch_step_a = (tile.swapped ? o.b : o.a).batch_step;
  p.batch_step_b = (tile.swapped ? o.a : o.b).batch_step;
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
  p.plain = rounds_alone(c);
  p.scales = p.alpha != 1.0f || p.bias != nullptr;
}

// Read two elements at a time.
bool is_paired(const Matrix& bias) {
  return bytes_of(bias.kind) == 2 && bias.col_stride == 1 && bias.batch_stride % 2 == 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % 4 == 0;
}

}  // namespace

bool rounds_alone(const GemmCall& c) {
  return bytes_of(c.out.kind) == 2 && output_of(c.out, c.problem).aligned && c.gate.data == nullptr &&
         c.preact.data == nullptr && c.residual.data == nullptr && !c.accumulate &&
         c.activation == Activation::kNone && (c.bias.data == nullptr || is_paired(c.bias));
}

void launch_one_tile(const GemmCall& call, const Operands& operands, const GemmPlan& plan,
                     const KernelInfo& kernel, int64_t clusters, cudaStream_t stream) {
  OneTileParams p;
  p.problem = whole_problem(call);
  p.gated = call.gate.data != nullptr;
  const OperandView& columns = is_swapped(plan.tile) ? operands.a : operands.b;
  const TileOrder& order = plan.plan.order;
  if (order.size() == 0) return;
  fill_epilogue(p, call);
  const Turns turns = turns_of(plan.tile, plan.cluster, order.size(), clusters, p.plain);
  const OneTileMemory memory =
      one_tile_memory(plan.tile, plan.cluster, iters_per_tile(p.problem, plan.plan.tile),
                      columns.major == Major::kOuter, turns);
  fill_shape(p, plan, memory);
  fill_operands(p, call, operands, plan);
  p.walks = turns == Turns::kWalk;
  p.tiles_n = static_cast<int32_t>(order.tiles_n);
  p.tiles_m = static_cast<int32_t>(order.tiles_m);
  p.num_tiles = static_cast<int32_t>(order.size());
  KernelInfo fitted = kernel;
  fitted.shared_bytes = static_cast<size_t>(memory.total());
  const dim3 grid = p.walks ? dim3(static_cast<unsigned>(std::min(clusters, order.size())))
                            : dim3(static_cast<unsigned>(order.tiles_n), static_cast<unsigned>(order.tiles_m),
                                   static_cast<unsigned>(order.batch));
  ClusterLaunch launch(grid, plan.cluster, fitted, stream);
  launch.start_early();
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernelExC(&launch.config, fitted.function, arguments),
             "The launch of the Hopper kernel of whole tiles");
}

}  // namespace tpk::sm90a

// From a GemmCall to launches: operands, plan, workspace. No host synchronisation, nothing kept between calls
// but facts and plans, so that it can be captured into CUDA graphs and used on several streams and devices at
// once.
#include "kernels/sm80/entry.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "kernels/sm80/device.hpp"
#include "kernels/sm80/find_kernel.hpp"
#include "kernels/sm80/operands.hpp"
#include "kernels/sm80/params.hpp"

namespace tpk::sm80 {
namespace {

constexpr int64_t kLine = 256;  // what arrays of the workspace are aligned to; the ticket has one of its own

constexpr int64_t aligned(int64_t bytes) { return ceil_div(bytes, kLine) * kLine; }

// One launch, complete but for its epilogue and its workspace.
struct Launch {
  GemmParams params;
  KernelInfo kernel{};
  unsigned grid = 1;
  int64_t zeroed_bytes = 0;  // of the workspace: [ticket | flags | partials], the first two start at zero
  int64_t workspace_bytes = 0;
};

// The product of a and b, which may be the call's gate.
Launch prepare(const GemmCall& c, const Matrix& b) {
  Launch launch;
  GemmParams& p = launch.params;
  p.problem = c.problem;
  p.timeout_ns = c.timeout_ns;
  p.alpha = c.alpha;
  const auto [operand_a, layout_a] = read_left(c.a, c.problem);
  const auto [operand_b, layout_b] = read_right(b, c.problem);
  p.a = operand_a;
  p.b = operand_b;

  DeviceCache& cache = DeviceCache::instance();
  const auto kernel_for = [&, a_is = layout_a, b_is = layout_b](TileId tile) {
    return find_kernel(c.element, a_is, b_is, tile);
  };
  const Residency residency{cache.resident(c.device, kernel_for(TileId::k128x128)),
                            cache.resident(c.device, kernel_for(TileId::k64x64))};
  const GemmPlan plan = cache.plan(c, cache.facts(c.device).major, residency);
  p.schedule = plan.plan.schedule;
  p.order = plan.plan.order;
  launch.kernel = kernel_for(plan.tile);
  launch.grid = static_cast<unsigned>(min64(p.schedule.workers, c.multiprocessors * residency.of(plan.tile)));

  const TileShape& tile = plan.plan.tile;
  const int64_t slots = p.schedule.num_slots;
  launch.zeroed_bytes = kLine + aligned(slots * static_cast<int64_t>(sizeof(uint32_t)));
  launch.workspace_bytes =
      launch.zeroed_bytes + slots * tile.bm * tile.bn * static_cast<int64_t>(sizeof(float));
  return launch;
}

void fill_epilogue(GemmParams& p, const GemmCall& c) {
  p.out = read_output(c.out, c.problem);
  p.out_kind = c.out.kind;
  p.preact = read_output(c.preact, c.problem);
  p.residual = read_output(c.residual, c.problem);
  p.residual_kind = c.residual.kind;
  p.bias = c.bias.data;
  p.bias_stride = c.problem.n > 1 ? c.bias.col_stride * bytes_of(c.bias.kind) : 0;
  p.bias_kind = c.bias.kind;
  p.activation = c.activation;
  p.accumulate = c.accumulate;
}

void start(Launch& launch, char* workspace, cudaStream_t stream) {
  GemmParams& p = launch.params;
  p.ticket = reinterpret_cast<uint32_t*>(workspace);
  p.flags = reinterpret_cast<uint32_t*>(workspace + kLine);
  p.partials = reinterpret_cast<float*>(workspace + launch.zeroed_bytes);
  check_cuda(cudaMemsetAsync(workspace, 0, static_cast<size_t>(launch.zeroed_bytes), stream),
             "cudaMemsetAsync");
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernel(launch.kernel.function, dim3(launch.grid),
                              dim3(static_cast<unsigned>(launch.kernel.threads)), arguments,
                              launch.kernel.shared_bytes, stream),
             "The launch of the portable Stream-K kernel");
}

char* allocate(const Allocator& allocator, int64_t bytes) {
  const auto base = reinterpret_cast<uintptr_t>(allocator.allocate(allocator.context, bytes + kLine));
  if (base == 0) {
    throw std::runtime_error("there is no memory for a workspace of " + std::to_string(bytes) +
                             " bytes: free some, or take fewer splits or schedule 'data_parallel'.");
  }
  return reinterpret_cast<char*>((base + kLine - 1) / kLine * kLine);
}

// alpha * (A * gate) in fp32, for the epilogue of the product that it is multiplied by. Rows are padded, so
// that they are read and written in vectors whatever N is.
Matrix scratch_of(const Problem& p) {
  Matrix m;
  m.kind = ScalarKind::kFp32;
  m.col_stride = 1;
  m.row_stride = ceil_div(p.n, 4) * 4;
  m.batch_stride = p.m * m.row_stride;
  return m;
}

void run(const GemmCall& c, cudaStream_t stream, const Allocator& allocator) {
  if (c.problem.k > int64_t{1} << 35) {
    throw std::runtime_error("K must not exceed 2^35, but it is " + std::to_string(c.problem.k) + ".");
  }
  Launch product = prepare(c, c.b);
  fill_epilogue(product.params, c);
  if (c.gate.data == nullptr) {
    start(product, allocate(allocator, product.workspace_bytes), stream);
    return;
  }
  // Two launches, one after the other on the stream: they share the workspace.
  Launch gate = prepare(c, c.gate);
  Matrix scratch = scratch_of(c.problem);
  const int64_t scratch_at = aligned(std::max(product.workspace_bytes, gate.workspace_bytes));
  const int64_t scratch_bytes = c.problem.batch * scratch.batch_stride * bytes_of(scratch.kind);
  char* workspace = allocate(allocator, scratch_at + scratch_bytes);
  scratch.data = workspace + scratch_at;
  gate.params.out = product.params.mul = read_output(scratch, c.problem);
  gate.params.out_kind = scratch.kind;
  start(gate, workspace, stream);
  start(product, workspace, stream);
}

}  // namespace

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes) {
  if (call.hooks != nullptr || call.num_more > 0) {
    std::snprintf(message, message_bytes,
                  "the portable kernel has no hooks for communication, and sums no products.");
    return GemmOutcome::kRefused;
  }
  try {
    run(call, static_cast<cudaStream_t>(stream), allocator);
    return GemmOutcome::kDone;
  } catch (const std::exception& error) {
    std::snprintf(message, message_bytes, "%s", error.what());
    return GemmOutcome::kFailed;
  }
}

}  // namespace tpk::sm80

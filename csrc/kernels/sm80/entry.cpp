// From a GemmCall to launches: operands, plan, workspace. No host synchronisation, nothing kept between calls
// but facts and plans, so that it can be captured into CUDA graphs and used on several streams and devices at
// once.
#include "kernels/sm80/entry.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>

#include "kernels/sm80/device.hpp"
#include "kernels/sm80/find_kernel.hpp"
#include "kernels/sm80/operands.hpp"
#include "kernels/sm80/params.hpp"

namespace tpk::sm80 {
namespace {

constexpr int64_t kLine = 256;  // what arrays of the workspace are aligned to

constexpr int64_t aligned(int64_t bytes) { return ceil_div(bytes, kLine) * kLine; }

// One launch, complete but for its epilogue and its workspace.
struct Launch {
  GemmParams params;
  KernelInfo kernel{};
  unsigned grid = 1;
  bool starts_early = false;
  int64_t flag_bytes = 0;       // of the workspace: [flags | partials]
  int64_t workspace_bytes = 0;  // 0: it needs none
};

// The product of a and b, which may be the call's gate.
Launch prepare(const GemmCall& c, const Matrix& b) {
  Launch launch;
  GemmParams& p = launch.params;
  p.problem = c.problem;
  p.timeout_ns = c.timeout_ns;
  p.alpha = c.alpha;
  p.sum_kind = c.element == Element::kFp64 ? ScalarKind::kFp64 : ScalarKind::kFp32;
  const auto [operand_a, layout_a] = read_left(c.a, c.element, c.problem);
  const auto [operand_b, layout_b] = read_right(b, c.element, c.problem);
  p.a = operand_a;
  p.b = operand_b;

  DeviceCache& cache = DeviceCache::instance();
  const auto kernel_for = [&, a_is = layout_a, b_is = layout_b](int tile) {
    return find_kernel(c.element, a_is, b_is, tile);
  };
  Residency residency;
  const auto num_tiles = static_cast<int>(tile_shapes(c.element).size());
  for (int i = 0; i < num_tiles; ++i) residency.of_tile[i] = cache.resident(c.device, kernel_for(i));
  const DeviceFacts facts = cache.facts(c.device);
  const LaunchPlan plan = cache.plan(c, facts.major, residency);
  p.walk = plan.walk;
  launch.kernel = kernel_for(plan.tile);
  launch.grid = static_cast<unsigned>(plan.walk.workers);
  launch.starts_early = facts.major >= 9;

  if (plan.slots == 0) return launch;  // whole tiles: nobody waits for anybody
  const int64_t sum_bytes = c.element == Element::kFp64 ? 8 : 4;
  launch.flag_bytes = aligned(plan.slots * static_cast<int64_t>(sizeof(uint64_t)));
  launch.workspace_bytes = launch.flag_bytes + plan.slots * plan.shape.bm * plan.shape.bn * sum_bytes;
  return launch;
}

void fill_epilogue(GemmParams& p, const GemmCall& c) {
  p.out = read_output(c.out, c.element, c.problem);
  p.out_kind = c.out.kind;
  p.preact = read_output(c.preact, c.element, c.problem);
  p.residual = read_output(c.residual, c.element, c.problem);
  p.residual_kind = c.residual.kind;
  p.bias = c.bias.data;
  p.bias_stride = c.problem.n > 1 ? c.bias.col_stride * bytes_of(c.bias.kind) : 0;
  p.bias_kind = c.bias.kind;
  p.activation = c.activation;
  p.accumulate = c.accumulate;
}

// One kernel on the stream. Early: while what comes before it still runs; the kernel waits for that itself.
void launch_kernel(const KernelInfo& kernel, unsigned grid, void** arguments, bool early, cudaStream_t stream,
                   const char* what) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check_cuda(cudaLaunchKernelExC(&config, kernel.function, arguments), what);
}

// Never the same twice in a process, nor what memory of any other origin holds (see fixup.cuh): a count from
// a random number on, by the one-to-one mixing of splitmix64 (Steele, Lea, Flood 2014).
uint64_t next_mark() {
  static std::atomic<uint64_t> count{[] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }()};
  uint64_t x = count.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x != 0 ? x : next_mark();  // flags that were taken down are 0
}

void start(Launch& launch, char* workspace, cudaStream_t stream) {
  GemmParams& p = launch.params;
  p.only_adds = adds_only(p);
  p.plain = is_plain(p);
  if (launch.workspace_bytes > 0) {
    p.flags = reinterpret_cast<uint64_t*>(workspace);
    p.partials = workspace + launch.flag_bytes;
    p.mark = next_mark();
  }
  void* arguments[] = {&p};
  launch_kernel(launch.kernel, launch.grid, arguments, launch.starts_early, stream,
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

// alpha * (A * gate) in the type of the sums, for the epilogue of the product that it is multiplied by. Rows
// are padded, so that they are read and written in vectors whatever N is.
Matrix scratch_of(const Problem& p, Element e) {
  Matrix m;
  m.kind = e == Element::kFp64 ? ScalarKind::kFp64 : ScalarKind::kFp32;
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
    const int64_t bytes = product.workspace_bytes;
    start(product, bytes > 0 ? allocate(allocator, bytes) : nullptr, stream);
    return;
  }
  // Two launches, one after the other on the stream: they share the workspace.
  Launch gate = prepare(c, c.gate);
  Matrix scratch = scratch_of(c.problem, c.element);
  const int64_t scratch_at = aligned(std::max(product.workspace_bytes, gate.workspace_bytes));
  const int64_t scratch_bytes = c.problem.batch * scratch.batch_stride * bytes_of(scratch.kind);
  char* workspace = allocate(allocator, scratch_at + scratch_bytes);
  scratch.data = workspace + scratch_at;
  gate.params.out = product.params.mul = read_output(scratch, c.element, c.problem);
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

// torch.ops.tpkernels.fused_gather_begin and fused_gather_end: a gather beneath what is called between them.
// Its rows travel by the copy engine, so that they need no multiprocessor: a gradient's second gather under a
// product that is reduced and scattered. Words and rows are those of fused_all_gather_matmul.
#include <torch/csrc/stable/library.h>

#include "ops/gather_pushes.hpp"

namespace {

using namespace tpk::ops;

constexpr const char* kBegin = "tpkernels::fused_gather_begin";
constexpr const char* kEnd = "tpkernels::fused_gather_end";

void fused_gather_begin(const Tensor& a_shard, const std::vector<int64_t>& shard_rows, int64_t rank,
                        const std::vector<int64_t>& addresses, double timeout_s) {
  TPK_REQUIRE(a_shard.is_cuda() && a_shard.dim() == 2, kBegin, ": a_shard must be a CUDA tensor [rows, K].");
  const auto device = a_shard.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kBegin, shard_rows, rank, addresses, timeout_s, device);
  const GatherPushes pushes(kBegin, a_shard, g, shard_rows);
  launch_sync(kBegin, tpk::sm90a::enter_function(), g);
  CopyEngine::Call engine(CopyEngine::of(device, CopyEngine::Purpose::kBeneath), g.stream);
  pushes.enqueue(engine);
  engine.leave_open();
}

// Also where what came between has failed: nothing is left open.
void fused_gather_end(const Tensor& a_shard, const std::vector<int64_t>& shard_rows, int64_t rank,
                      const std::vector<int64_t>& addresses, double timeout_s) {
  TPK_REQUIRE(a_shard.is_cuda() && a_shard.dim() == 2, kEnd, ": a_shard must be a CUDA tensor [rows, K].");
  const auto device = a_shard.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kEnd, shard_rows, rank, addresses, timeout_s, device);
  CopyEngine::of(device, CopyEngine::Purpose::kBeneath).join(g.stream);
  const GatherPushes pushes(kEnd, a_shard, g, shard_rows);
  pushes.copy_own(kEnd, pushes.buffer(g.rank()).from(g.rows.begin(g.rank())), 0, g.rows_of(g.rank()));
  tpk::sm90a::CollectParams here{pushes.chunks()};
  here.gathered = true;
  launch_sync(kEnd, tpk::sm90a::collect_function(), g, &here, 1, tpk::sm90a::kCollectThreads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_gather_begin", TORCH_BOX(&fused_gather_begin));
  m.impl("fused_gather_end", TORCH_BOX(&fused_gather_end));
}

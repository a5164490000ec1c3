// What the fused ops share: the ranks of a call, the kernels at its ends, checks.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/copy_engine.hpp"
#include "host/pushes.hpp"
#include "kernels/sm90a/device.hpp"
#include "kernels/sm90a/sync.hpp"
#include "ops/hopper_call.hpp"

namespace tpk::ops {

using comm::CopyEngine;
using comm::Rows;
using protocol::Page;
using sm90a::SyncParams;
using torch::stable::accelerator::DeviceGuard;

inline int64_t round_up(int64_t x, int64_t unit) { return ceil_div(x, unit) * unit; }

struct Group {
  RankRows rows;
  SyncParams sync;
  cudaStream_t stream = nullptr;

  int rank() const { return rows.rank; }
  int world() const { return rows.world; }
  int64_t rows_of(int r) const { return rows.row_end[r] - rows.begin(r); }
  int64_t total() const { return rows.row_end[rows.world - 1]; }
  const Page& page(int r) const { return sync.pages[r]; }
  const Page& mine() const { return page(rank()); }
};

inline Group group_of(const char* op, const std::vector<int64_t>& shard_rows, int64_t rank,
                      const std::vector<int64_t>& addresses, double timeout_s, int device) {
  const auto world = static_cast<int64_t>(shard_rows.size());
  TPK_REQUIRE(world >= 2 && world <= protocol::kMaxRanks, op, ": shard_rows must name 2 to ",
              protocol::kMaxRanks, " ranks, but it names ", world, ".");
  TPK_REQUIRE(rank >= 0 && rank < world, op, ": rank must lie in [0, ", world, "), but it is ", rank, ".");
  TPK_REQUIRE(addresses.size() == shard_rows.size(), op,
              ": addresses must name as many ranks as shard_rows, ", world, ", but it names ",
              addresses.size(), ".");
  Group g;
  g.rows.world = static_cast<int32_t>(world);
  g.rows.rank = static_cast<int32_t>(rank);
  int64_t end = 0;
  for (int64_t r = 0; r < world; ++r) {
    TPK_REQUIRE(shard_rows[r] >= 0 && shard_rows[r] < (int64_t{1} << 31) - 2048 - end, op,
                ": shard_rows must not be negative and add up to less than 2^31 - 2048, but entry ", r,
                " is ", shard_rows[r], ".");
    TPK_REQUIRE(addresses[r] != 0 && addresses[r] % 16 == 0, op, ": addresses must be those of symmetric ",
                "memory, but entry ", r, " is ", addresses[r], ".");
    g.rows.row_end[r] = static_cast<int32_t>(end += shard_rows[r]);
    g.sync.pages[r] = Page::at(static_cast<uint64_t>(addresses[r]));
  }
  TPK_REQUIRE(end > 0, op, ": shard_rows must have rows, but all are 0: there is nothing to launch.");
  g.sync.world = g.rows.world;
  g.sync.rank = g.rows.rank;
  g.sync.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  g.sync.fault = sm90a::DeviceCache::instance().fault();
  g.stream = current_stream(op, device);
  return g;
}

// more: an argument behind SyncParams, or nothing.
inline void launch_sync(const char* op, const void* function, const Group& g, void* more = nullptr,
                        int ctas = 1, int threads = sm90a::kSyncThreads) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.stream = g.stream;
  SyncParams params = g.sync;
  void* arguments[] = {&params, more};
  const cudaError_t error = cudaLaunchKernelExC(&config, function, arguments);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string fault = sm90a::fault_sentence(*params.fault);
  TPK_REQUIRE(false, op, ": ",
              fault.empty() ? std::string("the launch failed: ") + cudaGetErrorString(error) + "."
                            : "an earlier launch was stopped: " + fault);
}

inline void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols) {
  TPK_REQUIRE(t.is_cuda() && t.dim() == 2 && t.size(0) == rows && t.size(1) == cols, op, ": ", name,
              " must be a CUDA tensor [", rows, ", ", cols, "], but it is ",
              t.is_cuda() ? "" : "on the CPU, ",
              t.dim() == 2 ? sentence("[", t.size(0), ", ", t.size(1), "].")
                           : sentence("of ", t.dim(), " dimensions."));
}

inline void set_plan(GemmCall& c, const std::string& schedule, const std::string& tile,
                     int64_t multiprocessors, const Group& g, int device) {
  c.schedule = schedule;
  c.tile = tile;
  c.timeout_ns = g.sync.timeout_ns;
  set_device(c, device, multiprocessors);
  // Its kernels run beside the product.
  if (const comm::Transport* other = comm::transport(); other != nullptr && multiprocessors == 0) {
    c.multiprocessors = std::max(1, c.multiprocessors - other->multiprocessors);
  }
}

}  // namespace tpk::ops

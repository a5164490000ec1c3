// What the launcher remembers of devices, kernels and plans, for the life of the process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/gemm_call.hpp"
#include "kernels/sm90a/clear.hpp"
#include "kernels/sm90a/fault.hpp"
#include "kernels/sm90a/find_kernel.hpp"
#include "kernels/sm90a/pairs.hpp"
#include "kernels/sm90a/plan.hpp"
#include "kernels/sm90a/work.hpp"

namespace tpk::sm90a {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next launch check would report it against an innocent op
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorString(error) + ".");
}

// A launch of clusters. The attributes lie beside the configuration that points to them.
struct ClusterLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  // clusters: the grid, in clusters, which lie along x.
  ClusterLaunch(dim3 clusters, ClusterShape shape, const KernelInfo& kernel, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(shape.size());
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    config.gridDim = dim3(clusters.x * static_cast<unsigned>(shape.size()), clusters.y, clusters.z);
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 1;
  }
  // May start before the kernels that it depends on have ended; it then waits for them itself.
  void start_early() {
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 2;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

// The launch of clear.cu's kernel, early.
struct ClearLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  explicit ClearLaunch(cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(1);
    config.blockDim = dim3(kClearThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClearLaunch(const ClearLaunch&) = delete;
  ClearLaunch& operator=(const ClearLaunch&) = delete;
};

// A plan, and what the launcher derives from it.
struct LaunchPlan {
  GemmPlan gemm;
  int32_t shares = 0;
  Opening opening;
};

class DeviceCache {
 public:
  static DeviceCache& instance() {
    static DeviceCache cache;
    return cache;
  }

  // Raises the kernel's shared-memory limit, which CUDA keeps per device, on first use. device is current.
  void prepare(int device, const KernelInfo& kernel) {
    const std::lock_guard lock(mutex_);
    if (!prepared_.insert({device, kernel.function}).second) return;
    try {
      check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(kernel.shared_bytes)),
                 "cudaFuncSetAttribute");
    } catch (...) {
      prepared_.erase({device, kernel.function});
      throw;
    }
  }

  // Clusters that the whole device holds at once. device is current.
  Residency residency(int device) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = residency_.find(device);
      if (found != residency_.end()) return found->second;
    }
    Residency r;
    std::map<std::pair<const void*, int32_t>, int> counts;  // by kernel and size of cluster
    for (int t = 0; t < kNumAllTiles; ++t) {
      const KernelInfo kernel = find_kernel(static_cast<TileId>(t), Element::kBf16, Major::kK, Major::kK);
      prepare(device, kernel);
      for (int c = 0; c < kNumClusterShapes; ++c) {
        if (!takes_cluster(static_cast<TileId>(t), kClusterShapes[c])) continue;
        const auto [count, is_new] = counts.insert({{kernel.function, kClusterShapes[c].size()}, 0});
        if (is_new) {
          const ClusterLaunch launch(dim3(1), kClusterShapes[c], kernel, nullptr);
          check_cuda(cudaOccupancyMaxActiveClusters(&count->second, kernel.function, &launch.config),
                     "cudaOccupancyMaxActiveClusters");
        }
        r.clusters[t][c] = count->second;
      }
    }
    const std::lock_guard lock(mutex_);
    return residency_[device] = r;
  }

  LaunchPlan plan(const GemmCall& call, const Demands& demands, const Residency& r) {
    Problem p = whole_problem(call);
    if (call.groups != nullptr) p.m = call.groups->num_rows();
    const Ranks ranks = ranks_of(call.hooks);
    Key key{p.batch,
            p.m,
            p.n,
            p.k,
            call.device,
            call.multiprocessors,
            call.workers,
            call.splits,
            demands,
            ranks.key() + (call.groups != nullptr ? call.groups->key() : ""),
            std::string(call.schedule),
            std::string(call.tile),
            &hopper_cost.get()};
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    if (plans_.size() >= kMaxPlans) plans_.clear();
    LaunchPlan made;
    made.gemm =
        plan_gemm(p, call.schedule, call.workers, call.splits, call.tile, demands, r, ranks, call.groups);
    const Plan& plan = made.gemm.plan;
    // A share may have rows that wait for other ranks; one finisher of a tile does so alone.
    made.shares =
        ranks.direction == Direction::kDeparture ? 0 : static_cast<int32_t>(divided_shares(plan.schedule));
    made.opening = open_schedule(plan.schedule, plan.order, made.shares);
    return plans_[std::move(key)] = made;
  }

  // Host memory that a kernel writes before it stops; one record for the process, which such a stop ends.
  FaultRecord* fault() {
    const std::lock_guard lock(mutex_);
    if (fault_ == nullptr) {
      // Allowed while a stream is being captured: it is no work of any stream.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
      void* memory = nullptr;
      const cudaError_t error =
          cudaHostAlloc(&memory, sizeof(FaultRecord), cudaHostAllocPortable | cudaHostAllocMapped);
      check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
      check_cuda(error, "cudaHostAlloc");
      fault_ = new (memory) FaultRecord;
    }
    return fault_;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, Demands, std::string,
                         std::string, std::string, const HopperCost*>;
  static constexpr size_t kMaxPlans = 1024;
  std::mutex mutex_;
  std::set<std::pair<int, const void*>> prepared_;
  std::map<int, Residency> residency_;
  std::map<Key, LaunchPlan> plans_;
  FaultRecord* fault_ = nullptr;
};

}  // namespace tpk::sm90a

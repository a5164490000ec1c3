// What the launcher remembers of devices, kernels and plans, for the life of the process. Facts do not
// change; plans cost up to milliseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/gemm_call.hpp"
#include "kernels/sm80/launch.hpp"
#include "kernels/sm80/plan.hpp"
#include "kernels/sm80/walk.hpp"

namespace tpk::sm80 {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next launch check would report it against an innocent op
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorString(error) + ".");
}

struct DeviceFacts {
  int multiprocessors = 0;
  int major = 0;
  int minor = 0;
  int64_t shared_bytes = 0;  // that a CTA may have
};

// What a launch needs of its plan.
struct LaunchPlan {
  Walk walk;
  int tile = 0;  // its place in tile_shapes(element)
  TileShape shape;
  int64_t slots = 0;
};

class DeviceCache {
 public:
  static DeviceCache& instance() {
    static DeviceCache cache;
    return cache;
  }

  DeviceFacts facts(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = devices_.find(device);
    if (found != devices_.end()) return found->second;
    DeviceFacts d;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      check_cuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
    };
    ask(&d.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(&d.major, cudaDevAttrComputeCapabilityMajor);
    ask(&d.minor, cudaDevAttrComputeCapabilityMinor);
    int shared_bytes = 0;
    ask(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    d.shared_bytes = shared_bytes;
    return devices_[device] = d;
  }

  // CTAs of the kernel that a multiprocessor of the current device holds; 0 if it has too little shared
  // memory. The first call also raises the kernel's shared-memory limit, which CUDA keeps per device.
  int resident(int device, const KernelInfo& kernel) {
    const int64_t available = facts(device).shared_bytes;
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(device, kernel.function);
    const auto found = resident_.find(key);
    if (found != resident_.end()) return found->second;
    int count = 0;
    if (static_cast<int64_t>(kernel.shared_bytes) <= available) {
      check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(kernel.shared_bytes)),
                 "cudaFuncSetAttribute");
      check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 "cudaFuncSetAttribute");
      check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, kernel.threads,
                                                               kernel.shared_bytes),
                 "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    }
    return resident_[key] = count;
  }

  // Throws std::invalid_argument with a sentence where the call asks for what there is not.
  LaunchPlan plan(const GemmCall& c, int major, const Residency& r) {
    const Problem& p = c.problem;
    const auto key =
        std::make_tuple(p.batch, p.m, p.n, p.k, c.element, c.multiprocessors, major, r.of_tile, c.workers,
                        c.splits, &cost_in_use(generation_of(major)).get(), c.schedule, c.tile);
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    if (plans_.size() >= kMostPlans) plans_.clear();
    const GemmPlan found_plan = plan_gemm(p, c.element, generation_of(major), c.multiprocessors, c.schedule,
                                          c.workers, c.splits, c.tile, r);
    const Plan& plan = found_plan.plan;
    const LaunchPlan launch{make_walk(plan.schedule, plan.order), found_plan.tile, plan.tile,
                            plan.schedule.num_slots};
    return plans_.emplace(key, launch).first->second;
  }

 private:
  // Looked up by views of the strings, without a copy: std::less<> compares the two.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, Element, int, int, Residency::OfTiles, int64_t,
                         int64_t, const PortableCost*, std::string, std::string>;
  static constexpr size_t kMostPlans = 4096;
  std::mutex mutex_;
  std::map<int, DeviceFacts> devices_;
  std::map<std::pair<int, const void*>, int> resident_;
  std::map<Key, LaunchPlan, std::less<>> plans_;
};

}  // namespace tpk::sm80

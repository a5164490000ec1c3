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
    return devices_[device] = d;
  }

  // CTAs of the kernel that a multiprocessor of the current device holds. The first call also raises the
  // kernel's shared-memory limit, which CUDA keeps per device.
  int resident(int device, const KernelInfo& kernel) {
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(device, kernel.function);
    const auto found = resident_.find(key);
    if (found != resident_.end()) return found->second;
    check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kernel.shared_bytes)),
               "cudaFuncSetAttribute");
    check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "cudaFuncSetAttribute");
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, kernel.threads,
                                                             kernel.shared_bytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    if (count == 0) {
      throw std::runtime_error("the kernel needs " + std::to_string(kernel.shared_bytes) +
                               " bytes of shared memory, which cuda:" + std::to_string(device) +
                               " does not have: use path 'cublas'.");
    }
    return resident_[key] = count;
  }

  // Throws std::invalid_argument with a sentence where the call asks for what there is not.
  GemmPlan plan(const GemmCall& c, int major, const Residency& r) {
    const Problem& p = c.problem;
    const auto key = std::make_tuple(p.batch, p.m, p.n, p.k, c.multiprocessors, major, r.k128x128, r.k64x64,
                                     c.workers, c.splits, c.schedule, c.tile);
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    if (plans_.size() >= kMostPlans) plans_.clear();
    const CostConstants& cost = major >= 9 ? kCostSm90 : kCostSm80;
    const GemmPlan plan = plan_gemm(p, c.multiprocessors, cost, c.schedule, c.workers, c.splits, c.tile, r);
    return plans_.emplace(key, plan).first->second;
  }

 private:
  // Looked up by views of the strings, without a copy: std::less<> compares the two.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, int64_t, int64_t,
                         std::string, std::string>;
  static constexpr size_t kMostPlans = 4096;
  std::mutex mutex_;
  std::map<int, DeviceFacts> devices_;
  std::map<std::pair<int, const void*>, int> resident_;
  std::map<Key, GemmPlan, std::less<>> plans_;
};

}  // namespace tpk::sm80

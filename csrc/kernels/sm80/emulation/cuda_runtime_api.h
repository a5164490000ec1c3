// Enough of the CUDA runtime for the portable kernel's launcher to run on the CPU: one device with three
// multiprocessors, each holding two CTAs; a launch runs at once.
#pragma once

#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

#include "kernels/sm80/emulation/cuda.hpp"

enum cudaError_t { cudaSuccess = 0, cudaErrorUnknown = 999 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
using cudaStream_t = void*;
struct dim3 {
  unsigned x, y = 1, z = 1;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace tpk::emulation {

constexpr int kMultiprocessors = 3;
constexpr int kResident = 2;
constexpr int kSharedBytes = 160 * 1024;

// What a launch is given and how it runs; the test knows the type of the kernel.
struct LaunchRecord {
  const void* kernel;
  int grid;
  int threads;
  uint64_t mark = 0;  // see GemmParams
};
inline std::vector<LaunchRecord> launches;
inline std::function<void(const void* kernel, int grid, int threads, void** arguments)> run_kernel;

}  // namespace tpk::emulation

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? tpk::emulation::kMultiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor       ? 9
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? tpk::emulation::kSharedBytes
                                                                  : 0;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = tpk::emulation::kResident;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  const int ctas = static_cast<int>(config->gridDim.x);
  const int threads = static_cast<int>(config->blockDim.x);
  tpk::emulation::launches.push_back({kernel, ctas, threads, 0});
  tpk::emulation::run_kernel(kernel, ctas, threads, arguments);
  return cudaSuccess;
}

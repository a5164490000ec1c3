#include "nvshmem/push.hpp"

// NVSHMEM's own headers warn.
#pragma nv_diag_suppress 177, 550, 3012, 3013, 20012, 20014
#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>

#include "comm/flags.cuh"
#include "nvshmem/heap.hpp"
#include "nvshmem/pieces.hpp"

namespace tpk::nvshmem {
namespace {

constexpr int kCtas = 32;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMultiprocessors = 8;  // room for all CTAs of a push: four on each
// Pushes that may be in flight at once. Calls of a device come one after the other, and one has fewer.
constexpr uint32_t kSlots = 4096;

struct Params {
  char* to;  // this rank's address of what is written in the memory of `pe`
  const char* from;
  Pieces pieces;
  uint32_t* word;  // as `to`
  const uint32_t* epoch;
  int pe;
  uint32_t slot;
};

__device__ uint32_t finished_ctas[kSlots];  // zero between pushes

// Rows, warp by warp. Then each CTA waits until what it has put is there; the last one to do so sets the
// flag.
__global__ void __launch_bounds__(kThreads) push_kernel(const Params p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (int64_t i = first; i < p.pieces.count; i += static_cast<int64_t>(gridDim.x) * kWarps) {
    nvshmemx_putmem_nbi_warp(p.to + i * p.pieces.to_pitch, p.from + i * p.pieces.from_pitch,
                             i + 1 == p.pieces.count ? p.pieces.last_bytes : p.pieces.bytes, p.pe);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  nvshmem_quiet();
  if (comm::add_acq_rel(&finished_ctas[p.slot], 1u) + 1 != gridDim.x) return;
  finished_ctas[p.slot] = 0;
  if (p.word == nullptr) return;
  auto* const mapped = static_cast<uint32_t*>(nvshmem_ptr(p.word, p.pe));
  if (mapped != nullptr) {
    comm::store_release<comm::Scope::kSys>(mapped, *p.epoch);
  } else {
    nvshmem_uint32_p(p.word, *p.epoch, p.pe);
    nvshmem_quiet();  // no push is in flight when the stream goes on
  }
}

std::string name_of(const Version& v) {
  return std::to_string(v.major) + "." + std::to_string(v.minor) + "." + std::to_string(v.patch);
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorString(error) + ".");
}

// NVSHMEM's device code is linked into every library that uses it, each with a state of its own. Whoever
// calls an init function has the host library copy its own to the caller's.
void initialise() {
  const Version compiled = compiled_version();
  const Version loaded = loaded_version();
  if (name_of(compiled) != name_of(loaded)) {
    throw std::runtime_error("_C_nvshmem was compiled with NVSHMEM " + name_of(compiled) +
                             ", but the process has " + name_of(loaded) + ": build tpkernels again.");
  }
  if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) {
    throw std::runtime_error(
        "NVSHMEM is not initialised, which torch does when it allocates symmetric memory by its backend "
        "NVSHMEM: set TPK_SYMMETRIC_BACKEND=NVSHMEM, or leave it unset.");
  }
  int provided = 0;
  const nvshmemi_version_t version{compiled.major, compiled.minor, compiled.patch};
  const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, 0, nullptr, version);
  if (status != 0) {
    throw std::runtime_error("NVSHMEM did not initialise the device code of _C_nvshmem (status " +
                             std::to_string(status) + ").");
  }
  nvshmemi_device_host_state_t state;
  check(cudaMemcpyFromSymbol(&state, nvshmemi_device_state_d, sizeof state), "cudaMemcpyFromSymbol");
  if (state.heap_base == nullptr || state.npes != nvshmem_n_pes() || state.mype != nvshmem_my_pe()) {
    throw std::runtime_error(
        "NVSHMEM initialised other device code than that of _C_nvshmem: another library's symbols stand "
        "before its own.");
  }
  cudaFuncAttributes attributes;  // loads the kernel: that may wait for kernels that run
  check(cudaFuncGetAttributes(&attributes, push_kernel), "cudaFuncGetAttributes");
}

Heap& heap() {
  static Heap heap;
  return heap;
}

void launch(Params p, cudaStream_t stream) {
  static std::atomic<uint32_t> next{0};
  p.slot = next.fetch_add(1, std::memory_order_relaxed) % kSlots;
  const int64_t ctas = std::clamp<int64_t>((p.pieces.count + kWarps - 1) / kWarps, 1, kCtas);
  void* arguments[] = {&p};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(push_kernel), dim3(static_cast<unsigned>(ctas)),
                         dim3(kThreads), arguments, 0, stream),
        "cudaLaunchKernel");
}

Place place_of(const void* address) {
  const auto place = heap().find(reinterpret_cast<uintptr_t>(address));
  if (!place) throw std::runtime_error("an address lies in no peer's memory that NVSHMEM knows.");
  return *place;
}

void enqueue(const comm::Push& push, cudaStream_t stream) {
  Params p{};
  Params flag{};
  p.pieces = cut(push.to_pitch, push.from_pitch, push.row_bytes, push.rows);
  if (p.pieces.count > 0) {
    const Place to = place_of(push.to);
    p.to = reinterpret_cast<char*>(to.local);
    p.from = static_cast<const char*>(push.from);
    p.pe = to.pe;
  }
  if (push.word != nullptr) {
    const Place word = place_of(push.word);
    Params& with = p.pieces.count > 0 && word.pe != p.pe ? flag : p;  // to another rank: behind the rows, too
    with.word = reinterpret_cast<uint32_t*>(word.local);
    with.epoch = push.epoch;
    with.pe = word.pe;
  }
  if (p.pieces.count > 0 || p.word != nullptr) launch(p, stream);
  if (flag.word != nullptr) launch(flag, stream);
}

bool reaches(const void* address) { return heap().find(reinterpret_cast<uintptr_t>(address)).has_value(); }

bool push(const comm::Push& push, cudaStream_t stream, char* message, size_t size) {
  try {
    enqueue(push, stream);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "NVSHMEM transport: %s", error.what());
    return false;
  }
}

}  // namespace

Version compiled_version() {
  return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
}

Version loaded_version() {
  Version v;
  nvshmemx_vendor_get_version_info(&v.major, &v.minor, &v.patch);
  return v;
}

void map(const std::vector<uintptr_t>& addresses, const std::vector<int>& pes, int rank, size_t bytes) {
  static std::once_flag once;
  std::call_once(once, initialise);
  auto* const own = reinterpret_cast<void*>(addresses.at(rank));
  for (size_t r = 0; r < addresses.size(); ++r) {
    if (nvshmem_ptr(own, pes.at(r)) != reinterpret_cast<void*>(addresses[r])) {
      throw std::runtime_error("memory of rank " + std::to_string(r) + ", PE " + std::to_string(pes[r]) +
                               ", is not mapped where NVSHMEM has it: it must be allocated by NVSHMEM.");
    }
  }
  for (size_t r = 0; r < addresses.size(); ++r) {
    if (static_cast<int>(r) != rank) heap().add(addresses[r], bytes, addresses[rank], pes[r]);
  }
}

const comm::Transport& transport() {
  static constexpr comm::Transport kTransport{sizeof(comm::Transport), kMultiprocessors, &reaches, &push};
  return kTransport;
}

}  // namespace tpk::nvshmem

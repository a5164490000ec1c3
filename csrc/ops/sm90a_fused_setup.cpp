// torch.ops.tpkernels.fused_warm_up and comm_fault: before the first fused call, and after one that failed.
#include <torch/csrc/stable/library.h>

#include "kernels/sm90a/all_reduce.hpp"
#include "kernels/sm90a/clear.hpp"
#include "ops/fused_group.hpp"

namespace {

using tpk::all_reduce::Way;
using tpk::ops::CopyEngine;
using tpk::ops::DeviceGuard;
using tpk::ops::Page;

// Everything that a call enqueues, once, into words of the pages that nobody reads: what CUDA loads or sets
// up at a first use may wait for running kernels, and those of a first call would already wait for other
// ranks.
void fused_warm_up(int64_t device, int64_t rank, const std::vector<int64_t>& addresses) {
  constexpr const char* kOp = "tpkernels::fused_warm_up";
  constexpr int kScratch = 640;  // words: 16 of this rank alone, then 16 for each rank that writes
  const DeviceGuard guard(static_cast<int32_t>(device));
  const cudaStream_t stream = tpk::ops::current_stream(kOp, static_cast<int>(device));
  std::vector<const void*> functions{tpk::sm90a::enter_function(), tpk::sm90a::collect_function(),
                                     tpk::sm90a::clear_function()};
  for (const auto way : {Way::kPackets, Way::kOneShot, Way::kTwoShot, Way::kGather, Way::kScatter}) {
    for (const auto kind : {tpk::ScalarKind::kBf16, tpk::ScalarKind::kFp16, tpk::ScalarKind::kFp32}) {
      functions.push_back(tpk::sm90a::all_reduce_function(way, kind));
    }
  }
  for (const void* function : functions) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    TPK_REQUIRE(error == cudaSuccess, kOp, ": cudaFuncGetAttributes failed: ", cudaGetErrorString(error),
                ".");
  }
  (void)tpk::sm90a::DeviceCache::instance().fault();
  (void)CopyEngine::of(static_cast<int>(device), CopyEngine::Purpose::kBeneath);
  CopyEngine::Call engine(CopyEngine::of(static_cast<int>(device)), stream);
  uint32_t* const own = Page::at(static_cast<uint64_t>(addresses.at(rank))).words + kScratch;
  for (const int64_t address : addresses) {
    uint32_t* const words = Page::at(static_cast<uint64_t>(address)).words + kScratch + 16 * (1 + rank);
    engine.raise(words, own);
    engine.copy({words, 16}, {own, 8}, 8, 2);
  }
  engine.raise_bell(own);
  engine.take_bell(own);
  for (int stream = 1; stream < CopyEngine::kStreams; ++stream) {
    engine.use(stream);
    engine.raise(own + stream, own);
  }
  engine.join();
  const cudaError_t error = cudaStreamSynchronize(stream);
  TPK_REQUIRE(error == cudaSuccess, kOp, ": cudaStreamSynchronize failed: ", cudaGetErrorString(error), ".");
}

// What a launch that was stopped has left, in words; '' if none was. Works when CUDA no longer does.
std::string comm_fault() { return tpk::sm90a::fault_sentence(*tpk::sm90a::DeviceCache::instance().fault()); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("fused_warm_up", TORCH_BOX(&fused_warm_up));
  m.impl("comm_fault", TORCH_BOX(&comm_fault));
}

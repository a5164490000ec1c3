// Workspace of a kernel's launch: torch's memory, on the current stream.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "kernels/gemm_call.hpp"

namespace tpk::ops {

// torch may hand the memory out again on that stream as soon as this is destroyed, which is after the kernel
// in stream order.
class Workspace {
 public:
  // like: a tensor of the device.
  explicit Workspace(const torch::stable::Tensor& like) : like_(like) {}

  // Makes it, if any is needed; false where there is no memory. (The stable ABI does not say why.)
  bool reserve(int64_t bytes) {
    if (bytes == 0 || (memory_ && memory_->numel() >= bytes)) return true;
    try {
      memory_ = torch::stable::new_empty(like_, {bytes}, torch::headeronly::ScalarType::Byte);
      return true;
    } catch (...) {  // must not pass through a kernel's entry
      return false;
    }
  }
  Allocator allocator() { return {&allocate, this}; }

 private:
  static void* allocate(void* context, int64_t bytes) {
    auto* self = static_cast<Workspace*>(context);
    return self->reserve(bytes) ? self->memory_->data_ptr() : nullptr;
  }

  const torch::stable::Tensor& like_;
  std::optional<torch::stable::Tensor> memory_;
};

}  // namespace tpk::ops

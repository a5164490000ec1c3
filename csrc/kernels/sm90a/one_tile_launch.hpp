// From a plan of a swapped tile to a launch of one_tile.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/gemm_call.hpp"
#include "kernels/sm90a/launch.hpp"
#include "kernels/sm90a/operands.hpp"
#include "kernels/sm90a/plan.hpp"

namespace tpk::sm90a {

// Whether a tile of the call leaves as it is rounded, in whole chunks of 16 bytes, with nothing but alpha and
// a bias before that.
bool rounds_alone(const GemmCall& call);

// clusters: of the plan's shape, that run at once where a CTA has a multiprocessor to itself.
void launch_one_tile(const GemmCall& call, const Operands& operands, const GemmPlan& plan,
                     const KernelInfo& kernel, int64_t clusters, cudaStream_t stream);

}  // namespace tpk::sm90a

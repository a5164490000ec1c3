// The way into the Hopper kernels: see GemmEntry in kernels/gemm_call.hpp.
#pragma once

#include "kernels/gemm_call.hpp"

namespace tpk::sm90a {

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes);

}  // namespace tpk::sm90a

// The way into the portable kernels: see GemmEntry in kernels/gemm_call.hpp. Nothing is refused but hooks.
#pragma once

#include "kernels/gemm_call.hpp"

namespace tpk::sm80 {

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes);

}  // namespace tpk::sm80

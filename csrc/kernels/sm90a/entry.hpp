// The way into the Hopper kernels: see GemmEntry in kernels/gemm_call.hpp.
#pragma once

#include "kernels/gemm_call.hpp"

namespace tpk::sm90a {

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes);

// Rows of a CTA's tile that run_gemm would take; loads the kernel, so that its launch waits for nothing.
// Fails where run_gemm would before it launches anything.
GemmOutcome find_tile_rows(const GemmCall& call, int64_t* rows, char* message, size_t message_bytes);

}  // namespace tpk::sm90a

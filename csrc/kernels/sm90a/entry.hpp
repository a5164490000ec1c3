// The way into the Hopper kernels: see GemmEntry in kernels/gemm_call.hpp.
#pragma once

#include <string>

#include "kernels/gemm_call.hpp"

namespace tpk::sm90a {

GemmOutcome run_gemm(const GemmCall& call, void* stream, const Allocator& allocator, char* message,
                     size_t message_bytes);

// The sentence for a workspace that cannot be had.
inline std::string no_memory(int64_t bytes) {
  return "no memory for a workspace of " + std::to_string(bytes) +
         " bytes: free some, or use schedule 'data_parallel', which needs none.";
}

// What run_gemm will take.
struct Needs {
  int64_t tile_rows = 0;        // of a CTA's tile
  int64_t workspace_bytes = 0;  // what it will ask the allocator for; 0: it will not
};

// Loads the kernel, so that its launch waits for nothing. Fails where run_gemm would before it launches
// anything, but for a lack of memory.
GemmOutcome find_needs(const GemmCall& call, Needs* needs, char* message, size_t message_bytes);

}  // namespace tpk::sm90a

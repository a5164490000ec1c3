// Rows and flags by NVSHMEM. See docs/nvshmem.md. Throws std::runtime_error with a sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/transport.hpp"

namespace tpk::nvshmem {

struct Version {
  int major = 0;
  int minor = 0;
  int patch = 0;
};

Version compiled_version();
Version loaded_version();

// Everything that is known after an allocation was mapped: this rank's own begins at addresses[rank]; pes[r]
// is the number of rank r in NVSHMEM. The first call makes the host library, which torch has initialised,
// initialise the device code of this library. On the current device.
void map(const std::vector<uintptr_t>& addresses, const std::vector<int>& pes, int rank, size_t bytes);

const comm::Transport& transport();

}  // namespace tpk::nvshmem

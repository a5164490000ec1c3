// Another way to a peer's memory than the copy engine: rows, and behind them a flag. Only types of C, so that
// it can live in a library of its own, which nothing here links to (csrc/nvshmem). Everything is enqueued on
// a stream; calls can be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace tpk::comm {

// Addresses of the peer's memory are those at which it is mapped here.
struct Push {
  void* to = nullptr;
  size_t to_pitch = 0;
  const void* from = nullptr;
  size_t from_pitch = 0;
  size_t row_bytes = 0;
  int64_t rows = 0;                 // 0: a flag alone
  uint32_t* word = nullptr;         // set when all rows are there; nullptr: rows alone
  const uint32_t* epoch = nullptr;  // to what: read on the device, behind the rows
};

struct Transport {
  int32_t bytes;            // sizeof(Transport) where it was compiled
  int32_t multiprocessors;  // that products leave to its kernels
  // Whether the address lies in memory of a peer that it writes to. Not so the own one.
  bool (*reaches)(const void* address);
  // False: message (ended by 0) says why nothing was enqueued.
  bool (*push)(const Push& push, cudaStream_t stream, char* message, size_t size);
};

// The one in use; nullptr: the copy engine does all. Set once, before memory is mapped.
const Transport* transport();
void set_transport(const Transport* used);

}  // namespace tpk::comm

// How the rows of a push are cut for warps: each puts a piece at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpk::nvshmem {

struct Pieces {
  int64_t count = 0;
  size_t to_pitch = 0;  // from one to the next
  size_t from_pitch = 0;
  size_t bytes = 0;  // of each but the last
  size_t last_bytes = 0;
};

constexpr size_t kPieceBytes = 16 << 10;

// A row each; where rows lie side by side, kPieceBytes each.
inline Pieces cut(size_t to_pitch, size_t from_pitch, size_t row_bytes, int64_t rows) {
  if (rows <= 0 || row_bytes == 0) return {};
  if (rows > 1 && (to_pitch != row_bytes || from_pitch != row_bytes)) {
    return {rows, to_pitch, from_pitch, row_bytes, row_bytes};
  }
  const size_t all = row_bytes * static_cast<size_t>(rows);
  const size_t count = (all + kPieceBytes - 1) / kPieceBytes;
  return {static_cast<int64_t>(count), kPieceBytes, kPieceBytes, kPieceBytes,
          all - (count - 1) * kPieceBytes};
}

}  // namespace tpk::nvshmem

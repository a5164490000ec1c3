// Record of a wait inside the kernel that took too long. Pure C++.
#pragma once

#include <cstdint>
#include <string>

namespace tpk::sm90a {

enum class FaultKind : uint32_t { kNone, kFilling, kPartial, kChunk, kAddend };

struct FaultRecord {
  uint32_t kind = 0;  // FaultKind; written last
  uint32_t cta = 0;
  int32_t index = 0;  // of the partial tile, the chunk or the addend
  int32_t part = 0;   // partial: the first one behind; chunk: slab; addend: row
  uint32_t seen = 0;
  uint32_t expected = 0;
};

// A sentence; empty where the record is.
inline std::string fault_sentence(const FaultRecord& r, uint64_t timeout_ns) {
  const auto kind = static_cast<FaultKind>(r.kind);
  if (kind == FaultKind::kNone || kind == FaultKind::kFilling) return {};
  std::string what;
  std::string cause;
  if (kind == FaultKind::kPartial) {
    what = "partial tile " + std::to_string(r.index) + " of those before " + std::to_string(r.part);
    cause =
        "The cluster that computes it did not finish: the device is held by another kernel, or this is a "
        "bug.";
  } else if (kind == FaultKind::kChunk) {
    what = "slab " + std::to_string(r.part) + " of chunk " + std::to_string(r.index) + " of a";
    cause = "The rank that sends it did not.";
  } else {
    what = "row " + std::to_string(r.part) + " of addend " + std::to_string(r.index);
    cause = "The rank that sends it did not.";
  }
  return "CTA " + std::to_string(r.cta) + " waited " + std::to_string(timeout_ns / 1000000) + " ms for " +
         what + ": its flag is " + std::to_string(r.seen) + ", expected " + std::to_string(r.expected) +
         ". " + cause + " The launch was stopped; its output must not be used, and CUDA needs a new process.";
}

}  // namespace tpk::sm90a

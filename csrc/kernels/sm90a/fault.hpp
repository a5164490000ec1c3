// Record of a wait inside a kernel that took too long. Pure C++.
#pragma once

#include <cstdint>
#include <string>

namespace tpk::sm90a {

enum class FaultKind : uint32_t {
  kNone,
  kFilling,
  kPartial,
  kChunk,
  kAddend,
  kEntered,
  kResult,
  kAllReduce,
  kBlock
};

struct FaultRecord {
  uint32_t kind = 0;  // FaultKind; written last
  uint32_t cta = 0;
  // Of the partial tile, the chunk, the addend or the rank that it is of; all-reduce: of the word or packet.
  int32_t index = 0;
  // Partial: the first one behind; chunk: slab; addend: row; result: chunk; all-reduce: all_reduce::Word;
  // block: K, of all pairs in a row.
  int32_t part = 0;
  int32_t peer = -1;  // the rank that did not come, where there are ranks
  uint32_t seen = 0;
  uint32_t expected = 0;
  uint32_t timeout_ms = 0;
};

// A sentence; empty where the record is.
inline std::string fault_sentence(const FaultRecord& r) {
  const auto kind = static_cast<FaultKind>(r.kind);
  if (kind == FaultKind::kNone || kind == FaultKind::kFilling) return {};
  const std::string index = std::to_string(r.index);
  const std::string part = std::to_string(r.part);
  const std::string sender = r.peer >= 0 ? "Rank " + std::to_string(r.peer) : "The rank that";
  std::string what;
  std::string cause = sender + (r.peer >= 0 ? ", which sends it, did not." : " sends it did not.");
  if (kind == FaultKind::kPartial) {
    what = "partial tile " + index + " of those before " + part;
    cause =
        "The cluster that computes it did not finish: the device is held by another kernel, or this is a "
        "bug.";
  } else if (kind == FaultKind::kChunk) {
    what = "slab " + part + " of chunk " + index + " of a";
  } else if (kind == FaultKind::kBlock) {
    what = "block " + index + " of the factors, at K = " + part;
  } else if (kind == FaultKind::kAddend) {
    what = "row " + part + " of what rank " + index + " adds";
  } else if (kind == FaultKind::kResult) {
    what = "chunk " + part + ", sums of rank " + index;
  } else if (kind == FaultKind::kAllReduce) {
    const char* const words[] = {"the partial of an all-reduce", "the sums of an all-reduce",
                                 "a packet of an all-reduce", "rows of a gather",
                                 "the partial of a reduce-scatter"};
    what = std::string(words[r.part]) + (r.part == 2 ? ", packet " : ", word ") + index;
  } else {
    what = "rank " + std::to_string(r.peer) + " to begin the same call";
    cause = "It did not call, or it stands still.";
  }
  return "CTA " + std::to_string(r.cta) + " waited " + std::to_string(r.timeout_ms) + " ms for " + what +
         ": its flag is " + std::to_string(r.seen) + ", expected " + std::to_string(r.expected) + ". " +
         cause + " The launch was stopped; its output must not be used, and CUDA needs a new process.";
}

}  // namespace tpk::sm90a

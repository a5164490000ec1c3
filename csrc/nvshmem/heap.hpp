// Where peers' allocations of the symmetric heap are mapped in this process, and what NVSHMEM calls the same
// memory: the address of this rank's own part, and the number of a PE. Host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace tpk::nvshmem {

struct Place {
  uintptr_t local = 0;  // the same offset in this rank's allocation
  int pe = 0;
};

class Heap {
 public:
  // A peer's allocation, mapped at `mapped`, of the same size as `local`, this rank's. It replaces what lay
  // there before and was freed since.
  void add(uintptr_t mapped, size_t bytes, uintptr_t local, int pe) {
    const std::lock_guard lock(mutex_);
    auto old = parts_.lower_bound(mapped);
    if (old != parts_.begin() && std::prev(old)->first + std::prev(old)->second.bytes > mapped) --old;
    while (old != parts_.end() && old->first < mapped + bytes) old = parts_.erase(old);
    parts_[mapped] = {bytes, local, pe};
  }

  std::optional<Place> find(uintptr_t address) const {
    const std::lock_guard lock(mutex_);
    auto part = parts_.upper_bound(address);
    if (part == parts_.begin()) return std::nullopt;
    --part;
    const uintptr_t offset = address - part->first;
    if (offset >= part->second.bytes) return std::nullopt;
    return Place{part->second.local + offset, part->second.pe};
  }

 private:
  struct Part {
    size_t bytes = 0;
    uintptr_t local = 0;
    int pe = 0;
  };

  mutable std::mutex mutex_;
  std::map<uintptr_t, Part> parts_;  // by where it begins
};

}  // namespace tpk::nvshmem

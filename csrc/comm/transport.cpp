#include "comm/transport.hpp"

#include <atomic>

namespace tpk::comm {
namespace {

std::atomic<const Transport*> used_transport{nullptr};

}  // namespace

const Transport* transport() { return used_transport.load(std::memory_order_acquire); }

void set_transport(const Transport* used) { used_transport.store(used, std::memory_order_release); }

}  // namespace tpk::comm

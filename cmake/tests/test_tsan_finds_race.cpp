// Fails under ThreadSanitizer, as it must: the executor's fix-up without the release and acquire of its
// flags.
#include <atomic>
#include <thread>

int main() {
  float partial = 0;
  std::atomic<int> written{0};
  std::jthread writer([&] {
    partial = 1;
    written.store(1, std::memory_order_relaxed);
  });
  while (written.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
  return partial == 1 ? 0 : 1;
}

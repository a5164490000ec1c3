// Pushes by NVSHMEM, as far as the host decides: addresses in peers' memory, and which bytes a warp puts.
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "nvshmem/heap.hpp"
#include "nvshmem/pieces.hpp"

namespace {

using tpk::nvshmem::Heap;

void check_place(const Heap& heap, uintptr_t address, uintptr_t local, int pe) {
  const auto place = heap.find(address);
  const std::string where = "address " + std::to_string(address);
  TPK_CHECK(place.has_value(), where);
  if (!place) return;
  TPK_CHECK(place->local == local && place->pe == pe, where);
}

void check_heap() {
  Heap heap;
  TPK_CHECK(!heap.find(0) && !heap.find(5000), "an empty heap");
  heap.add(10000, 1000, 500000, 1);
  heap.add(20000, 1000, 500000, 3);
  heap.add(11000, 1000, 600000, 1);  // right behind the first
  check_place(heap, 10000, 500000, 1);
  check_place(heap, 10999, 500999, 1);
  check_place(heap, 11000, 600000, 1);
  check_place(heap, 20500, 500500, 3);
  for (const uintptr_t outside : {9999, 12000, 19999, 21000, 500000}) {
    TPK_CHECK(!heap.find(outside), "address " + std::to_string(outside));
  }
  // What was freed has been given again, otherwise cut.
  heap.add(10500, 1000, 700000, 2);
  check_place(heap, 10500, 700000, 2);
  check_place(heap, 11499, 700999, 2);
  TPK_CHECK(!heap.find(10499) && !heap.find(11500), "parts of what is gone are gone");
  check_place(heap, 20500, 500500, 3);
  heap.add(9000, 20000, 800000, 5);
  check_place(heap, 20500, 811500, 5);
  heap.add(20000, 8, 900000, 6);  // inside of it
  check_place(heap, 20000, 900000, 6);
  TPK_CHECK(!heap.find(9000), "it overlapped");
}

// Every byte of every row is put once, where it belongs, and none between rows.
void check_cut(size_t to_pitch, size_t from_pitch, size_t row_bytes, int64_t rows) {
  const auto pieces = tpk::nvshmem::cut(to_pitch, from_pitch, row_bytes, rows);
  const std::string what = std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
                           " bytes, pitches " + std::to_string(to_pitch) + " and " +
                           std::to_string(from_pitch);
  std::vector<int64_t> from(rows == 0 ? 0 : (rows - 1) * from_pitch + row_bytes, -1);
  std::vector<int64_t> to(rows == 0 ? 0 : (rows - 1) * to_pitch + row_bytes, -1);
  std::vector<int64_t> wanted = to;
  for (int64_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < row_bytes; ++i) {
      from[r * from_pitch + i] = wanted[r * to_pitch + i] = static_cast<int64_t>(r * row_bytes + i);
    }
  }
  for (int64_t p = 0; p < pieces.count; ++p) {
    const size_t bytes = p + 1 == pieces.count ? pieces.last_bytes : pieces.bytes;
    TPK_CHECK(bytes > 0, what);
    for (size_t i = 0; i < bytes; ++i) {
      const size_t target = p * pieces.to_pitch + i;
      const size_t source = p * pieces.from_pitch + i;
      if (target >= to.size() || source >= from.size() || to[target] != -1) {
        TPK_CHECK(false, what + ", piece " + std::to_string(p));
        return;
      }
      to[target] = from[source];
    }
  }
  TPK_CHECK(to == wanted, what);
}

}  // namespace

int main() {
  check_heap();
  check_cut(4, 4, 4, 0);
  check_cut(4, 4, 0, 3);
  const size_t unit = tpk::nvshmem::kPieceBytes;
  for (const size_t bytes : {size_t{1}, unit - 1, unit, unit + 1, 3 * unit, 3 * unit + 2})
    check_cut(bytes, bytes, bytes, 1);
  check_cut(100, 9, 8, 1);  // one row: pitches mean nothing
  TPK_CHECK(tpk::nvshmem::cut(9 * unit, 7 * unit, 3 * unit, 1).count == 3, "one row for several warps");
  std::mt19937 random(7);
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  long long cases = 10;
  for (; cases < 500; ++cases) {
    const size_t bytes = draw(1, 3000);
    const size_t more = draw(0, 2) == 0 ? draw(1, 40) : 0;
    check_cut(bytes + more, bytes + (draw(0, 2) == 0 ? draw(1, 40) : 0), bytes, draw(1, 40));
  }
  return tpk::test::result("nvshmem_pushes", cases);
}

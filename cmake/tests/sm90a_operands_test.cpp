// Which matrices TMA takes for the Hopper kernel, and as what: strides, addresses, broadcast, sizes of 1.
#include <cstdint>
#include <optional>
#include <string>

#include "check.hpp"
#include "kernels/sm90a/operands.hpp"

namespace {

using namespace tpk;
using namespace tpk::sm90a;

long long cases = 0;

void* address(uintptr_t at) { return reinterpret_cast<void*>(at); }

Matrix matrix(int64_t batch_stride, int64_t row_stride, int64_t col_stride, uintptr_t at = 4096) {
  Matrix m;
  m.data = address(at);
  m.batch_stride = batch_stride;
  m.row_stride = row_stride;
  m.col_stride = col_stride;
  return m;
}

// As the launcher asks for A [batch, m, k] and for B [batch, k, n].
std::optional<OperandView> view_a(const Matrix& a, int64_t batch, int64_t m, int64_t k) {
  return view_operand(a, batch, m, a.row_stride, k, a.col_stride);
}

std::optional<OperandView> view_b(const Matrix& b, int64_t batch, int64_t k, int64_t n) {
  return view_operand(b, batch, n, b.col_stride, k, b.row_stride);
}

void expect(const std::optional<OperandView>& got, Major major, const TensorView& t, int32_t batch_step,
            const std::string& context) {
  ++cases;
  TPK_CHECK(got.has_value(), context);
  if (!got) return;
  TPK_CHECK(got->major == major, context);
  TPK_CHECK(got->batch_step == batch_step, context);
  TPK_CHECK(got->tensor.data == t.data, context);
  TPK_CHECK(got->tensor.inner == t.inner && got->tensor.outer == t.outer, context);
  TPK_CHECK(got->tensor.batch == t.batch, context);
  TPK_CHECK(got->tensor.outer_stride == t.outer_stride, context);
  TPK_CHECK(got->tensor.batch_stride == t.batch_stride, context);
}

template <class View>
void refuse(const std::optional<View>& got, const std::string& context) {
  ++cases;
  TPK_CHECK(!got.has_value(), context);
}

void check_operands() {
  void* const data = address(4096);
  expect(view_a(matrix(6400, 64, 1), 3, 100, 64), Major::kK, {data, 64, 100, 3, 128, 12800}, 1, "A by rows");
  expect(view_operand(matrix(6400, 64, 1), 3, 100, 64, 63, 1, 1), Major::kK, {data, 63, 100, 3, 64, 6400}, 1,
         "A of 8 bits by rows");
  refuse(view_operand(matrix(6656, 1, 112), 3, 100, 1, 64, 112, 1), "A of 8 bits by columns");
  refuse(view_operand(matrix(0, 24, 1), 1, 100, 24, 24, 1, 1), "A of 8 bits, rows 24 bytes apart");
  expect(view_a(matrix(6656, 1, 104), 3, 100, 64), Major::kOuter, {data, 100, 64, 3, 208, 13312}, 1,
         "A by columns");
  expect(view_b(matrix(6656, 104, 1), 3, 64, 100), Major::kOuter, {data, 100, 64, 3, 208, 13312}, 1,
         "B by rows");
  expect(view_b(matrix(6400, 1, 64), 3, 64, 100), Major::kK, {data, 64, 100, 3, 128, 12800}, 1,
         "B by columns");
  expect(view_a(matrix(0, 72, 1), 1, 100, 65), Major::kK, {data, 65, 100, 1, 144, 16}, 1,
         "a K that is no multiple of 8, rows that are padded");
  expect(view_a(matrix(64, 192, 1), 3, 100, 64), Major::kK, {data, 64, 100, 3, 384, 128}, 1,
         "batches between the rows");

  refuse(view_a(matrix(6500, 65, 1), 3, 100, 65), "rows of 65 elements");
  refuse(view_a(matrix(6404, 64, 1), 3, 100, 64), "a batch stride of 12808 bytes");
  refuse(view_a(matrix(12800, 128, 2), 3, 100, 64), "no contiguous dim");
  refuse(view_a(matrix(6400, 0, 1), 3, 100, 64), "one row for all");
  refuse(view_a(matrix(0, 0, 0), 1, 100, 64), "one element for all");
  for (const uintptr_t off : {2, 4, 8, 14}) {
    refuse(view_a(matrix(6400, 64, 1, 4096 + off), 3, 100, 64), "address + " + std::to_string(off));
  }
  expect(view_a(matrix(6400, 64, 1, 4112), 3, 100, 64), Major::kK, {address(4112), 64, 100, 3, 128, 12800}, 1,
         "address + 16");
}

void check_batches() {
  void* const data = address(4096);
  expect(view_a(matrix(0, 64, 1), 3, 100, 64), Major::kK, {data, 64, 100, 1, 128, 16}, 0, "broadcast A");
  expect(view_b(matrix(0, 104, 1), 3, 64, 100), Major::kOuter, {data, 100, 64, 1, 208, 16}, 0, "broadcast B");
  // One batch has no stride: it may be anything, odd or 0.
  for (const int64_t stride : {int64_t{0}, int64_t{7}, int64_t{1} << 50}) {
    expect(view_a(matrix(stride, 64, 1), 1, 100, 64), Major::kK, {data, 64, 100, 1, 128, 16}, 1,
           "one batch, stride " + std::to_string(stride));
  }
}

// The stride of a dim of size 1 is never used: torch leaves there what it likes.
void check_sizes_of_one() {
  void* const data = address(4096);
  for (const int64_t stride : {0, 1, 3, 64}) {
    const std::string context = "stride " + std::to_string(stride);
    expect(view_a(matrix(0, stride, 1), 1, 1, 64), Major::kK, {data, 64, 1, 1, 16, 16}, 1,
           "one row, " + context);
    expect(view_b(matrix(0, stride, 1), 1, 1, 100), Major::kOuter, {data, 100, 1, 1, 16, 16}, 1,
           "K is 1, B by rows, " + context);
    expect(view_a(matrix(0, stride, stride), 1, 1, 1), Major::kK, {data, 1, 1, 1, 16, 16}, 1,
           "one element, " + context);
  }
  expect(view_a(matrix(0, 1, 1), 1, 100, 1), Major::kOuter, {data, 100, 1, 1, 16, 16}, 1,
         "a column whose elements lie side by side");
  expect(view_a(matrix(0, 8, 5), 1, 100, 1), Major::kK, {data, 1, 100, 1, 16, 16}, 1,
         "a column of a matrix of 8: TMA reads one element of each row");
  refuse(view_a(matrix(0, 5, 1), 1, 100, 1), "a column of a matrix of 5");
  refuse(view_a(matrix(0, 1, 7), 1, 1, 64), "one row whose elements lie apart");
}

// Strides must stay below 2^40 bytes.
void check_large_strides() {
  void* const data = address(4096);
  constexpr int64_t kMost = (int64_t{1} << 40) - 16;
  expect(view_a(matrix(0, kMost / 2, 1), 1, 2, 64), Major::kK, {data, 64, 2, 1, kMost, 16}, 1, "2^40 - 16");
  refuse(view_a(matrix(0, kMost / 2 + 8, 1), 1, 2, 64), "2^40");
  refuse(view_a(matrix(kMost / 2 + 8, 64, 1), 2, 2, 64), "2^40 between batches");
}

void check_outputs() {
  for (const ScalarKind kind : {ScalarKind::kBf16, ScalarKind::kFp16, ScalarKind::kFp32}) {
    const int64_t bytes = bytes_of(kind);
    const int64_t whole = 16 / bytes;  // elements of 16 bytes
    const std::string context = "elements of " + std::to_string(bytes) + " bytes";
    Matrix m = matrix(100 * 25 * whole, 25 * whole, 1);
    m.kind = kind;
    const auto got = view_output(m, 3, 100, 25 * whole - 1);
    ++cases;
    TPK_CHECK(got.has_value(), context);
    if (got) {
      TPK_CHECK(got->inner == 25 * whole - 1 && got->outer == 100 && got->batch == 3, context);
      TPK_CHECK(got->outer_stride == 400 && got->batch_stride == 40000, context);
    }
    m.row_stride += 1;
    refuse(view_output(m, 3, 100, 25 * whole), "odd rows, " + context);
    TPK_CHECK(view_output(m, 3, 1, 25 * whole).has_value(), "one odd row, " + context);
    m.row_stride -= 1;
    m.batch_stride = 0;
    refuse(view_output(m, 3, 100, 25 * whole), "outputs on top of each other, " + context);
    m.col_stride = 2;
    refuse(view_output(m, 1, 100, 25 * whole), "every other column, " + context);
    TPK_CHECK(view_output(m, 1, 100, 1).has_value(), "one column, " + context);
    m.col_stride = 1;
    m.data = address(4096 + 8);
    refuse(view_output(m, 1, 100, 25 * whole), "address + 8, " + context);
  }
}

}  // namespace

int main() {
  check_operands();
  check_batches();
  check_sizes_of_one();
  check_large_strides();
  check_outputs();
  return tpk::test::result("sm90a operands", cases);
}

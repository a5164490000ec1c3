// torch.ops.tpkernels.fused_block_matmul: one rank's block of a product whose factors lie in blocks on all
// ranks of a grid. They travel by the copy engine, straight from whom they belong to, while one launch of the
// Hopper kernel multiplies and adds what is there; who sends what, and when: ops/block_pushes.hpp.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/arguments.hpp"
#include "ops/block_pushes.hpp"
#include "ops/fused_group.hpp"

namespace {

using namespace tpk::ops;
using tpk::GemmCall;
using tpk::GemmHooks;
using tpk::Matrix;
using tpk::blocks::Cut;
using tpk::blocks::Holders;
using tpk::blocks::Push;
using tpk::blocks::Side;

constexpr const char* kOp = "tpkernels::fused_block_matmul";
#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

// A factor as it is stored on every rank alike, [rows, columns], columns contiguous. sums_rows: rows are what
// the product sums over, else columns.
class Factor {
 public:
  static constexpr int64_t kBytes = 2;

  Factor(const char* name, const Tensor& t, bool sums_rows) : sums_rows_(sums_rows) {
    REQUIRE(t.is_cuda() && t.dim() == 2 && t.size(0) > 0 && t.size(1) > 0, name,
            " must be a CUDA tensor [rows, columns] with elements.");
    REQUIRE(t.size(1) == 1 || t.stride(1) == 1, name, " must have its columns contiguous.");
    rows_ = t.size(0);
    columns_ = t.size(1);
    pitch_ = round_up(columns_, 8);
    kind_ = kind_of(t);
    const int64_t stride = rows_ > 1 ? t.stride(0) : pitch_;
    own_ = {t.data_ptr(), static_cast<size_t>(stride * kBytes)};
    REQUIRE(reinterpret_cast<uintptr_t>(own_.data) % 16 == 0 && stride % 8 == 0 && stride >= columns_, name,
            " must begin, and have its rows begin, at multiples of 16 bytes.");
  }

  int64_t summed() const { return sums_rows_ ? rows_ : columns_; }
  int64_t kept() const { return sums_rows_ ? columns_ : rows_; }  // M of a left factor, N of a right one
  int64_t slot_bytes() const { return round_up(rows_ * pitch_ * kBytes, 256); }
  Rows own() const { return own_; }
  Rows at(void* buffer, int64_t slot) const {
    return {static_cast<char*>(buffer) + slot * slot_bytes(), static_cast<size_t>(pitch_ * kBytes)};
  }
  // [kept, summed], or with `turned` [summed, kept].
  Matrix matrix(Rows rows, bool turned) const {
    const auto stride = static_cast<int64_t>(rows.pitch) / kBytes;
    return sums_rows_ != turned ? Matrix{rows.data, 0, 1, stride, kind_}
                                : Matrix{rows.data, 0, stride, 1, kind_};
  }
  // What [begin, end) of the kept dimension is of rows that lie so.
  struct Part {
    Rows rows;
    size_t row_bytes;
    int64_t count;
  };
  Part part(Rows rows, int64_t begin, int64_t end) const {
    if (!sums_rows_) return {rows.from(begin), static_cast<size_t>(columns_ * kBytes), end - begin};
    return {{static_cast<char*>(rows.data) + begin * kBytes, rows.pitch},
            static_cast<size_t>((end - begin) * kBytes),
            rows_};
  }

 private:
  bool sums_rows_;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  int64_t pitch_ = 0;
  tpk::ScalarKind kind_ = tpk::ScalarKind::kBf16;
  Rows own_;
};

// Factors of this rank's steps, where they are, or will be.
void set_pairs(GemmCall& c, const Holders& holders, const Factor (&factors)[2], void* const (&buffers)[2],
               int64_t rank) {
  const auto matrix = [&](Side side, int64_t step) {
    const Factor& f = factors[side];
    const int64_t slot = holders.slot(side, rank, step);
    return f.matrix(slot < 0 ? f.own() : f.at(buffers[side], slot), side == tpk::blocks::kRight);
  };
  for (int64_t s = 0; s < holders.steps; ++s) {
    const Matrix left = matrix(tpk::blocks::kLeft, s);
    const Matrix right = matrix(tpk::blocks::kRight, s);
    if (s == 0) {
      c.a = left;
      c.b = right;
    } else {
      c.more[s - 1] = {left, right, c.problem.k};
    }
  }
  c.num_more = static_cast<int>(holders.steps) - 1;
}

void fused_block_matmul(const Tensor& left, const Tensor& right, bool left_sums_rows, bool right_sums_rows,
                        const std::vector<int64_t>& left_from, const std::vector<int64_t>& right_from,
                        const std::optional<Tensor>& bias, const Tensor& out, int64_t rank,
                        const std::vector<int64_t>& addresses, double timeout_s, const std::string& schedule,
                        const std::string& tile, int64_t multiprocessors) {
  using tpk::blocks::kLeft;
  using tpk::blocks::kRight;
  const Factor factors[2] = {{"left", left, left_sums_rows}, {"right", right, right_sums_rows}};
  const int64_t m = factors[kLeft].kept();
  const int64_t n = factors[kRight].kept();
  const int64_t k = factors[kLeft].summed();
  REQUIRE(factors[kRight].summed() == k && right.scalar_type() == left.scalar_type(),
          "left and right must have one length to sum over, and one dtype, but they have ", k, " and ",
          factors[kRight].summed(), ".");
  const auto device = left.get_device_index();
  const DeviceGuard guard(device);
  // Ranks of a group with no rows of their own: pages and a stream are what is needed of it.
  const Group g =
      group_of(kOp, std::vector<int64_t>(addresses.size(), 1), rank, addresses, timeout_s, device);
  Holders holders;
  try {
    holders = tpk::blocks::make_holders(g.world(), left_from, right_from);
  } catch (const std::invalid_argument& error) {
    REQUIRE(false, error.what());
  }
  const Cut cut = tpk::blocks::cut_blocks(holders, m, n, k, Factor::kBytes);
  const auto buffers_of = [&](int peer, Side side) -> void* {
    return static_cast<char*>(g.page(peer).buffer()) +
           (side == kLeft ? 0 : cut.slots[kLeft] * factors[kLeft].slot_bytes());
  };
  check_matrix(kOp, "out", out, m, n);

  GemmHooks hooks;
  hooks.blocks = tpk::blocks::arrival_of(holders, cut, rank);
  hooks.blocks.flags = g.mine().arrived(0);
  hooks.blocks.epoch = g.mine().epoch();
  GemmCall c;
  c.problem = {m, n, k, 1};
  c.element = tpk::ops::element_of(kOp, left);
  set_pairs(c, holders, factors, {buffers_of(g.rank(), kLeft), buffers_of(g.rank(), kRight)}, rank);
  c.out = matrix_of(out);
  if (bias) {
    REQUIRE(bias->is_cuda() && bias->dim() == 1 && bias->size(0) == n, "bias must be a CUDA tensor [N].");
    c.bias = matrix_of(*bias);
  }
  c.hooks = &hooks;
  set_plan(c, schedule, tile, multiprocessors, g, device);
  Workspace workspace(left);
  tpk::ops::prepare_hopper(kOp, c, workspace);

  launch_sync(kOp, tpk::sm90a::enter_function(), g);
  CopyEngine::Call engine(CopyEngine::of(device), g.stream);
  for (const Push& p : tpk::blocks::pushes_of(holders, cut, rank)) {
    const Factor& f = factors[p.side];
    const auto peer = static_cast<int>(p.peer);
    const int64_t begin = p.block * cut.extent[p.side];
    const int64_t end = std::min(f.kept(), begin + cut.extent[p.side]);
    const Factor::Part from = f.part(f.own(), begin, end);
    const Factor::Part to = f.part(f.at(buffers_of(peer, p.side), p.slot), begin, end);
    engine.push(to.rows, from.rows, from.row_bytes, from.count,
                g.page(peer).arrived(static_cast<int>(cut.word(p.side, p.slot, p.block))), g.mine().epoch());
  }
  tpk::ops::run_hopper(kOp, c, workspace, g.stream);
  engine.join();
}
#undef REQUIRE

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_block_matmul", TORCH_BOX(&fused_block_matmul));
}

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/cpu/epilogue.hpp"
#include "kernels/cpu/gemm.hpp"
#include "kernels/cpu/multiply.hpp"

namespace tpk::cpu {
namespace {

constexpr int64_t round_up(int64_t x, int64_t multiple) { return ceil_div(x, multiple) * multiple; }

int64_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

Operand operand(const MatrixView& view, int64_t batch, int64_t row, int64_t column) {
  const int64_t offset = batch * view.stride[0] + row * view.stride[1] + column * view.stride[2];
  return {static_cast<const char*>(view.data) + offset * element_size(view.dtype), view.stride[1],
          view.stride[2]};
}

// Everything that the threads of one product share.
template <typename Acc>
class Executor {
 public:
  Executor(const GemmArgs& args, const MatrixView& mul, const Plan& plan, std::chrono::milliseconds timeout)
      : args_(args),
        mul_(mul),
        plan_(plan),
        timeout_(timeout),
        multiply_(select_multiply<Acc>(args.a.dtype)),
        ld_(round_up(min64(plan.tile.bn, max64(1, args.problem.n)), kPanelColumns)),
        tile_elements_(round_up(min64(plan.tile.bm, max64(1, args.problem.m)), kPanelRows) * ld_),
        partials_(new Acc[plan.schedule.num_slots * tile_elements_]),
        written_(plan.schedule.num_slots) {}

  // One thread: takes tickets until there are none left.
  void work() noexcept {
    try {
      const int64_t depth = plan_.tile.bk;
      std::unique_ptr<Acc[]> own(new Acc[tile_elements_]);
      std::unique_ptr<Acc[]> a_panels(new Acc[tile_elements_ / ld_ * depth]);
      std::unique_ptr<Acc[]> b_panels(new Acc[ld_ * depth]);
      for (;;) {
        const int64_t ticket = next_ticket_.fetch_add(1, std::memory_order_relaxed);
        if (ticket >= plan_.schedule.workers) return;
        SegmentCursor cursor(plan_.schedule, ticket);
        for (Segment s; cursor.next(&s);) {
          if (failed_.load(std::memory_order_relaxed)) return;
          // A partial is summed up where it will be read.
          Acc* acc = s.finishes() ? own.get() : partial(s.slot);
          const TileBounds tile = bounds(s.position);
          mainloop(s, tile, acc, a_panels.get(), b_panels.get());
          if (!s.finishes()) {
            written_[s.slot].store(1, std::memory_order_release);
            continue;
          }
          fix_up(s, tile, acc);
          epilogue(args_, mul_, tile, acc, ld_);
        }
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);  // the others stop waiting
    }
  }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  Acc* partial(int64_t slot) { return partials_.get() + slot * tile_elements_; }

  TileBounds bounds(int64_t position) const {
    const TileCoord c = plan_.order.at(position);
    const int64_t row = c.m * plan_.tile.bm;
    const int64_t column = c.n * plan_.tile.bn;
    return {c.batch, row, column, min64(plan_.tile.bm, args_.problem.m - row),
            min64(plan_.tile.bn, args_.problem.n - column)};
  }

  void mainloop(const Segment& s, const TileBounds& t, Acc* acc, Acc* a_panels, Acc* b_panels) const {
    std::fill_n(acc, round_up(t.rows, kPanelRows) * ld_, Acc(0));
    const int64_t end = min64(s.k_end * plan_.tile.bk, args_.problem.k);
    for (int64_t k = s.k_begin * plan_.tile.bk; k < end; k += plan_.tile.bk) {
      multiply_(acc, ld_, operand(args_.a, t.batch, t.row, k), operand(args_.b, t.batch, k, t.column), t.rows,
                t.columns, min64(plan_.tile.bk, end - k), a_panels, b_panels);
    }
  }

  // acc = partials in K order + acc, element by element in this order on every run.
  void fix_up(const Segment& s, const TileBounds& t, Acc* acc) {
    for (int64_t slot = s.first_slot; slot < s.end_slot; ++slot) wait(slot, s.position);
    if (s.first_slot < 0) return;
    for (int64_t i = 0; i < t.rows; ++i) {
      Acc* sum = partial(s.first_slot) + i * ld_;  // read by this worker only, so summed up in place
      for (int64_t slot = s.first_slot + 1; slot < s.end_slot; ++slot) {
        const Acc* next = partial(slot) + i * ld_;
        for (int64_t j = 0; j < t.columns; ++j) sum[j] += next[j];
      }
      for (int64_t j = 0; j < t.columns; ++j) acc[i * ld_ + j] = sum[j] + acc[i * ld_ + j];
    }
  }

  void wait(int64_t slot, int64_t position) const {
    if (written_[slot].load(std::memory_order_acquire) != 0) return;
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    for (int64_t spin = 0; written_[slot].load(std::memory_order_acquire) == 0; ++spin) {
      if (failed_.load(std::memory_order_relaxed)) throw std::runtime_error("another thread has failed.");
      if (spin % 64 != 63) continue;
      std::this_thread::yield();  // its writer may need this core
      // Looked at once more: this thread may have been stopped since the last look.
      if (std::chrono::steady_clock::now() > deadline &&
          written_[slot].load(std::memory_order_acquire) == 0) {
        throw std::runtime_error(
            "streamk_gemm waited for " + std::to_string(timeout_.count()) + " ms for partial " +
            std::to_string(slot) + " of the tile at position " + std::to_string(position) +
            ", which no thread has written: the schedule is wrong, or a thread was stopped.");
      }
    }
  }

  const GemmArgs& args_;
  const MatrixView& mul_;
  const Plan& plan_;
  const std::chrono::milliseconds timeout_;
  const Multiply<Acc> multiply_;
  const int64_t ld_;
  const int64_t tile_elements_;
  const std::unique_ptr<Acc[]> partials_;       // [num_slots][rows][ld]
  std::vector<std::atomic<uint32_t>> written_;  // [num_slots], 1 when the partial may be read
  std::atomic<int64_t> next_ticket_{0};
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

template <typename Acc>
void run(const GemmArgs& args, const MatrixView& mul, const Plan& plan, const ExecutorOptions& options) {
  Executor<Acc> executor(args, mul, plan, options.timeout);
  const int64_t threads = max64(1, min64(options.threads, plan.schedule.workers));
  if (threads == 1) {
    executor.work();
  } else {
    options.launch(threads, [&] { executor.work(); });
  }
  executor.rethrow();
}

// The product with the gate first, unrounded; the other one's epilogue multiplies by its activation.
template <typename Acc>
void run_all(const GemmArgs& args, const Plan& plan, const ExecutorOptions& options) {
  if (args.gate.data == nullptr) return run<Acc>(args, {}, plan, options);
  const Problem& p = args.problem;
  const std::unique_ptr<Acc[]> scratch(new Acc[p.batch * p.m * p.n]);
  GemmArgs gate;
  gate.problem = p;
  gate.a = args.a;
  gate.b = args.gate;
  gate.alpha = args.alpha;
  gate.out = {scratch.get(), sizeof(Acc) == 8 ? DType::kFloat64 : DType::kFloat32, {p.m * p.n, p.n, 1}};
  run<Acc>(gate, {}, plan, options);
  run<Acc>(args, gate.out, plan, options);
}

}  // namespace

void launch_threads(int64_t threads, const std::function<void()>& body) {
  std::vector<std::jthread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(body);
  body();
}

void streamk_gemm(const GemmArgs& args, const Plan& plan, const ExecutorOptions& options) {
  if (plan.order.size() == 0) return;
  if (args.a.dtype == DType::kFloat64) {
    run_all<double>(args, plan, options);
  } else {
    run_all<float>(args, plan, options);
  }
}

Plan plan_gemm(const Problem& problem, const ScheduleKind* kind, int64_t workers, int64_t splits,
               int64_t threads, std::string_view tile) {
  // Large tiles pay for packing their operands; small ones keep more threads busy and waste less at the
  // edges.
  static constexpr TileShape kTiles[] = {
      {256, 256, 128}, {128, 128, 128}, {64, 64, 128}, {32, 256, 128}, {16, 64, 128}};
  constexpr int64_t kMinIters = 2;  // 256 of K: a partial costs less here than on a GPU
  const int64_t count = workers > 0 ? workers : max64(1, threads);
  const std::span<const TileShape> tiles = tiles_named(tile, kTiles);
  if (kind == nullptr) return choose_plan(problem, {count, cpu_cost.get(), kMinIters}, tiles);
  ScheduleOptions options;
  options.workers = count;
  options.splits = splits;
  options.min_iters = kMinIters;
  Plan best;
  for (const TileShape& t : tiles) {
    const Plan plan = make_plan(problem, t, *kind, options, cpu_cost.get());
    if (&t == tiles.data() || plan.predicted_us < best.predicted_us) best = plan;
  }
  return best;
}

}  // namespace tpk::cpu

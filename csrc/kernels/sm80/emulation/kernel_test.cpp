// Runs the portable kernel's own sources on the CPU (see cuda.hpp) over random problems and compares with
// double: loaders, main loop, fix-up, epilogue and scheduler, inputs surrounded by NaN, outputs by canaries,
// slots full of NaN.
//   g++ -std=c++20 -O2 -Icsrc/kernels/sm80/emulation -Icsrc csrc/kernels/sm80/emulation/kernel_test.cpp
//   -lpthread
//   ./a.out [trials [seed]]
// The include path of the emulation must come before csrc: two headers there stand in for the real ones.
#include "kernels/sm80/emulation/cuda.hpp"
//
#include <cmath>
#include <random>
#include <span>
#include <string>

#include "kernels/sm80/kernel.cuh"
#include "kernels/sm80/plan.hpp"

using namespace tpk;
using namespace tpk::sm80;

namespace {

std::mt19937 rng;

int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(rng() % (high - low + 1)); }

template <class T>
T pick(std::initializer_list<T> values) {
  return values.begin()[rng() % values.size()];
}

float normal() { return std::normal_distribution<float>()(rng); }

float get(ScalarKind kind, const unsigned char* p) {
  float f;
  uint16_t bits;
  if (kind == ScalarKind::kFp32) {
    std::memcpy(&f, p, 4);
    return f;
  }
  std::memcpy(&bits, p, 2);
  return kind == ScalarKind::kBf16 ? unpack_bf16(bits) : unpack_fp16(bits);
}

void put(ScalarKind kind, unsigned char* p, float f) {
  if (kind == ScalarKind::kFp32) {
    std::memcpy(p, &f, 4);
    return;
  }
  const auto bits = static_cast<uint16_t>(kind == ScalarKind::kBf16 ? pack_bf16(f, 0) : pack_fp16(f, 0));
  std::memcpy(p, &bits, 2);
}

enum class Memory { kRows, kCols, kRowsOdd, kStrided };  // what is contiguous, and whether it is aligned

// A matrix [batch, rows, cols] somewhere in a buffer of 0xff bytes, which are NaN in every type.
class Matrix {
 public:
  Matrix(int64_t batch, int64_t rows, int64_t cols, ScalarKind kind, Memory memory, bool broadcast = false)
      : batch(batch), rows(rows), cols(cols), kind(kind), bytes(bytes_of(kind)) {
    const int64_t line = 16 / bytes;
    const int64_t fast = memory == Memory::kCols ? rows : cols;
    const int64_t slow = memory == Memory::kCols ? cols : rows;
    const int64_t step = memory == Memory::kStrided ? 3 : 1;
    const bool aligned = memory == Memory::kRows || memory == Memory::kCols;
    const int64_t pitch = aligned ? (fast + line - 1) / line * line + line : step * fast + 1;
    row_stride = memory == Memory::kCols ? step : pitch;
    col_stride = memory == Memory::kCols ? pitch : step;
    batch_stride = pitch * (slow + 1) + (aligned ? 0 : 3);
    buffer.assign(static_cast<size_t>((batch * batch_stride + 64) * bytes), 0xff);
    first =
        buffer.data() + (16 - reinterpret_cast<uintptr_t>(buffer.data()) % 16) % 16 + (aligned ? 0 : bytes);
    if (broadcast) batch_stride = 0;
  }
  Matrix(const Matrix&) = delete;

  unsigned char* at(int64_t b, int64_t r, int64_t c) const {
    return first + bytes * (b * batch_stride + r * row_stride + c * col_stride);
  }
  float operator()(int64_t b, int64_t r, int64_t c) const { return get(kind, at(b, r, c)); }

  template <class Do>
  void each(Do body) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) body(b, r, c);
      }
    }
  }
  void fill() {
    each([&](int64_t b, int64_t r, int64_t c) { put(kind, at(b, r, c), normal()); });
  }
  // Bytes beside the elements that are no longer 0xff.
  int64_t overwritten() const {
    std::vector<char> own(buffer.size(), 0);
    each([&](int64_t b, int64_t r, int64_t c) { std::memset(&own[at(b, r, c) - buffer.data()], 1, bytes); });
    int64_t count = 0;
    for (size_t i = 0; i < buffer.size(); ++i) count += own[i] == 0 && buffer[i] != 0xff;
    return count;
  }

  int64_t batch, rows, cols;
  ScalarKind kind;
  int64_t bytes;
  int64_t batch_stride, row_stride, col_stride;  // elements
  std::vector<unsigned char> buffer;
  unsigned char* first;
};

int64_t used(int64_t extent, int64_t stride) { return extent > 1 ? stride : 0; }

// The launcher's classification (csrc/ops/streamk_cuda.cu), which needs torch, over again.
OperandLayout read_operand(const Matrix& t, bool outer_is_rows, Operand* o) {
  const int64_t outer = used(outer_is_rows ? t.rows : t.cols, outer_is_rows ? t.row_stride : t.col_stride);
  const int64_t k = used(outer_is_rows ? t.cols : t.rows, outer_is_rows ? t.col_stride : t.row_stride);
  const int64_t batch = used(t.batch, t.batch_stride);
  *o = {t.first, batch * 2, outer * 2, k * 2};
  const bool aligned = reinterpret_cast<uintptr_t>(t.first) % 16 == 0 && batch % 8 == 0;
  if (aligned && k <= 1 && outer % 8 == 0) return OperandLayout::kKMajor;
  if (aligned && outer <= 1 && k % 8 == 0) return OperandLayout::kOuterMajor;
  return OperandLayout::kStrided;
}

Output read_output(const Matrix& t) {
  const int64_t batch = used(t.batch, t.batch_stride);
  const int64_t row = used(t.rows, t.row_stride);
  const int64_t col = used(t.cols, t.col_stride);
  const bool vector = t.cols > 1 && t.col_stride == 1 && batch % 4 == 0 && row % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(t.first) % static_cast<uintptr_t>(4 * t.bytes) == 0;
  return {t.first, batch * t.bytes, row * t.bytes, col * t.bytes, vector};
}

double reference(Activation kind, double x) {
  switch (kind) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  }
  return x;
}

double rounding(ScalarKind kind) {
  return kind == ScalarKind::kBf16 ? 0x1p-8 : kind == ScalarKind::kFp16 ? 0x1p-11 : 0x1p-24;
}

using Kernel = void (*)(GemmParams);

template <class Tile, Element kElement>
Kernel find(OperandLayout a, OperandLayout b) {
  constexpr auto kK = OperandLayout::kKMajor;
  constexpr auto kOuter = OperandLayout::kOuterMajor;
  constexpr auto kAny = OperandLayout::kStrided;
  if (a == kAny || b == kAny) return &streamk_gemm_kernel<Tile, kElement, kAny, kAny>;
  if (a == kK && b == kK) return &streamk_gemm_kernel<Tile, kElement, kK, kK>;
  if (a == kK) return &streamk_gemm_kernel<Tile, kElement, kK, kOuter>;
  if (b == kK) return &streamk_gemm_kernel<Tile, kElement, kOuter, kK>;
  return &streamk_gemm_kernel<Tile, kElement, kOuter, kOuter>;
}

// One random problem; the number of wrong results.
template <class Tile, Element kElement>
int64_t trial(TileId id) {
  const ScalarKind element = kElement == Element::kBf16 ? ScalarKind::kBf16 : ScalarKind::kFp16;
  const auto kinds = {ScalarKind::kBf16, ScalarKind::kFp16, ScalarKind::kFp32};
  const auto memories = {Memory::kRows, Memory::kRows,    Memory::kCols,
                         Memory::kCols, Memory::kRowsOdd, Memory::kStrided};
  const auto batch = pick<int64_t>({1, 1, 1, 2, 3});
  const auto m = pick<int64_t>({1, 5, 64, 100, 129, 200});
  const auto n = pick<int64_t>({1, 3, 40, 64, 128, 131, 264});
  const auto k = pick<int64_t>({0, 1, 7, 32, 33, 100, 160, 300, 520});
  const ScalarKind out_kind = pick(kinds);
  const ScalarKind bias_kind = pick(kinds);
  const bool has_bias = between(0, 1) != 0;
  const bool has_preact = between(0, 1) != 0;

  Matrix a(batch, m, k, element, pick(memories), between(0, 4) == 0);
  Matrix b(batch, k, n, element, pick(memories), between(0, 4) == 0);
  Matrix bias(1, 1, n, bias_kind, pick(memories));
  Matrix out(batch, m, n, out_kind, pick(memories));
  Matrix preact(batch, m, n, out_kind, pick(memories));
  a.fill();
  b.fill();
  bias.fill();

  GemmParams p;
  p.problem = {m, n, k, batch};
  const OperandLayout layout_a = read_operand(a, true, &p.a);
  const OperandLayout layout_b = read_operand(b, false, &p.b);
  p.out = read_output(out);
  if (has_preact) p.preact = read_output(preact);
  if (has_bias) p.bias = bias.first;
  p.bias_stride = used(n, bias.col_stride) * bias.bytes;
  p.bias_kind = bias_kind;
  p.out_kind = out_kind;
  p.activation = static_cast<Activation>(between(0, 4));
  p.accumulate = between(0, 1) != 0;
  if (p.accumulate) out.fill();
  std::vector<float> old;
  out.each([&](int64_t i, int64_t r, int64_t c) { old.push_back(out(i, r, c)); });

  const std::string schedule = pick({"auto", "data_parallel", "stream_k", "stream_k", "split_k",
                                     "hybrid_first", "hybrid_last", "own_first", "every_shard"});
  const TileShape shape = tile_shape(id);
  ScheduleOptions options;
  options.workers = between(1, 9);
  options.splits = between(1, 4);
  options.min_iters = between(1, 4);
  const Plan plan = schedule == "auto"
                        ? choose_plan(p.problem, Machine{options.workers, kCostSm90}, std::span(&shape, 1))
                        : make_plan(p.problem, shape, parse_schedule_kind(schedule), options, kCostSm90);
  p.schedule = plan.schedule;
  p.order = plan.order;
  p.timeout_ns = 60'000'000'000;
  std::vector<uint32_t> flags(static_cast<size_t>(p.schedule.num_slots) + 1, 0);
  std::vector<float4> partials(static_cast<size_t>(p.schedule.num_slots * shape.bm * shape.bn / 4 + 1),
                               {NAN, NAN, NAN, NAN});
  p.ticket = &flags.back();
  p.flags = flags.data();
  p.partials = &partials.data()->x;
  const int grid = static_cast<int>(min64(p.schedule.workers, between(1, 4)));
  const Kernel kernel = find<Tile, kElement>(layout_a, layout_b);
  emulation::launch(grid, Tile::kThreads, [&] { kernel(p); });

  int64_t wrong = out.overwritten() + (has_preact ? preact.overwritten() : 0);
  size_t element_number = 0;
  out.each([&](int64_t i, int64_t r, int64_t c) {
    double sum = has_bias ? bias(0, 0, c) : 0;
    double size = std::abs(sum);
    for (int64_t j = 0; j < k; ++j) {
      const double product = static_cast<double>(a(i, r, j)) * b(i, j, c);
      sum += product;
      size += std::abs(product);
    }
    const auto close = [&](double got, double want) {
      return std::abs(got - want) <= 1e-5 * (size + 1) + 1.01 * rounding(out_kind) * (std::abs(want) + 0.01);
    };
    if (has_preact) wrong += !close(preact(i, r, c), sum);
    const double before = old[element_number++];
    wrong += !close(out(i, r, c), reference(p.activation, sum) + (p.accumulate ? before : 0));
  });
  if (wrong > 0) {
    std::printf(
        "%lld wrong: tile %d, element %d, batch %lld, m %lld, n %lld, k %lld, layouts %d %d, out %d, bias "
        "%d, "
        "preact %d, accumulate %d, activation %d, %s, workers %lld, slots %lld, grid %d\n",
        static_cast<long long>(wrong), Tile::kBM, static_cast<int>(kElement), static_cast<long long>(batch),
        static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
        static_cast<int>(layout_a), static_cast<int>(layout_b), static_cast<int>(out_kind), has_bias,
        has_preact, p.accumulate, static_cast<int>(p.activation), schedule.c_str(),
        static_cast<long long>(p.schedule.workers), static_cast<long long>(p.schedule.num_slots), grid);
  }
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 60;
  rng.seed(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
  int bad = 0;
  for (int i = 0; i < trials; ++i) {
    switch (between(0, 3)) {
      case 0:
        bad += trial<Tile128x128, Element::kBf16>(TileId::k128x128) > 0;
        break;
      case 1:
        bad += trial<Tile128x128, Element::kFp16>(TileId::k128x128) > 0;
        break;
      case 2:
        bad += trial<Tile64x64, Element::kBf16>(TileId::k64x64) > 0;
        break;
      default:
        bad += trial<Tile64x64, Element::kFp16>(TileId::k64x64) > 0;
        break;
    }
  }
  std::printf("sm80 kernel on the CPU: %d of %d problems wrong.\n", bad, trials);
  return bad > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

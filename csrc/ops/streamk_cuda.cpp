// torch.ops.tpkernels.streamk_gemm for CUDA: checks, then the kernel of the device's architecture. Stable
// ABI; no host synchronisation, so that it can be captured into CUDA graphs and used on several streams and
// devices at once.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <atomic>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gemm_call.hpp"
#include "kernels/grouped_calls.hpp"
#include "kernels/sm80/device.hpp"
#include "kernels/sm80/entry.hpp"
#include "kernels/sm80/plan.hpp"
#include "ops/gemm_arguments.hpp"
#include "ops/gpu_tiles.hpp"
#include "ops/grouped_arguments.hpp"
#include "ops/workspace.hpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using tpk::Element;
using tpk::GemmCall;
using tpk::GemmEntry;
using tpk::GemmOutcome;
using tpk::Matrix;
using tpk::ScalarKind;
using tpk::ops::GemmArguments;
using tpk::ops::GroupedArguments;
using tpk::ops::View;

constexpr const char* kOp = "tpkernels::streamk_gemm";

#define REQUIRE(ok, ...) TPK_REQUIRE(ok, kOp, ": ", __VA_ARGS__)

std::atomic<GemmEntry> hopper_entry{nullptr};

// entry: the address of a GemmEntry, from sm90a_entry; 0 detaches.
void attach_sm90a(int64_t entry) { hopper_entry.store(reinterpret_cast<GemmEntry>(entry)); }

bool is_float(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float ||
         type == ScalarType::Double;
}

ScalarKind kind_of(ScalarType type) {
  return type == ScalarType::Double  ? ScalarKind::kFp64
         : type == ScalarType::Float ? ScalarKind::kFp32
         : type == ScalarType::Half  ? ScalarKind::kFp16
                                     : ScalarKind::kBf16;
}

Element element_of(ScalarType type, bool allow_tf32) {
  switch (kind_of(type)) {
    case ScalarKind::kFp64:
      return Element::kFp64;
    case ScalarKind::kFp32:
      return allow_tf32 ? Element::kTf32 : Element::kFp32;
    case ScalarKind::kFp16:
      return Element::kFp16;
    default:
      return Element::kBf16;
  }
}

const tpk::ops::GemmRules& rules() {
  static const tpk::ops::GemmRules rules{kOp,
                                         "CUDA",
                                         aoti_torch_device_type_cuda(),
                                         is_float,
                                         is_float,
                                         "bfloat16, float16, float32 or float64 for the CUDA kernels",
                                         "bfloat16, float16, float32 or float64"};
  return rules;
}

// [N], [rows, cols] or [batch, rows, cols]; nothing if there is no such tensor.
Matrix matrix_of(const View& v) {
  Matrix m;
  if (!v.exists()) return m;
  m.data = v.data;
  m.kind = kind_of(v.type);
  m.col_stride = v.stride(v.dim - 1);
  if (v.dim > 1) m.row_stride = v.stride(v.dim - 2);
  if (v.dim > 2) m.batch_stride = v.stride(0);
  return m;
}

GemmCall call_of(const GemmArguments& g, bool allow_tf32) {
  GemmCall c;
  c.problem = g.problem;
  c.element = element_of(g.a.type, allow_tf32);
  c.a = matrix_of(g.a);
  c.b = matrix_of(g.b);
  c.gate = matrix_of(g.gate);
  c.bias = matrix_of(g.bias);
  c.residual = matrix_of(g.residual);
  c.out = matrix_of(g.out);
  c.preact = matrix_of(g.preact);
  if (g.problem.k == 0) {
    // Nothing is read, but addresses are formed, an empty tensor may have none, and null means no gate.
    c.a.data = c.b.data = c.out.data;
    if (g.gate.exists()) c.gate.data = c.out.data;
  }
  return c;
}

// Nothing is read of operands when K = 0, but addresses are formed, and an empty tensor may have none.
GemmCall call_of(const GroupedArguments& g, bool allow_tf32) {
  GemmCall c;
  c.problem = g.problem;
  c.element = element_of(g.a.type, allow_tf32);
  c.a = matrix_of(g.a);
  c.b = matrix_of(g.b);
  c.gate = matrix_of(g.gate);
  c.bias = matrix_of(g.bias);
  std::swap(c.bias.batch_stride, c.bias.row_stride);  // a row of it for each group
  c.out = matrix_of(g.out);
  c.preact = matrix_of(g.preact);
  if (g.problem.k == 0) {
    c.a.data = c.b.data = c.out.data;
    if (g.gate.exists()) c.gate.data = c.out.data;
  }
  return c;
}

// m from a row and a matrix of its batch on.
Matrix part_of(Matrix m, int64_t matrix, int64_t row) {
  if (m.data == nullptr) return m;
  const int64_t elements = matrix * m.batch_stride + row * m.row_stride;
  m.data = static_cast<char*>(m.data) + elements * tpk::bytes_of(m.kind);
  return m;
}

// The product of one group of rows.
GemmCall group_of(const GemmCall& all, int64_t group, int64_t begin, int64_t rows) {
  GemmCall c = all;
  c.problem.m = rows;
  if (c.problem.k > 0) {
    c.a = part_of(all.a, 0, begin);
    c.b = part_of(all.b, group, 0);
    c.gate = part_of(all.gate, group, 0);
  }
  c.bias = part_of(all.bias, group, 0);
  c.out = part_of(all.out, 0, begin);
  c.preact = part_of(all.preact, 0, begin);
  return c;
}

// Bound of a wait inside the kernel. Waits are for CTAs that already run, so microseconds are usual.
uint64_t timeout_ns() {
  static const uint64_t ns = [] { return static_cast<uint64_t>(tpk::ops::timeout_seconds(30.0) * 1e9); }();
  return ns;
}

void* current_stream(int device) {
  void* stream = nullptr;
  REQUIRE(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
          "torch could not name the current CUDA stream.");
  return stream;
}

tpk::sm80::DeviceFacts facts_of(int device) {
  try {
    return tpk::sm80::DeviceCache::instance().facts(device);
  } catch (const std::runtime_error& error) {
    REQUIRE(false, error.what());
  }
  return {};
}

// Whether the Hopper kernel knows all types of a call: it has no wide operands, and nothing in fp64.
bool is_for_hopper(const GemmCall& c) {
  for (const Matrix* m : {&c.bias, &c.residual, &c.out, &c.preact}) {
    if (m->data != nullptr && m->kind == ScalarKind::kFp64) return false;
  }
  return c.element == Element::kBf16 || c.element == Element::kFp16;
}

// The Hopper kernel where there is one, for what it knows, unless the tile is another's; the portable kernel
// for all else, and where that one refuses.
void run(const GemmCall& c, const tpk::sm80::DeviceFacts& facts, tpk::ops::Workspace workspace) {
  const bool names_hopper = tpk::ops::is_hopper_tile(c.tile);
  const GemmEntry hopper = facts.major == 9 && facts.minor == 0 ? hopper_entry.load() : nullptr;
  REQUIRE(!names_hopper || hopper != nullptr, "tile '", c.tile, "' is one of the Hopper kernel, which ",
          facts.major == 9 && facts.minor == 0 ? "was not built or not loaded"
                                               : "runs on compute capability 9.0 only",
          ": take ", tpk::sm80::tile_names(c.element), ", or '' for the cheapest.");
  REQUIRE(!names_hopper || is_for_hopper(c), "tile '", c.tile,
          "' is one of the Hopper kernel, which takes bfloat16 and float16, and nothing in float64: take ",
          tpk::sm80::tile_names(c.element), ", or '' for the cheapest.");
  const tpk::Allocator allocator = workspace.allocator();
  void* const stream = current_stream(c.device);
  char message[1024] = "";
  GemmOutcome outcome = GemmOutcome::kRefused;
  if (hopper != nullptr && is_for_hopper(c) && (c.tile.empty() || names_hopper)) {
    outcome = hopper(c, stream, allocator, message, sizeof message);
    REQUIRE(outcome != GemmOutcome::kRefused || !names_hopper, "tile '", c.tile,
            "' cannot be used here: ", static_cast<const char*>(message));
  }
  if (outcome == GemmOutcome::kRefused) {
    outcome = tpk::sm80::run_gemm(c, stream, allocator, message, sizeof message);
  }
  REQUIRE(outcome == GemmOutcome::kDone, static_cast<const char*>(message));
}

// All groups in one launch of the Hopper kernel, or as few as there can be. False if it is not here, or
// refuses one: all have to be made in another way.
bool run_groups(GemmCall c, const tpk::sm80::DeviceFacts& facts, const std::vector<int64_t>& sizes,
                tpk::ops::Workspace workspace) {
  const GemmEntry hopper = facts.major == 9 && facts.minor == 0 ? hopper_entry.load() : nullptr;
  if (hopper == nullptr || !is_for_hopper(c) || !(c.tile.empty() || tpk::ops::is_hopper_tile(c.tile)))
    return false;
  if (c.problem.m > std::numeric_limits<int32_t>::max()) return false;
  void* const stream = current_stream(c.device);
  for (const tpk::GroupedRows& groups : tpk::grouped_calls(sizes)) {
    c.groups = &groups;
    char message[1024] = "";
    const GemmOutcome outcome = hopper(c, stream, workspace.allocator(), message, sizeof message);
    if (outcome == GemmOutcome::kRefused) return false;
    REQUIRE(outcome == GemmOutcome::kDone, static_cast<const char*>(message));
  }
  return true;
}

// What a call is told beside its tensors, checked.
void set_plan(GemmCall& c, const std::string& schedule, int64_t workers, int64_t splits,
              const std::string& tile, int64_t multiprocessors, const tpk::sm80::DeviceFacts& facts) {
  c.schedule = schedule;
  c.tile = tile;
  c.workers = workers;
  c.splits = splits;
  c.timeout_ns = timeout_ns();
  try {
    if (schedule != "auto") tpk::parse_schedule_kind(schedule);
    tpk::ops::check_gpu_tile(tile, c.element);
  } catch (const std::invalid_argument& error) {
    REQUIRE(false, error.what());
  }
  REQUIRE(facts.major >= 8, "the device must have compute capability 8.0 or later, but cuda:", c.device,
          " has ", facts.major, ".", facts.minor, ": use path 'cublas'.");
  REQUIRE(multiprocessors <= facts.multiprocessors, "multiprocessors must be 0 (all) to ",
          facts.multiprocessors, ", what cuda:", c.device, " has, but it is ", multiprocessors, ".");
  c.multiprocessors = multiprocessors > 0 ? static_cast<int>(multiprocessors) : facts.multiprocessors;
}

// The device made current, if it is not.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    int current = -1;
    (void)cudaGetDevice(&current);
    if (current != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

void streamk_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& preact, const std::string& activation, bool accumulate,
                  const std::string& schedule, int64_t workers, int64_t splits, const std::string& tile,
                  const std::optional<Tensor>& gate, const std::optional<Tensor>& residual, double alpha,
                  int64_t multiprocessors, bool allow_tf32) {
  const GemmArguments g = tpk::ops::check_gemm(rules(), a, b, bias, out, preact, gate, residual, workers,
                                               splits, multiprocessors);
  GemmCall c = call_of(g, allow_tf32);
  c.alpha = alpha;
  c.activation = tpk::ops::parse_activation(kOp, activation);
  c.accumulate = accumulate;
  c.device = g.a.device_index;
  const tpk::sm80::DeviceFacts facts = facts_of(c.device);
  set_plan(c, schedule, workers, splits, tile, multiprocessors, facts);
  if (g.out.is_empty()) return;
  const CurrentDevice current(c.device);
  run(c, facts, tpk::ops::Workspace(a));
}

void streamk_gemm_grouped(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                          const Tensor& out, const std::optional<Tensor>& preact,
                          const std::string& activation, const std::vector<int64_t>& group_sizes,
                          const std::string& schedule, int64_t workers, int64_t splits,
                          const std::string& tile, int64_t multiprocessors, const std::optional<Tensor>& gate,
                          bool allow_tf32) {
  tpk::ops::GemmRules rules_of_groups = rules();
  rules_of_groups.op = "tpkernels::streamk_gemm_grouped";
  const GroupedArguments g = tpk::ops::check_grouped(rules_of_groups, a, b, bias, out, preact, gate,
                                                     group_sizes, workers, splits, multiprocessors);
  GemmCall c = call_of(g, allow_tf32);
  c.activation = tpk::ops::parse_activation(kOp, activation);
  c.device = g.a.device_index;
  const tpk::sm80::DeviceFacts facts = facts_of(c.device);
  set_plan(c, schedule, workers, splits, tile, multiprocessors, facts);
  if (g.out.is_empty()) return;
  const CurrentDevice current(c.device);
  if (run_groups(c, facts, group_sizes, tpk::ops::Workspace(a))) return;
  tpk::ops::for_each_group(group_sizes, [&](int64_t group, int64_t begin, int64_t rows) {
    run(group_of(c, group, begin, rows), facts, tpk::ops::Workspace(a));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("streamk_gemm", TORCH_BOX(&streamk_gemm));
  m.impl("streamk_gemm_grouped", TORCH_BOX(&streamk_gemm_grouped));
}

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("attach_sm90a", TORCH_BOX(&attach_sm90a));
}

// torch.ops.tpkernels.fused_matmul_reduce_scatter and fused_matmul_all_reduce: one rank's part of a product
// that is summed over ranks. Partial rows travel by the copy engine while the Hopper kernel computes the
// next; the owner's epilogue adds them. See sm90a_fused_gather.cpp.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "ops/fused_group.hpp"

namespace {

using namespace tpk::ops;
using tpk::GemmCall;
using tpk::GemmHooks;

constexpr const char* kAllReduce = "tpkernels::fused_matmul_all_reduce";
constexpr const char* kReduce = "tpkernels::fused_matmul_reduce_scatter";

// What a product with a departure is given: the sums of own rows go to `out`, [own rows, N rounded up].
struct Departure {
  const char* op;
  const Tensor& a;
  const Tensor& b;
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& residual;
  tpk::Matrix out;
  const Tensor& send;
  bool sends_own = false;  // the sums of own rows go on to other ranks
};

// A partial product sent to the owners of its rows, whose epilogues add what they receive.
class Scatter {
 public:
  Scatter(const Departure& d, const Group& g, const std::vector<int64_t>& shard_rows)
      : d_(d), g_(g), shard_rows_(shard_rows) {
    const int64_t bytes = tpk::bytes_of(d.out.kind);
    pitch_ = round_up(d.b.size(1), 16 / bytes);
    row_bytes_ = static_cast<size_t>(pitch_ * bytes);
    slot_rows_ = *std::max_element(shard_rows.begin(), shard_rows.end());
  }

  int64_t pitch() const { return pitch_; }
  Rows slot(int owner, int sender) const {
    return Rows{g_.page(owner).buffer(), row_bytes_}.from(sender * slot_rows_);
  }
  // Behind the slots.
  Rows results(int owner) const { return slot(owner, g_.world()); }

  // Checks everything that can be wrong with the call, so that it comes out before others wait for it.
  void prepare(const std::string& schedule, const std::string& tile, int64_t multiprocessors, int device) {
    const int64_t m = g_.total();
    const int64_t n = d_.b.size(1);
    const int64_t k = d_.a.size(1);
    check_matrix(d_.op, "a", d_.a, m, k);
    check_matrix(d_.op, "b", d_.b, k, n);
    check_matrix(d_.op, "send", d_.send, m, pitch_);
    TPK_REQUIRE(n > 0 && k > 0, d_.op, ": K and N must be above 0: there is nothing to launch.");
    TPK_REQUIRE(d_.b.scalar_type() == d_.a.scalar_type(), d_.op, ": b must be of a's dtype.");
    TPK_REQUIRE(d_.send.is_contiguous() && tpk::ops::kind_of(d_.send) == d_.out.kind, d_.op,
                ": send must be contiguous and of out's dtype.");
    if (d_.bias) {
      TPK_REQUIRE(d_.bias->is_cuda() && d_.bias->dim() == 1 && d_.bias->size(0) == n, d_.op,
                  ": bias must be a CUDA tensor [N].");
    }
    const int64_t own = g_.rows_of(g_.rank());
    if (d_.residual) {
      check_matrix(d_.op, "residual", *d_.residual, own, pitch_);
      TPK_REQUIRE(d_.residual->is_contiguous() && tpk::ops::kind_of(*d_.residual) == d_.out.kind, d_.op,
                  ": residual must be contiguous and of out's dtype.");
    }

    tpk::DoorbellHook& bells = hooks_.doorbell;
    bells.counters = g_.mine().counter(0);
    bells.bells = g_.mine().bell(0);
    bells.num_chunks = g_.world();
    if (!d_.sends_own) bells.silent = g_.rank();
    std::copy(g_.rows.row_end, g_.rows.row_end + g_.world(), bells.row_end);
    hooks_.departure.ranks = g_.rows;
    hooks_.departure.others = {d_.send.data_ptr(), 0, pitch_, 1, d_.out.kind};
    hooks_.departure.addends_before = g_.rank();
    const int64_t first = g_.rows.begin(g_.rank());
    for (int peer = 0; own > 0 && peer < g_.world(); ++peer) {
      if (peer == g_.rank()) continue;
      tpk::Addend& t = hooks_.sum.addends[hooks_.sum.count++];
      t.data = slot(g_.rank(), peer).from(-first).data;  // addressed by row of M
      t.row_stride = static_cast<int64_t>(row_bytes_);
      t.col_stride = tpk::bytes_of(d_.out.kind);
      t.kind = d_.out.kind;
      t.flags = g_.mine().arrived(peer);
      t.epoch = g_.mine().epoch();
    }
    call_.problem = {m, n, k, 1};
    call_.element = tpk::ops::element_of(d_.op, d_.a);
    call_.a = matrix_of(d_.a);
    call_.b = matrix_of(d_.b);
    call_.out = d_.out;
    if (d_.bias) call_.bias = matrix_of(*d_.bias);
    if (d_.residual && own > 0) call_.residual = matrix_of(*d_.residual);
    call_.hooks = &hooks_;
    set_plan(call_, schedule, tile, multiprocessors, g_, device);
    (void)tpk::ops::tile_rows(d_.op, call_);
  }

  // The product, and behind it, rank by rank, what the others own of it.
  void run(CopyEngine::Call& engine) const {
    tpk::ops::run_hopper(d_.op, call_, d_.a, g_.stream);
    struct Pushes {
      CopyEngine::Call& engine;
      const Scatter& s;
      bool take_bell(int owner) {
        engine.take_bell(s.g_.mine().bell(owner));
        return true;
      }
      void copy(int owner) {
        engine.copy(s.slot(owner, s.g_.rank()),
                    Rows{s.d_.send.data_ptr(), s.row_bytes_}.from(s.g_.rows.begin(owner)), s.row_bytes_,
                    s.g_.rows_of(owner));
      }
      void raise(int owner, int index) { engine.raise(s.g_.page(owner).arrived(index), s.g_.mine().epoch()); }
    } pushes{engine, *this};
    tpk::protocol::push_scatter(pushes, shard_rows_, g_.rank());
  }

 private:
  const Departure& d_;
  const Group& g_;
  const std::vector<int64_t>& shard_rows_;
  int64_t pitch_ = 0;
  size_t row_bytes_ = 0;
  int64_t slot_rows_ = 0;
  GemmHooks hooks_;
  GemmCall call_;
};

void fused_matmul_reduce_scatter(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& residual, const Tensor& out, const Tensor& send,
                                 const std::vector<int64_t>& shard_rows, int64_t rank,
                                 const std::vector<int64_t>& addresses, double timeout_s,
                                 const std::string& schedule, const std::string& tile,
                                 int64_t multiprocessors) {
  TPK_REQUIRE(a.is_cuda() && a.dim() == 2 && b.dim() == 2, kReduce,
              ": a and b must be CUDA tensors [M, K] and [K, N].");
  const auto device = a.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kReduce, shard_rows, rank, addresses, timeout_s, device);
  const Departure departure{kReduce, a, b, bias, residual, matrix_of(out), send};
  Scatter scatter(departure, g, shard_rows);
  check_matrix(kReduce, "out", out, g.rows_of(g.rank()), scatter.pitch());
  TPK_REQUIRE(out.is_contiguous(), kReduce, ": out must be contiguous.");
  scatter.prepare(schedule, tile, multiprocessors, device);

  launch_sync(kReduce, tpk::sm90a::enter_function(), g);
  CopyEngine::Call engine(CopyEngine::of(device), g.stream);
  scatter.run(engine);
  engine.join();
  launch_sync(kReduce, tpk::sm90a::leave_function(), g);
}

// The owner of some rows sends their sums to all, through a buffer of results [M, N rounded up to 16 bytes]
// behind the slots.
void fused_matmul_all_reduce(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& residual, const Tensor& out, const Tensor& send,
                             const std::vector<int64_t>& shard_rows, int64_t rank,
                             const std::vector<int64_t>& addresses, double timeout_s,
                             const std::string& schedule, const std::string& tile, int64_t multiprocessors) {
  TPK_REQUIRE(a.is_cuda() && a.dim() == 2 && b.dim() == 2, kAllReduce,
              ": a and b must be CUDA tensors [M, K] and [K, N].");
  const auto device = a.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kAllReduce, shard_rows, rank, addresses, timeout_s, device);
  const int64_t n = b.size(1);
  check_matrix(kAllReduce, "out", out, g.total(), n);
  TPK_REQUIRE(out.is_contiguous(), kAllReduce, ": out must be contiguous.");
  const int64_t bytes = tpk::bytes_of(tpk::ops::kind_of(out));
  Departure departure{kAllReduce, a, b, bias, residual, matrix_of(out), send, true};
  Scatter scatter(departure, g, shard_rows);
  const Rows results = scatter.results(g.rank());
  const int64_t first = g.rows.begin(g.rank());
  departure.out = {results.from(first).data, 0, static_cast<int64_t>(results.pitch) / bytes, 1,
                   tpk::ops::kind_of(out)};
  scatter.prepare(schedule, tile, multiprocessors, device);

  launch_sync(kAllReduce, tpk::sm90a::enter_function(), g);
  CopyEngine::Call engine(CopyEngine::of(device), g.stream);
  scatter.run(engine);
  constexpr int kResults = tpk::protocol::kMaxRanks;  // words behind those of the slots
  const auto row_bytes = static_cast<size_t>(n * bytes);
  if (g.rows_of(g.rank()) > 0) engine.take_bell(g.mine().bell(g.rank()));
  uint32_t with_rows = 0;
  for (int step = 1; step < g.world(); ++step) {
    const int peer = tpk::protocol::gather_peer(g.rank(), step, g.world());
    if (g.rows_of(peer) > 0) with_rows |= 1u << peer;
    if (g.rows_of(g.rank()) == 0) continue;
    engine.copy(scatter.results(peer).from(first), results.from(first), row_bytes, g.rows_of(g.rank()));
    engine.raise(g.page(peer).arrived(kResults + g.rank()), g.mine().epoch());
  }
  int32_t words = kResults;
  launch_sync(kAllReduce, tpk::sm90a::wait_function(), g, {&words, &with_rows});
  const cudaError_t error =
      cudaMemcpy2DAsync(out.data_ptr(), row_bytes, results.data, results.pitch, row_bytes,
                        static_cast<size_t>(g.total()), cudaMemcpyDeviceToDevice, g.stream);
  TPK_REQUIRE(error == cudaSuccess, kAllReduce, ": cudaMemcpy2DAsync failed: ", cudaGetErrorString(error),
              ".");
  engine.join();
  launch_sync(kAllReduce, tpk::sm90a::leave_function(), g);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_matmul_reduce_scatter", TORCH_BOX(&fused_matmul_reduce_scatter));
  m.impl("fused_matmul_all_reduce", TORCH_BOX(&fused_matmul_all_reduce));
}

// torch.ops.tpkernels.fused_matmul_reduce_scatter and fused_matmul_all_reduce: one rank's part of a product
// that is summed over ranks. Partial rows travel by the copy engine while the Hopper kernel computes the
// next; the owner's epilogue adds them. See sm90a_fused_gather.cpp.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "kernels/sm90a/operands.hpp"
#include "ops/fused_chunks.hpp"
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
  const std::optional<Tensor>& send;  // none: the product stores tiles in other ranks' memory
  const Tensors& more_a;
  const Tensors& more_b;
  bool sends_own = false;  // the sums of own rows go on to other ranks
};

// A partial product sent to the owners of its rows, whose epilogues add what they receive.
class Scatter {
 public:
  Scatter(const Departure& d, const Group& g, const std::vector<int64_t>& shard_rows)
      : d_(d), g_(g), workspace_(d.a) {
    const int64_t bytes = tpk::bytes_of(d.out.kind);
    pitch_ = tpk::ops::departing_pitch(d.b.size(1), bytes);
    row_bytes_ = static_cast<size_t>(pitch_ * bytes);
    slot_rows_ = *std::max_element(shard_rows.begin(), shard_rows.end());
    chunks_ = tpk::ops::departing_chunks(shard_rows, d.b.size(1), bytes, d.sends_own, !d.send);
    order_ = tpk::protocol::leaving_order(chunks_, g.rank(), g.world(), d.sends_own);
  }

  int64_t pitch() const { return pitch_; }
  const tpk::protocol::ChunkList& chunks() const { return chunks_; }
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
    TPK_REQUIRE(n > 0 && k > 0, d_.op, ": K and N must be above 0: there is nothing to launch.");
    TPK_REQUIRE(d_.b.scalar_type() == d_.a.scalar_type(), d_.op, ": b must be of a's dtype.");
    if (d_.send) {
      check_matrix(d_.op, "send", *d_.send, m, pitch_);
      TPK_REQUIRE(d_.send->is_contiguous() && tpk::ops::kind_of(*d_.send) == d_.out.kind, d_.op,
                  ": send must be contiguous and of out's dtype.");
    }
    if (d_.bias) {
      TPK_REQUIRE(d_.bias->is_cuda() && d_.bias->dim() == 1 && d_.bias->size(0) == n, d_.op,
                  ": bias must be a CUDA tensor [N].");
    }
    const int64_t own = g_.rows_of(g_.rank());
    if (d_.residual) {
      check_matrix(d_.op, "residual", *d_.residual, own, pitch_);
      TPK_REQUIRE(d_.residual->is_contiguous() && tpk::ops::kind_of(*d_.residual) == d_.out.kind, d_.op,
                  ": residual must be contiguous and of out's dtype.");
      TPK_REQUIRE(reinterpret_cast<uintptr_t>(d_.residual->data_ptr()) % 16 == 0, d_.op,
                  ": residual must begin at a multiple of 16 bytes.");
    }

    const int32_t first_own = chunks_.first[g_.rank()];
    tpk::DoorbellHook& bells = hooks_.doorbell;
    bells.counters = g_.mine().counter(0);
    bells.bells = g_.mine().bell(0);
    bells.num_chunks = chunks_.count;
    if (!d_.sends_own) {
      bells.silent_begin = first_own;
      bells.silent_end = chunks_.first[g_.rank() + 1];
    }
    std::copy(chunks_.row_end, chunks_.row_end + chunks_.count, bells.row_end);
    tpk::DepartureHook& departure = hooks_.departure;
    departure.ranks = g_.rows;
    departure.others = {d_.send ? d_.send->data_ptr() : nullptr, 0, pitch_, 1, d_.out.kind};
    if (!d_.send) store_in_peers(bells, departure);
    departure.slots = slot(g_.rank(), 0).data;
    departure.row_stride = static_cast<int64_t>(row_bytes_);
    departure.slot_stride = slot_rows_ * departure.row_stride;
    departure.arrived = g_.mine().arrived(0);
    departure.epoch = g_.mine().epoch();
    departure.ticket = g_.mine().ticket();
    departure.own_chunks = chunks_.of_rank(g_.rank());
    for (int32_t i = 0; i < departure.own_chunks; ++i) {
      departure.own_chunk_end[i] = chunks_.row_end[first_own + i] - g_.rows.begin(g_.rank());
    }
    for (const int32_t c : order_)
      departure.blocks[departure.num_blocks++] = {chunks_.begin(c), chunks_.row_end[c]};
    call_.problem = {m, n, k, 1};
    call_.element = tpk::ops::element_of(d_.op, d_.a);
    call_.a = matrix_of(d_.a);
    call_.b = matrix_of(d_.b);
    tpk::ops::set_more(d_.op, call_, d_.a, d_.more_a, d_.more_b);
    call_.out = d_.out;
    if (d_.bias) call_.bias = matrix_of(*d_.bias);
    if (d_.residual && own > 0) call_.residual = matrix_of(*d_.residual);
    // TMA takes boxes whose first column is a multiple of 16 bytes, also where columns are rows of a.
    const auto view = tpk::sm90a::view_operand(call_.a, 1, m, call_.a.row_stride, k, call_.a.col_stride);
    for (int r = 0; view && view->major == tpk::sm90a::Major::kOuter && r < g_.world(); ++r) {
      TPK_REQUIRE(g_.rows.begin(r) % 8 == 0, d_.op, ": a must have K contiguous, as shard ", r,
                  " begins at row ", g_.rows.begin(r), ", which is no multiple of 8.");
    }
    call_.hooks = &hooks_;
    set_plan(call_, schedule, tile, multiprocessors, g_, device);
    (void)tpk::ops::prepare_hopper(d_.op, call_, workspace_);
  }

  // The product, and behind it, chunk by chunk, what the others own of it, and the sums that go to all.
  void run(int device) {
    if (d_.send) engine_.emplace(CopyEngine::of(device), g_.stream);  // beside the product, not behind it
    tpk::ops::run_hopper(d_.op, call_, workspace_, g_.stream);
    if (d_.send) push(*engine_);
  }
  void join() {
    if (engine_) engine_->join();
  }

 private:
  void push(CopyEngine::Call& engine) {
    struct Pushes {
      CopyEngine::Call& engine;
      const Scatter& s;
      void use(int stream) { engine.use(stream); }
      bool take_bell(int32_t chunk) {
        engine.take_bell(s.g_.mine().bell(chunk));
        return true;
      }
      void push(int owner, int32_t chunk, int index) {
        const int32_t begin = s.chunks_.begin(chunk);
        engine.push(s.slot(owner, s.g_.rank()).from(begin - s.g_.rows.begin(owner)),
                    Rows{s.d_.send->data_ptr(), s.row_bytes_}.from(begin), s.row_bytes_,
                    s.chunks_.rows(chunk), s.g_.page(owner).arrived(index), s.g_.mine().epoch());
      }
      void send_sums(int32_t chunk) {
        const int64_t begin = s.chunks_.begin(chunk);
        for (int step = 1; step < s.g_.world(); ++step) {
          const int peer = tpk::protocol::gather_peer(s.g_.rank(), step, s.g_.world());
          const Rows from = Rows{s.d_.out.data, s.row_bytes_}.from(begin - s.g_.rows.begin(s.g_.rank()));
          engine.push(s.results(peer).from(begin), from, s.row_bytes_, s.chunks_.rows(chunk),
                      s.g_.page(peer).sums(chunk), s.g_.mine().epoch());
        }
      }
    } pushes{engine, *this};
    tpk::protocol::push_scatter(pushes, chunks_, order_, g_.rank(), d_.sends_own);
  }

  // Where tiles go in other ranks' memory, and who is told.
  void store_in_peers(tpk::DoorbellHook& bells, tpk::DepartureHook& departure) const {
    tpk::PeerWords& words = bells.peers;
    words.epoch = g_.mine().epoch();
    words.rank = g_.rank();
    for (int r = 0; r < g_.world(); ++r) words.pages[r] = g_.page(r).words;
    for (int32_t c = 0; c < chunks_.count; ++c) {
      const tpk::protocol::Told told = tpk::protocol::told_of(chunks_, g_.rank(), g_.world(), c);
      words.word[c] = static_cast<int16_t>(told.word);
      words.first[c] = static_cast<int8_t>(told.first);
      words.end[c] = static_cast<int8_t>(told.end);
    }
    tpk::StoredHook& stored = departure.stored;
    stored.on = true;
    for (int step = 1; step < g_.world(); ++step) {
      const int peer = tpk::protocol::scatter_peer(g_.rank(), step, g_.world());
      stored.slots[peer] = slot(peer, g_.rank()).from(-g_.rows.begin(peer)).data;
      if (d_.sends_own) stored.sums[stored.num_sums++] = results(peer).data;
    }
  }

  const Departure& d_;
  const Group& g_;
  int64_t pitch_ = 0;
  size_t row_bytes_ = 0;
  int64_t slot_rows_ = 0;
  tpk::protocol::ChunkList chunks_;
  std::vector<int32_t> order_;  // of chunks, in time
  GemmHooks hooks_;
  GemmCall call_;
  Workspace workspace_;
  std::optional<CopyEngine::Call> engine_;
};

void fused_matmul_reduce_scatter(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& residual, const Tensor& out,
                                 const std::optional<Tensor>& send, const std::vector<int64_t>& shard_rows,
                                 int64_t rank, const std::vector<int64_t>& addresses, double timeout_s,
                                 const std::string& schedule, const std::string& tile,
                                 int64_t multiprocessors, const Tensors& more_a, const Tensors& more_b) {
  TPK_REQUIRE(a.is_cuda() && a.dim() == 2 && b.dim() == 2, kReduce,
              ": a and b must be CUDA tensors [M, K] and [K, N].");
  const auto device = a.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kReduce, shard_rows, rank, addresses, timeout_s, device);
  const Departure departure{kReduce, a, b, bias, residual, matrix_of(out), send, more_a, more_b};
  Scatter scatter(departure, g, shard_rows);
  check_matrix(kReduce, "out", out, g.rows_of(g.rank()), scatter.pitch());
  TPK_REQUIRE(out.is_contiguous(), kReduce, ": out must be contiguous.");
  scatter.prepare(schedule, tile, multiprocessors, device);

  launch_sync(kReduce, tpk::sm90a::enter_function(), g);
  scatter.run(device);
  scatter.join();
}

// The owner of some rows sends their sums to all, through a buffer of results [M, N rounded up to 16 bytes]
// behind the slots, from which they are copied to `out` as they arrive. Its own ones go straight there,
// unless rows of `out` have no room for whole units.
void fused_matmul_all_reduce(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& residual, const Tensor& out,
                             const std::optional<Tensor>& send, const std::vector<int64_t>& shard_rows,
                             int64_t rank, const std::vector<int64_t>& addresses, double timeout_s,
                             const std::string& schedule, const std::string& tile, int64_t multiprocessors,
                             const Tensors& more_a, const Tensors& more_b) {
  TPK_REQUIRE(a.is_cuda() && a.dim() == 2 && b.dim() == 2, kAllReduce,
              ": a and b must be CUDA tensors [M, K] and [K, N].");
  const auto device = a.get_device_index();
  const DeviceGuard guard(device);
  const Group g = group_of(kAllReduce, shard_rows, rank, addresses, timeout_s, device);
  const int64_t n = b.size(1);
  check_matrix(kAllReduce, "out", out, g.total(), n);
  TPK_REQUIRE(out.is_contiguous(), kAllReduce, ": out must be contiguous.");
  const int64_t bytes = tpk::bytes_of(tpk::ops::kind_of(out));
  Departure departure{kAllReduce, a, b, bias, residual, matrix_of(out), send, more_a, more_b, true};
  Scatter scatter(departure, g, shard_rows);
  const auto row_bytes = static_cast<size_t>(n * bytes);
  const Rows results = scatter.results(g.rank());
  const bool direct = row_bytes == results.pitch && reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0;
  const Rows sums = direct ? Rows{out.data_ptr(), row_bytes} : results;
  departure.out = {sums.from(g.rows.begin(g.rank())).data, 0, scatter.pitch(), 1, tpk::ops::kind_of(out)};
  scatter.prepare(schedule, tile, multiprocessors, device);

  launch_sync(kAllReduce, tpk::sm90a::enter_function(), g);
  scatter.run(device);
  tpk::sm90a::CollectParams collect{scatter.chunks(),
                                    static_cast<const char*>(results.data),
                                    static_cast<int64_t>(results.pitch),
                                    static_cast<char*>(out.data_ptr()),
                                    static_cast<int64_t>(row_bytes),
                                    !direct};
  launch_sync(kAllReduce, tpk::sm90a::collect_function(), g, &collect,
              // Ranks that share a device wait for each other: no more than the call's multiprocessors.
              static_cast<int>(std::min<int64_t>(multiprocessors > 0 ? multiprocessors : INT32_MAX,
                                                 tpk::sm90a::kCollectCtas)),
              tpk::sm90a::kCollectThreads);
  scatter.join();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CUDA, m) {
  m.impl("fused_matmul_reduce_scatter", TORCH_BOX(&fused_matmul_reduce_scatter));
  m.impl("fused_matmul_all_reduce", TORCH_BOX(&fused_matmul_all_reduce));
}

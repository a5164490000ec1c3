// Small all-reduces, gathers and reduce-scatters: see host/all_reduce.hpp for who stores what where, and who
// waits.
// Here is how a CTA moves its units of 16 bytes. Peers' memory is written, never read: a store over the link
// needs no answer.
//
// Sums are made in fp32 in the order of ranks, then bias, then residual; rounded once. So all ranks get the
// same bits: those of ops/_collectives.py:all_reduce_sum.
//
// A call lasts a few microseconds, and none of its code is in the instruction cache when it begins. So loops
// over peers and units are not unrolled, and what is rare is called.
#include "kernels/sm90a/all_reduce.hpp"

#include "kernels/sm90a/all_reduce_units.cuh"
#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {
namespace {

using all_reduce::Call;
using all_reduce::Slice;
using all_reduce::Way;
using all_reduce::Word;

constexpr int kBatch = 4;  // loads of a thread that are under way at once
static_assert(all_reduce::kMaxRanks < kAllReduceThreads, "Each peer has a thread, and one is left.");

// What host/all_reduce.hpp runs on: a CTA of this kernel.
template <Way kWay, class T>
class Cta {
 public:
  __device__ explicit Cta(const AllReduceParams& params) : p(params), c(params.call) {}

  // ---- Who waits.

  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ void barrier() const { __syncthreads(); }
  __device__ comm::DeviceMemory memory() const { return {p.timeout_ns}; }
  template <class F>
  __device__ bool each_peer(F f) const {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < c.world && peer != c.rank) f(peer);
    return true;  // a wait that fails stops the launch
  }
  template <class F>
  __device__ void once(F f) const {
    if (threadIdx.x == kAllReduceThreads - 1) f();
  }
  __device__ bool wait(const uint32_t* flag, uint32_t epoch, Word word, int peer) const {
    uint32_t seen;
    const auto there = [epoch](uint32_t v) { return all_reduce::arrived(v, epoch); };
    if (!comm::wait_word<comm::Scope::kSys>(flag, there, p.timeout_ns, &seen)) {
      late(static_cast<int>(flag - c.pages[c.rank].words), word, seen, epoch, peer);
    }
    return true;
  }

  // ---- What moves. Loads of what peers stored go around L1, which knows of no peers.

  __device__ void send(Slice s, uint32_t parity) const {
    const Rows from = own(p.partial);
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
      load(data, from, batch);
      others([&](int peer) { put(slot(peer, parity, c.rank, c.rank), data, batch); });
    });
  }
  __device__ void send_to(int owner, Slice s, uint32_t parity) const {
    const Rows from = all(p.partial, owner);
    char* const to = slot(owner, parity, c.rank, owner);
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
      load(data, from, batch);
      put(to, data, batch);
    });
  }
  __device__ void sum(Slice s, uint32_t parity, bool publish) const {
    const Rows partial = all(p.partial, c.rank);
    const Rows out = own(p.out);
    for_units(s, [&](int i) {
      const uint4 result = sum_unit(i, [&](uint4(&data)[kBatch], int first) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int r = first + b;
          if (r == c.rank) {
            data[b] = load(partial, i);
          } else if (r < c.world) {
            data[b] = __ldcg(at(slot(c.rank, parity, r, c.rank), i));
          }
        }
      });
      store(out, i, result);
      if (publish) others([&](int peer) { *at(c.sums(peer, parity), i) = result; });
    });
  }
  __device__ void collect(Slice s, uint32_t parity) const { copy(s, c.sums(c.rank, parity), own(p.out)); }
  __device__ void keep(Slice s) const {
    const Rows from = own(p.partial);
    const Rows to = all(p.out, c.rank);
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
      load(data, from, batch);
      store(to, data, batch);
    });
  }
  __device__ void take(int sender, Slice s, uint32_t parity) const {
    copy(s, slot(c.rank, parity, sender, sender), all(p.out, sender));
  }
  __device__ void send_packets(Slice s, uint32_t parity, uint32_t epoch) const {
    const Rows from = own(p.partial);
    for_units(s, [&](int i) {
      const uint4 data = load(from, i);
      others([&](int peer) { store_packets(packets(peer, parity, c.rank, i), data, epoch); });
    });
  }
  __device__ bool sum_packets(Slice s, uint32_t parity, uint32_t epoch) const {
    const Rows out = own(p.out);
    for_units(s, [&](int i) {
      const auto receive = [&](uint4(&data)[kBatch], int first) {
        this->receive(data, first, i, parity, epoch);
      };
      store(out, i, sum_unit(i, receive));
    });
    return true;
  }

 private:
  static constexpr int kCount = kUnitBytes / static_cast<int>(sizeof(T));
  const AllReduceParams& p;
  const Call& c;

  // Rows of a tensor: unit i has its elements from begin + i * kCount on, as far as they lie before end.
  // Units may end inside, and rows begin at any element.
  struct Rows {
    T* begin;
    int end;  // from begin
  };
  // Some units of a thread.
  struct Batch {
    int first;
    int end;
    __device__ int unit(int b) const { return first + b * kAllReduceThreads; }
    __device__ bool has(int b) const { return unit(b) < end; }
  };
  template <class F>
  __device__ void batches(Slice s, F f) const {
#pragma unroll 1
    for (int i = s.begin + static_cast<int>(threadIdx.x); i < s.end; i += kBatch * kAllReduceThreads) {
      f(Batch{i, s.end});
    }
  }
  template <class F>
  __device__ void for_units(Slice s, F f) const {
#pragma unroll 1
    for (int i = s.begin + static_cast<int>(threadIdx.x); i < s.end; i += kAllReduceThreads) f(i);
  }
  template <class F>
  __device__ void others(F f) const {
#pragma unroll 1
    for (int step = 1; step < c.world; ++step) f(all_reduce::peer_of(c, step));
  }
  static __device__ uint4* at(char* base, int unit) { return reinterpret_cast<uint4*>(base) + unit; }
  __device__ char* packets(int owner, uint32_t parity, int sender, int unit) const {
    return c.packets(owner, parity, sender) + int64_t{unit} * 2 * kUnitBytes;
  }

  __device__ void put(char* base, const uint4 (&data)[kBatch], const Batch& batch) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) *at(base, batch.unit(b)) = data[b];
    }
  }
  // What peers stored, to a tensor.
  __device__ void copy(Slice s, char* base, const Rows& to) const {
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (batch.has(b)) data[b] = __ldcg(at(base, batch.unit(b)));
      }
      store(to, data, batch);
    });
  }
  // Where unit i of the block of rank `block` lies: at(slot(...), i).
  __device__ char* slot(int owner, uint32_t parity, int sender, int block) const {
    return c.slot(owner, parity, sender) - int64_t{c.begin(block)} * kUnitBytes;
  }

  // Of a tensor of all ranks' shards, those of one rank; without shards: everything.
  __device__ Rows all(const void* tensor, int rank) const {
    T* const begin = static_cast<T*>(const_cast<void*>(tensor));
    if constexpr (!all_reduce::has_shards(kWay)) return {begin, p.elements};
    const int ahead = p.firsts[rank] - c.begin(rank) * kCount;
    return {begin + ahead, p.firsts[rank + 1] - ahead};
  }
  // Of a tensor of the own shard; without shards: everything.
  __device__ Rows own(const void* tensor) const {
    T* const begin = static_cast<T*>(const_cast<void*>(tensor));
    if constexpr (!all_reduce::has_shards(kWay)) return {begin, p.elements};
    const int behind = c.begin(c.rank) * kCount;
    return {begin - behind, p.firsts[c.rank + 1] - p.firsts[c.rank] + behind};
  }
  __device__ uint4 load(const Rows& rows, int unit) const {
    const T* const from = rows.begin + unit * kCount;
    if (whole(rows, unit)) return *reinterpret_cast<const uint4*>(from);
    return load_elements(from, rows.end - unit * kCount);
  }
  __device__ void store(const Rows& rows, int unit, const uint4& data) const {
    T* const to = rows.begin + unit * kCount;
    if (whole(rows, unit)) {
      *reinterpret_cast<uint4*>(to) = data;
    } else {
      store_elements(to, data, rows.end - unit * kCount);
    }
  }
  __device__ bool whole(const Rows& rows, int unit) const {
    const auto address = reinterpret_cast<uintptr_t>(rows.begin + unit * kCount);
    return (unit + 1) * kCount <= rows.end && address % kUnitBytes == 0;
  }
  __device__ void load(uint4 (&data)[kBatch], const Rows& rows, const Batch& batch) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) data[b] = load(rows, batch.unit(b));
    }
  }
  __device__ void store(const Rows& rows, const uint4 (&data)[kBatch], const Batch& batch) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) store(rows, batch.unit(b), data[b]);
    }
  }

  // get(data, r): unit i of ranks r and those behind.
  template <class Get>
  __device__ uint4 sum_unit(int i, Get get) const {
    float sum[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = -0.0f;  // which leaves every addend as it is
#pragma unroll 1
    for (int first = 0; first < c.world; first += kBatch) {
      uint4 data[kBatch];
      get(data, first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < c.world) add(sum, data[b]);
      }
    }
    if (p.bias != nullptr) add_bias(sum, i);
    if (p.residual != nullptr) add(sum, load(own(p.residual), i));
    uint4 result;
    T* const to = reinterpret_cast<T*>(&result);
#pragma unroll
    for (int j = 0; j < kCount; ++j) to[j] = rounded<T>(sum[j]);
    return result;
  }
  static __device__ void add(float (&sum)[kCount], const uint4& data) {
    const T* const from = reinterpret_cast<const T*>(&data);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += to_float(from[j]);
  }
  __device__ void add_bias(float (&sum)[kCount], int unit) const {
    // A shard has whole rows.
    int column = (unit - (all_reduce::has_shards(kWay) ? c.begin(c.rank) : 0)) * kCount % p.n;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      sum[j] += bias(column);
      column = column + 1 < p.n ? column + 1 : 0;
    }
  }
  __device__ float bias(int column) const {
    if (p.bias_kind == ScalarKind::kFp32) return static_cast<const float*>(p.bias)[column];
    if (p.bias_kind == ScalarKind::kFp16) return to_float(static_cast<const __half*>(p.bias)[column]);
    return to_float(static_cast<const __nv_bfloat16*>(p.bias)[column]);
  }

  // Unit i of rank `first` and those behind, once it has come in packets.
  __device__ void receive(uint4 (&data)[kBatch], int first, int i, uint32_t parity, uint32_t epoch) const {
    comm::Patience patience(p.timeout_ns, 0);
    bool waits = false;
    bool over = false;
#pragma unroll 1
    while (true) {
      int missing = -1;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int r = first + b;
        if (r == c.rank) {
          data[b] = load(own(p.partial), i);
        } else if (r < c.world) {
          const Packets got = load_packets(packets(c.rank, parity, r, i));
          data[b] = got.data();
          if (!got.have(epoch)) missing = r;
        }
      }
      if (missing < 0) return;
      if (over) {
        const Packets got = load_packets(packets(c.rank, parity, missing, i));
        late(i, Word::kPacket, static_cast<uint32_t>(got.words[0] >> 32), epoch, missing);
      }
      const comm::u64 now = comm::now_ns();
      if (!waits) patience = comm::Patience(p.timeout_ns, now);
      waits = true;
      over = patience.ends(now);  // then one more look
    }
  }
  __device__ void late(int index, Word word, uint32_t seen, uint32_t epoch, int peer) const {
    report_late({p.timeout_ns, p.fault}, FaultKind::kAllReduce, index, static_cast<int>(word), seen, epoch,
                peer);
  }
};

template <Way kWay, class T>
__global__ void __launch_bounds__(kAllReduceThreads, 1)
    all_reduce_kernel(const __grid_constant__ AllReduceParams p) {
  wait_for_earlier_kernels();  // the product, and the call before
  Cta<kWay, T> cta(p);
  all_reduce::run<kWay>(cta, p.call);
}

template <Way kWay>
const void* function_of(ScalarKind kind) {
  if (kind == ScalarKind::kFp32) return reinterpret_cast<const void*>(&all_reduce_kernel<kWay, float>);
  if (kind == ScalarKind::kFp16) return reinterpret_cast<const void*>(&all_reduce_kernel<kWay, __half>);
  return reinterpret_cast<const void*>(&all_reduce_kernel<kWay, __nv_bfloat16>);
}

}  // namespace

const void* all_reduce_function(Way way, ScalarKind kind) {
  if (way == Way::kPackets) return function_of<Way::kPackets>(kind);
  if (way == Way::kOneShot) return function_of<Way::kOneShot>(kind);
  if (way == Way::kTwoShot) return function_of<Way::kTwoShot>(kind);
  return way == Way::kGather ? function_of<Way::kGather>(kind) : function_of<Way::kScatter>(kind);
}

}  // namespace tpk::sm90a

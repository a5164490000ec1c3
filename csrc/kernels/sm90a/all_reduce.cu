// The sum over ranks of a small partial: see host/all_reduce.hpp for who stores what where, and who waits.
// Here is how a CTA moves its units of 16 bytes. Peers' memory is written, never read: a store over the link
// needs no answer.
//
// Sums are made in fp32 in the order of ranks, then bias, then residual; rounded once. So all ranks get the
// same bits: those of ops/_collectives.py:all_reduce_sum.
//
// A call lasts a few microseconds, and none of its code is in the instruction cache when it begins. So loops
// over peers and units are not unrolled, and what is rare is called.
#include "kernels/sm90a/all_reduce.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/sm90a/fault.cuh"
#include "kernels/sm90a/ptx.cuh"

namespace tpk::sm90a {
namespace {

using all_reduce::Call;
using all_reduce::kUnitBytes;
using all_reduce::Slice;
using all_reduce::Way;
using all_reduce::Word;

constexpr int kBatch = 4;  // loads of a thread that are under way at once
static_assert(all_reduce::kMaxRanks < kAllReduceThreads, "Each peer has a thread, and one is left.");

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Packets: in each 64 bits 4 bytes of data, and the epoch above them. Such a word is never torn.
__device__ __forceinline__ void store_packets(char* to, const uint4& data, uint32_t epoch) {
  const uint64_t above = uint64_t{epoch} << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(above | data.x),
               "l"(above | data.y)
               : "memory");
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to + 16), "l"(above | data.z),
               "l"(above | data.w)
               : "memory");
}
struct Packets {
  uint64_t words[4];

  __device__ __forceinline__ uint4 data() const {
    return make_uint4(static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]),
                      static_cast<uint32_t>(words[2]), static_cast<uint32_t>(words[3]));
  }
  __device__ __forceinline__ bool have(uint32_t epoch) const {
    return words[0] >> 32 == epoch && words[1] >> 32 == epoch && words[2] >> 32 == epoch &&
           words[3] >> 32 == epoch;
  }
};
__device__ __forceinline__ Packets load_packets(const char* from) {
  Packets p;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(p.words[0]), "=l"(p.words[1])
               : "l"(from)
               : "memory");
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(p.words[2]), "=l"(p.words[3])
               : "l"(from + 16)
               : "memory");
  return p;
}

// The first `count` elements of a unit, one by one; the others are 0.
template <class T>
__device__ __noinline__ uint4 load_elements(const T* from, int count) {
  union {
    uint4 raw;
    T at[kUnitBytes / sizeof(T)];
  } unit{make_uint4(0, 0, 0, 0)};
#pragma unroll
  for (int j = 0; j < static_cast<int>(kUnitBytes / sizeof(T)); ++j) {
    if (j < count) unit.at[j] = from[j];
  }
  return unit.raw;
}
template <class T>
__device__ __noinline__ void store_elements(T* to, uint4 data, int count) {
  const T* const from = reinterpret_cast<const T*>(&data);
#pragma unroll
  for (int j = 0; j < static_cast<int>(kUnitBytes / sizeof(T)); ++j) {
    if (j < count) to[j] = from[j];
  }
}

// What host/all_reduce.hpp runs on: a CTA of this kernel.
template <class T>
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
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
      load_partial(data, batch);
      others([&](int peer) { put(c.slot(peer, parity, c.rank), data, batch); });
    });
  }
  __device__ void send_to(int owner, Slice s, int begin, uint32_t parity) const {
    char* const base = c.slot(owner, parity, c.rank) - int64_t{begin} * kUnitBytes;
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
      load_partial(data, batch);
      put(base, data, batch);
    });
  }
  __device__ void sum(Slice s, int begin, uint32_t parity, bool publish) const {
    for_units(s, [&](int i) {
      const uint4 result = sum_unit(i, [&](uint4(&data)[kBatch], int first) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int r = first + b;
          if (r == c.rank) {
            data[b] = load(p.partial, i);
          } else if (r < c.world) {
            data[b] = __ldcg(at(c.slot(c.rank, parity, r), i - begin));
          }
        }
      });
      store(i, result);
      if (publish) others([&](int peer) { *at(c.sums(peer, parity), i) = result; });
    });
  }
  __device__ void collect(Slice s, uint32_t parity) const {
    char* const sums = c.sums(c.rank, parity);
    batches(s, [&](const Batch& batch) {
      uint4 data[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (batch.has(b)) data[b] = __ldcg(at(sums, batch.unit(b)));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (batch.has(b)) store(batch.unit(b), data[b]);
      }
    });
  }
  __device__ void send_packets(Slice s, uint32_t parity, uint32_t epoch) const {
    for_units(s, [&](int i) {
      const uint4 data = load(p.partial, i);
      others([&](int peer) { store_packets(packets(peer, parity, c.rank, i), data, epoch); });
    });
  }
  __device__ bool sum_packets(Slice s, uint32_t parity, uint32_t epoch) const {
    for_units(s, [&](int i) {
      const auto receive = [&](uint4(&data)[kBatch], int first) {
        this->receive(data, first, i, parity, epoch);
      };
      store(i, sum_unit(i, receive));
    });
    return true;
  }

 private:
  static constexpr int kCount = kUnitBytes / static_cast<int>(sizeof(T));
  const AllReduceParams& p;
  const Call& c;

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

  __device__ void load_partial(uint4 (&data)[kBatch], const Batch& batch) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) data[b] = load(p.partial, batch.unit(b));
    }
  }
  __device__ void put(char* base, const uint4 (&data)[kBatch], const Batch& batch) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) *at(base, batch.unit(b)) = data[b];
    }
  }

  // Units of tensors, which may end inside one, or begin at any element.
  __device__ uint4 load(const void* tensor, int unit) const {
    const T* const from = static_cast<const T*>(tensor) + unit * kCount;
    if (whole(from, unit)) return *reinterpret_cast<const uint4*>(from);
    return load_elements(from, p.elements - unit * kCount);
  }
  __device__ void store(int unit, const uint4& data) const {
    T* const to = static_cast<T*>(p.out) + unit * kCount;
    if (whole(to, unit)) {
      *reinterpret_cast<uint4*>(to) = data;
    } else {
      store_elements(to, data, p.elements - unit * kCount);
    }
  }
  __device__ bool whole(const T* at, int unit) const {
    return (unit + 1) * kCount <= p.elements && reinterpret_cast<uintptr_t>(at) % kUnitBytes == 0;
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
    if (p.residual != nullptr) add(sum, load(p.residual, i));
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
    int column = unit * kCount % p.n;
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
          data[b] = load(p.partial, i);
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
  Cta<T> cta(p);
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
  return way == Way::kOneShot ? function_of<Way::kOneShot>(kind) : function_of<Way::kTwoShot>(kind);
}

}  // namespace tpk::sm90a

// bench/kernels/link.cu on the CPU: CTA after CTA, thread after thread, thread 0 of a CTA last. That is
// faithful enough: its kernels wait for nothing but their own bulk copies, which are emulated strictly here.
// Loads land at once or as late as a barrier allows, stores read shared memory as late as a wait allows, and
// misuse ends the program.
//
// The test builds it in a folder that holds this file, a copy of link.cu, an empty bulk.cuh and
// comm/flags.cuh; comm/copy.cuh is the real one. Arguments: a seed. Prints the number of launches that were
// right.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Dim {
  unsigned x = 1, y = 1, z = 1;
};
static Dim threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;
inline void __syncthreads() {}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
  const unsigned old = *p;
  *p += v;
  return old;
}

[[noreturn]] void fail(const char* what) {
  std::printf("EMULATION: %s\n", what);
  std::exit(1);
}
void require(bool condition, const char* what) {
  if (!condition) fail(what);
}

namespace tpk::comm {
using u32 = unsigned int;
using u64 = unsigned long long;
enum class Scope { kGpu, kSys };
static std::map<u32*, int> raised;

template <Scope>
void store_release(u32* flag, u32 v) {
  *flag = v;
  ++raised[flag];
}
inline u32 take_ticket(u32* counter) { return (*counter)++; }
template <Scope>
bool wait_epoch(const u32* flag, u32 expected, u64, u32* = nullptr) {
  return *flag == expected;
}
}  // namespace tpk::comm

namespace tpk::bench {
using comm::u32;
using comm::u64;

constexpr u32 kSharedBytes = 12 * 16384;
alignas(128) static char shared_memory[kSharedBytes];
static bool late_loads;

struct Barrier {
  bool arrived = false;
  long long missing = 0;  // bytes
  u32 phase = 0;
};
struct Load {
  u32 shared;
  const char* global;
  u32 bytes, barrier;
};
struct Store {
  char* global;
  u32 shared, bytes;
};
static std::map<u32, Barrier> barriers;
static std::deque<Load> loads;
static std::vector<Store> open_group;
static std::deque<std::vector<Store>> groups;
static bool fenced;

inline char* dynamic_shared() { return shared_memory; }
inline u32 shared_address(const void* p) {
  const char* c = static_cast<const char*>(p);
  return c == shared_memory ? 0 : 0x80000000u;
}
inline void barrier_init(u32 b) {
  require(b >= 0x80000000u && b % 8 == 0, "a barrier lies among the stages");
  barriers[b] = Barrier{};
}
inline void fence_barrier_init() { fenced = true; }
inline void barrier_expect(u32 b, u32 bytes) {
  require(barriers.count(b) && !barriers[b].arrived, "two arrivals in one phase");
  barriers[b].arrived = true;
  barriers[b].missing += bytes;
}
inline void advance(Barrier& b) {
  if (!b.arrived || b.missing != 0) return;
  b.arrived = false;
  ++b.phase;
}
inline void land(const Load& l) {
  std::memcpy(shared_memory + l.shared, l.global, l.bytes);
  barriers[l.barrier].missing -= l.bytes;
  advance(barriers[l.barrier]);
}
inline bool barrier_wait(u32 b, u32 parity, u64) {
  for (size_t i = 0; i < loads.size();) {
    if (loads[i].barrier == b) {
      land(loads[i]);
      loads.erase(loads.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  return barriers[b].phase % 2 != parity;  // nothing else can end the phase
}
inline void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  require(fenced, "a load before the fence of the barriers");
  require(bytes > 0 && bytes % 16 == 0 && shared % 16 == 0 && reinterpret_cast<u64>(global) % 16 == 0,
          "a load that is not aligned");
  require(static_cast<u64>(shared) + bytes <= kSharedBytes, "a load beyond shared memory");
  const Load load{shared, static_cast<const char*>(global), bytes, barrier};
  if (late_loads) {
    loads.push_back(load);
  } else {
    land(load);
  }
}
inline void bulk_store(void* global, u32 shared, u32 bytes) {
  require(bytes > 0 && bytes % 16 == 0 && shared % 16 == 0 && reinterpret_cast<u64>(global) % 16 == 0,
          "a store that is not aligned");
  open_group.push_back({static_cast<char*>(global), shared, bytes});
}
inline void bulk_commit() { groups.push_back(std::exchange(open_group, {})); }
inline void drain(size_t pending) {
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Store& s : groups.front()) std::memcpy(s.global, shared_memory + s.shared, s.bytes);
  }
}
template <u32 kPending>
void bulk_wait_read() {
  drain(kPending);
}
inline void bulk_wait_all() { drain(0); }
inline void fence_system() {}
}  // namespace tpk::bench

#include "link.cu"

using tpk::bench::Job;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr unsigned char kCanary = 0xc5;

struct Problem {
  u32 grid, count, piece;
  u64 bytes;
  bool spread, lsu, flags;
  u32 source_skew, target_skew;
};

template <typename Kernel>
void launch(u32 grid, u32 threads, std::mt19937& random, Kernel kernel) {
  gridDim.x = grid;
  blockDim.x = threads;
  std::vector<u32> order(grid);
  for (u32 i = 0; i < grid; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (u32 block : order) {
    blockIdx.x = block;
    tpk::bench::fenced = false;
    std::memset(tpk::bench::shared_memory, 0xff, sizeof tpk::bench::shared_memory);
    for (u32 thread = threads; thread-- > 0;) {
      threadIdx.x = thread;
      kernel();
    }
    require(tpk::bench::groups.empty() && tpk::bench::open_group.empty(), "a CTA ended before its stores");
    require(tpk::bench::loads.empty(), "a load that nobody waited for");
  }
}

void run(const Problem& p, std::mt19937& random) {
  const u64 room = (p.bytes + 127) / 64 * 64 + 64;
  const u32 sources = p.spread ? 1 : p.count;
  std::vector<uint4> source_words(room * sources / 16), target_words(room * p.count / 16);
  char* source = reinterpret_cast<char*>(source_words.data());
  char* target = reinterpret_cast<char*>(target_words.data());
  for (u64 i = 0; i < room * sources; ++i) source[i] = static_cast<char>(random());
  std::memset(target, kCanary, room * p.count);
  std::vector<u32> flags(p.count, 7);
  std::vector<Job> jobs;
  for (u32 j = 0; j < p.count; ++j) {
    jobs.push_back({target + j * room + 16 + p.target_skew,
                    source + (p.spread ? 0 : j * room) + p.source_skew, p.flags ? &flags[j] : nullptr});
  }
  u32 finished = 0, late = 0;
  tpk::comm::raised.clear();
  for (u32 epoch = 1; epoch <= 2; ++epoch) {
    const auto bulk = p.spread ? tpk::bench::bulk_spread : tpk::bench::bulk_copy;
    const auto lsu = p.spread ? tpk::bench::lsu_spread : tpk::bench::lsu_copy;
    if (p.lsu) {
      launch(p.grid, tpk::bench::kLsuThreads, random,
             [&] { lsu(jobs.data(), p.count, p.bytes, epoch, &finished); });
    } else {
      launch(p.grid, tpk::bench::kBulkThreads, random,
             [&] { bulk(jobs.data(), p.count, p.bytes, p.piece, epoch, &finished, &late); });
    }
    for (u32 j = 0; j < p.count; ++j) {
      require(flags[j] == (p.flags ? epoch : 7), "a flag that does not carry the epoch");
      require(tpk::comm::raised[&flags[j]] == (p.flags ? static_cast<int>(epoch) : 0),
              "a flag that was not raised once");
    }
  }
  require(late == 0, "a wait that expired");
  for (u32 j = 0; j < p.count; ++j) {
    const char* begin = target + j * room;
    require(std::memcmp(jobs[j].dst, jobs[j].src, p.bytes) == 0, "wrong bytes");
    for (const char* c = begin; c < jobs[j].dst; ++c)
      require(static_cast<unsigned char>(*c) == kCanary, "bytes before");
    for (const char* c = jobs[j].dst + p.bytes; c < begin + room; ++c) {
      require(static_cast<unsigned char>(*c) == kCanary, "bytes behind");
    }
  }
}

int main(int, char** argv) {
  std::mt19937 random(static_cast<u32>(std::atoi(argv[1])));
  const u64 sizes[] = {0, 1, 15, 16, 17, 100, 2048, 4096 + 16, 65536 + 3, 600000, 1234560};
  const u32 pieces[] = {2048, 5 * 1024, 16384};
  int launches = 0;
  for (u64 bytes : sizes) {
    for (int trial = 0; trial < 24; ++trial) {
      Problem p;
      p.lsu = trial % 4 == 3 && bytes < 100000;
      p.grid = p.lsu ? 1 + random() % 4 : 1 + random() % 17;
      p.count = 1 + random() % 7;
      p.piece = pieces[random() % 3];
      p.bytes = bytes;
      p.spread = random() % 2;
      p.flags = random() % 2;
      const bool skewed = random() % 4 == 0 && bytes < 100000;
      p.source_skew = skewed ? random() % 16 : 0;
      p.target_skew = skewed ? random() % 16 : 0;
      tpk::bench::late_loads = random() % 2;
      run(p, random);
      launches += 2;
    }
  }
  std::printf("%d launches\n", launches);
  return 0;
}

// kernels/sm80/ptx.cuh on the CPU, as the PTX manual defines the instructions. See ../../cuda.hpp.
#pragma once

#include "kernels/cpu/half.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/emulation/cuda.hpp"

namespace tpk::sm80 {

inline unsigned char* dynamic_shared() { return emulation::cta->shared; }

inline int thread_index_anew() { return emulation::self().thread; }

inline void allow_later_kernels() {}
inline void wait_for_earlier_kernels() {}

inline void store_release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emulation::cta->shared);
}

// size bytes at a shared address.
inline unsigned char* shared_at(uint32_t address, uint32_t size) {
  if (address % size != 0) emulation::fail("misaligned shared address");
  if (address + size > sizeof emulation::cta->shared) emulation::fail("shared address out of range");
  return emulation::cta->shared + address;
}

inline void cp_async_16(uint32_t shared, const void* global, int bytes) {
  if (bytes < 0 || bytes > 16) emulation::fail("cp.async of more than 16 bytes");
  if (bytes > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0)
    emulation::fail("misaligned cp.async source");
  shared_at(shared, 16);
  emulation::check_banks_of_lane(shared, 16);
  emulation::self().open_group.push_back({shared, global, bytes});
}

inline void cp_async_commit() {
  emulation::self().groups.push_back(std::move(emulation::self().open_group));
  emulation::self().open_group.clear();
}

template <int kPending>
void cp_async_wait() {
  auto& groups = emulation::self().groups;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const emulation::Copy& c : groups.front()) {
      unsigned char* to = shared_at(c.shared, 16);
      std::memset(to, 0, 16);
      if (c.bytes > 0) std::memcpy(to, c.global, static_cast<size_t>(c.bytes));
    }
    groups.pop_front();
  }
}

inline void store_shared_16(uint32_t shared, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t words[4] = {x, y, z, w};
  std::memcpy(shared_at(shared, 16), words, 16);
}

template <bool kTransposed>
void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  const int lane = emulation::lane();
  auto& rows = emulation::cta->address[emulation::warp()];
  rows[lane] = shared;
  emulation::sync_warp();
  if (emulation::checks_banks) emulation::check_banks(rows, 16);
  for (int block = 0; block < 4; ++block) {
    r[block] = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = kTransposed ? 2 * (lane % 4) + e : lane / 4;
      const int col = kTransposed ? lane / 4 : 2 * (lane % 4) + e;
      uint16_t bits;
      std::memcpy(&bits, shared_at(rows[8 * block + row], 16) + 2 * col, 2);
      r[block] |= static_cast<uint32_t>(bits) << (16 * e);
    }
  }
  emulation::sync_warp();
}

inline float unpack_bf16(uint32_t bits16) {
  return cpu::to_float(cpu::BFloat16{static_cast<uint16_t>(bits16)});
}
inline float unpack_fp16(uint32_t bits16) {
  return cpu::to_float(cpu::Float16{static_cast<uint16_t>(bits16)});
}

inline uint32_t pack_bf16(float lo, float hi) {
  return cpu::to_bfloat16(lo).bits | static_cast<uint32_t>(cpu::to_bfloat16(hi).bits) << 16;
}

inline uint32_t pack_fp16(float lo, float hi) {
  return cpu::to_float16(lo).bits | static_cast<uint32_t>(cpu::to_float16(hi).bits) << 16;
}

template <class T, int kCount>
void load_shared(T (&v)[kCount], uint32_t shared) {
  emulation::check_banks_of_lane(shared, sizeof v);
  std::memcpy(v, shared_at(shared, sizeof v), sizeof v);
}

inline uint32_t round_tf32(uint32_t bits) {
  const bool is_number = (bits & 0x7f800000u) != 0x7f800000u;
  return (is_number ? bits + 0x0fffu + (bits >> 13 & 1) : bits) & ~0x1fffu;
}

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

// The lanes of a warp put the 16 x kStep block of A and the kStep x 8 block of B together, and multiply.
template <int kStep, class Sum>
void multiply_blocks(Sum (&d)[4]) {
  auto& am = emulation::cta->a[emulation::warp()];
  auto& bm = emulation::cta->b[emulation::warp()];
  const int g = emulation::lane() / 4;
  const int t = emulation::lane() % 4;
  emulation::sync_warp();
  for (int r = 0; r < 4; ++r) {
    for (int k = 0; k < kStep; ++k)
      d[r] = static_cast<Sum>(d[r] + am[g + 8 * (r / 2)][k] * bm[k][2 * t + r % 2]);
  }
  emulation::sync_warp();
}

template <Element kElement>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& am = emulation::cta->a[emulation::warp()];
  auto& bm = emulation::cta->b[emulation::warp()];
  const int g = emulation::lane() / 4;
  const int t = emulation::lane() % 4;
  if constexpr (kElement == Element::kTf32) {
    const auto value = [](uint32_t bits) {
      if ((bits & 0x1fffu) != 0) emulation::fail("a factor was not rounded to tf32");
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    };
    for (int r = 0; r < 4; ++r) am[g + 8 * (r % 2)][t + 4 * (r / 2)] = value(a[r]);
    bm[t][g] = value(b0);
    bm[t + 4][g] = value(b1);
    multiply_blocks<8>(d);
  } else {
    const auto value = [](uint32_t pair, int e) {
      const uint32_t bits = e == 0 ? pair & 0xffff : pair >> 16;
      return kElement == Element::kBf16 ? unpack_bf16(bits) : unpack_fp16(bits);
    };
    for (int e = 0; e < 2; ++e) {
      for (int r = 0; r < 4; ++r) am[g + 8 * (r % 2)][2 * t + e + 8 * (r / 2)] = value(a[r], e);
      bm[2 * t + e][g] = value(b0, e);
      bm[2 * t + e + 8][g] = value(b1, e);
    }
    multiply_blocks<16>(d);
  }
}

template <Element kElement>
void mma(double (&d)[4], const double (&a)[2], double b) {
  const int g = emulation::lane() / 4;
  const int t = emulation::lane() % 4;
  for (int r = 0; r < 2; ++r) emulation::cta->a[emulation::warp()][g + 8 * r][t] = a[r];
  emulation::cta->b[emulation::warp()][t][g] = b;
  multiply_blocks<4>(d);
}

constexpr bool kHasPairs = true;
template <Element kElement>
void mma(double (&d)[4], const double (&a0)[2], const double (&a1)[2], double b0, double b1) {
  mma<kElement>(d, a0, b0);
  mma<kElement>(d, a1, b1);
}

}  // namespace tpk::sm80

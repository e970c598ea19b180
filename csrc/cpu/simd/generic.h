// Vectors of 4 floats in the vector extension of GCC and Clang: NEON on 64-bit ARM, where every machine has it.
#pragma once

#include <cstdint>
#include <cstring>

#include "../scalar.h"

namespace eformer::EFORMER_ISA {

using F = float __attribute__((vector_size(16)));
using I = uint32_t __attribute__((vector_size(16)));
constexpr int lanes = 4;
constexpr int registers = 32;

template <class T>
INLINE T load_any(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE F zero() { return F{}; }
INLINE F load(const float* p) { return load_any<F>(p); }
INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
INLINE F broadcast(float v) { return F{v, v, v, v}; }
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F fma(F a, F b, F c) { return a * b + c; }  // contracted by the compiler
INLINE float sum(F v) { return (v[0] + v[1]) + (v[2] + v[3]); }

INLINE I load_bits(const void* p) { return load_any<I>(p); }
INLINE void store_bits(void* p, I v) { std::memcpy(p, &v, sizeof v); }
INLINE I broadcast_bits(uint32_t v) { return I{v, v, v, v}; }
INLINE I as_bits(F v) { return bit_cast<I>(v); }
INLINE F as_floats(I v) { return bit_cast<F>(v); }
INLINE I bit_and(I a, I b) { return a & b; }
INLINE I bit_or(I a, I b) { return a | b; }
INLINE I bit_xor(I a, I b) { return a ^ b; }
INLINE I add_bits(I a, I b) { return a + b; }
INLINE I larger(I a, I b) { return a > b ? a : b; }
// v + (a > b)
INLINE I add_if_greater(I v, F a, F b) { return v - bit_cast<I>(a > b); }
// yes where a < b, as signed numbers, else no
INLINE F where_less(I a, I b, F yes, F no) {
  using Ints = int32_t __attribute__((vector_size(16)));
  return bit_cast<Ints>(a) < bit_cast<Ints>(b) ? yes : no;
}
INLINE uint32_t largest(I v) {
  const I pair = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return pair[0] > pair[1] ? pair[0] : pair[1];
}
// Lanes below 16, two to a byte, the first in the high half.
INLINE void store_nibbles(uint8_t* p, I v) {
  for (int i = 0; i < lanes; i += 2) p[i / 2] = static_cast<uint8_t>(v[i] << 4 | v[i + 1]);
}
template <int S>
INLINE I shift_right(I v) { return v >> S; }
template <int S>
INLINE I shift_left(I v) { return v << S; }

// One lane per byte or word of memory.
INLINE I widen_u8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE I widen_u16(const void* p) {
  using Words = uint16_t __attribute__((vector_size(8)));
  return __builtin_convertvector(load_any<Words>(p), I);
}
INLINE F widen_i8(const uint8_t* p) {
  using Ints = int32_t __attribute__((vector_size(16)));
  const auto s = [&](int i) { return static_cast<int32_t>(static_cast<int8_t>(p[i])); };
  return __builtin_convertvector((Ints{s(0), s(1), s(2), s(3)}), F);
}
// One lane per half byte: the high half of byte i/2 for even lanes i, the low half for odd ones, moved to bits 4 to 7.
INLINE I widen_u4(const uint8_t* p) { return I{p[0], uint32_t{p[0]} << 4, p[1], uint32_t{p[1]} << 4}; }
// The signed byte J of each lane.
template <int J>
INLINE F signed_byte(I v) {
  using Ints = int32_t __attribute__((vector_size(16)));
  return __builtin_convertvector(bit_cast<Ints>(v << (24 - 8 * J)) >> 24, F);
}

INLINE F load_bf16(const uint16_t* p) { return as_floats(widen_u16(p) << 16); }
INLINE F load_f16(const uint16_t* p) { return F{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])}; }
INLINE void store_f16(uint16_t* p, F v) {
  for (int i = 0; i < lanes; ++i) p[i] = to_f16(v[i]);
}
INLINE void store_bf16(uint16_t* p, F v) {
  for (int i = 0; i < lanes; ++i) p[i] = to_bf16(v[i]);
}

// From v[j] lane i to consecutive values 4 * i + j.
INLINE void interleave(F (&v)[4]) {
  const F w[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < lanes; ++i) v[i] = F{w[0][i], w[1][i], w[2][i], w[3][i]};
}

// Sixteen values, chosen by the low four bits of each lane.
struct Table16 {
  F quarter[4];

  static INLINE Table16 of(const float* v) { return {{load(v), load(v + 4), load(v + 8), load(v + 12)}}; }
  template <class Fn>
  INLINE Table16 map(Fn&& f) const { return {{f(quarter[0]), f(quarter[1]), f(quarter[2]), f(quarter[3])}}; }
  INLINE F at(I index) const {
    float v[16];
    std::memcpy(v, quarter, sizeof v);
    return F{v[index[0] & 15], v[index[1] & 15], v[index[2] & 15], v[index[3] & 15]};
  }
};

// Four values, chosen by the low two bits of each lane.
struct Table4 {
  F values;

  static INLINE Table4 of(const float* v) { return {load(v)}; }
  INLINE F at(I index) const {
    return F{values[index[0] & 3], values[index[1] & 3], values[index[2] & 3], values[index[3] & 3]};
  }
};

// Lane i gets from[i * count / lanes]; count is a power of two.
class Spread {
 public:
  explicit Spread(int64_t count) : Spread(count, count) {}
  // Only the first `available` values may be read; the others are zero.
  Spread(int64_t count, int64_t available) : count_(count), available_(available) {}
  INLINE F operator()(const float* from) const {
    F v{};
    for (int i = 0; i < lanes; ++i) v[i] = i * count_ / lanes < available_ ? from[i * count_ / lanes] : 0;
    return v;
  }

 private:
  int64_t count_, available_;
};

// to[j][i] = from[i][j] for 4 x 4 dwords; `from_bytes` lies between rows of `from`, `to_stride` dwords between rows of `to`.
INLINE void transpose(const uint8_t* from, int64_t from_bytes, uint32_t* to, int64_t to_stride) {
  for (int i = 0; i < lanes; ++i)
    for (int j = 0; j < lanes; ++j) to[j * to_stride + i] = load_any<uint32_t>(from + i * from_bytes + 4 * j);
}

}  // namespace eformer::EFORMER_ISA

// Vectors of bytes: four products of neighbours are summed in each 32-bit lane, exactly and modulo 2^32.
//
// x has signed bytes from -127 to 127. Weights have any signed bytes; where the machine multiplies unsigned bytes with
// signed ones they are stored with `excess` added, and the sum of x times the excess is taken off again.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace eformer::EFORMER_ISA {

constexpr int vector_bytes = 4 * lanes;

#if defined(__AVX512VNNI__)
constexpr bool unsigned_weights = true;
#else
constexpr bool unsigned_weights = false;
#endif

#if defined(__AVX512F__)

INLINE F divide(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F clamp(F v, float limit) { return _mm512_max_ps(_mm512_min_ps(v, broadcast(limit)), broadcast(-limit)); }
INLINE F from_ints(I v) { return _mm512_cvtepi32_ps(v); }
INLINE uint32_t sum_ints(I v) { return static_cast<uint32_t>(_mm512_reduce_add_epi32(v)); }
// The low byte of each lane.
INLINE void store_low_bytes(void* p, I v) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

#if defined(__AVX512VNNI__)
// By hand: GCC keeps the sums of the intrinsic in vectors of another type, and in memory.
INLINE I dot4(I sums, I w, I x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
  return sums;
}
#else
// |w| <= 128 as an unsigned byte, x with the sign of w: two products are at most 2 * 128 * 127 = 32512 < 2^15, so the
// saturating sum of 16 bits is exact.
INLINE I dot4(I sums, I w, I x) {
  const I turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  const I pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif

struct ByteTable {
  I values;

  static INLINE ByteTable of(const uint8_t* v) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v)))};
  }
  // For bytes below 16.
  INLINE I at(I index) const { return _mm512_shuffle_epi8(values, index); }
};

// From four rows of bytes to one dword per column, in an order of their own.
INLINE void join_rows(I (&v)[4]) {
  const I a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
  const I c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi16(a, c);
  v[1] = _mm512_unpackhi_epi16(a, c);
  v[2] = _mm512_unpacklo_epi16(b, d);
  v[3] = _mm512_unpackhi_epi16(b, d);
}
// And back to the order of the columns, where each has become one number.
INLINE void sort_columns(F (&v)[4]) {
  const F a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const F c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

#elif defined(__AVX2__)

INLINE F divide(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F clamp(F v, float limit) { return _mm256_max_ps(_mm256_min_ps(v, broadcast(limit)), broadcast(-limit)); }
INLINE F from_ints(I v) { return _mm256_cvtepi32_ps(v); }
INLINE uint32_t sum_ints(I v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1))));
}
INLINE void store_low_bytes(void* p, I v) {
  const __m128i low = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i a = _mm_shuffle_epi8(_mm256_castsi256_si128(v), low);
  const __m128i b = _mm_shuffle_epi8(_mm256_extracti128_si256(v, 1), low);
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_unpacklo_epi32(a, b));
}

// |w| <= 128 as an unsigned byte, x with the sign of w: two products are at most 2 * 128 * 127 = 32512 < 2^15, so the
// saturating sum of 16 bits is exact.
INLINE I dot4(I sums, I w, I x) {
  const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

struct ByteTable {
  I values;

  static INLINE ByteTable of(const uint8_t* v) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v)))};
  }
  INLINE I at(I index) const { return _mm256_shuffle_epi8(values, index); }
};

INLINE void join_rows(I (&v)[4]) {
  const I a = _mm256_unpacklo_epi8(v[0], v[1]), b = _mm256_unpackhi_epi8(v[0], v[1]);
  const I c = _mm256_unpacklo_epi8(v[2], v[3]), d = _mm256_unpackhi_epi8(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi16(a, c);
  v[1] = _mm256_unpackhi_epi16(a, c);
  v[2] = _mm256_unpacklo_epi16(b, d);
  v[3] = _mm256_unpackhi_epi16(b, d);
}
INLINE void sort_columns(F (&v)[4]) {
  const F a = _mm256_permute2f128_ps(v[0], v[1], 0x31), b = _mm256_permute2f128_ps(v[2], v[3], 0x20);
  v[0] = _mm256_permute2f128_ps(v[0], v[1], 0x20);
  v[3] = _mm256_permute2f128_ps(v[2], v[3], 0x31);
  v[1] = b;
  v[2] = a;
}

#else

using Ints = int32_t __attribute__((vector_size(16)));
using Bytes16 = uint8_t __attribute__((vector_size(16)));

INLINE F divide(F a, F b) { return a / b; }
INLINE F clamp(F v, float limit) {
  const F most = broadcast(limit), least = broadcast(-limit);
  v = v < most ? v : most;
  return v > least ? v : least;
}
INLINE F from_ints(I v) { return __builtin_convertvector(bit_cast<Ints>(v), F); }
INLINE uint32_t sum_ints(I v) { return v[0] + v[1] + v[2] + v[3]; }
INLINE void store_low_bytes(void* p, I v) {
  for (int i = 0; i < lanes; ++i) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(v[i]);
}

INLINE I dot4(I sums, I w, I x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return bit_cast<I>(vdotq_s32(bit_cast<int32x4_t>(sums), bit_cast<int8x16_t>(w), bit_cast<int8x16_t>(x)));
#else
  for (int b = 0; b < 4; ++b) {
    const Ints one = bit_cast<Ints>(w << (24 - 8 * b)) >> 24, other = bit_cast<Ints>(x << (24 - 8 * b)) >> 24;
    sums += bit_cast<I>(one * other);
  }
  return sums;
#endif
}

struct ByteTable {
  Bytes16 values;

  static INLINE ByteTable of(const uint8_t* v) { return {load_any<Bytes16>(v)}; }
  INLINE I at(I index) const {
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    return bit_cast<I>(vqtbl1q_u8(bit_cast<uint8x16_t>(values), bit_cast<uint8x16_t>(index)));
#else
    const Bytes16 from = bit_cast<Bytes16>(index);
    Bytes16 to{};
    for (int i = 0; i < 16; ++i) to[i] = values[from[i]];
    return bit_cast<I>(to);
#endif
  }
};

INLINE void join_rows(I (&v)[4]) {
  uint8_t rows[4][16], joined[4][16];
  std::memcpy(rows, v, sizeof rows);
  for (int at = 0; at < 64; ++at) joined[at / 16][at % 16] = rows[at % 4][at / 4];
  std::memcpy(v, joined, sizeof joined);
}
INLINE void sort_columns(F (&)[4]) {}

#endif

}  // namespace eformer::EFORMER_ISA

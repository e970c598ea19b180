// Vectors of 16 floats, AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace eformer::EFORMER_ISA {

using F = __m512;
using I = __m512i;
constexpr int lanes = 16;
constexpr int registers = 32;

INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
INLINE F broadcast(float v) { return _mm512_set1_ps(v); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float sum(F v) { return _mm512_reduce_add_ps(v); }

INLINE I load_bits(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_bits(void* p, I v) { _mm512_storeu_si512(p, v); }
INLINE I broadcast_bits(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
INLINE I as_bits(F v) { return _mm512_castps_si512(v); }
INLINE F as_floats(I v) { return _mm512_castsi512_ps(v); }
INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I add_bits(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I larger(I a, I b) { return _mm512_max_epu32(a, b); }
// v + (a > b)
INLINE I add_if_greater(I v, F a, F b) {
  return _mm512_mask_add_epi32(v, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), v, broadcast_bits(1));
}
// yes where a < b, as signed numbers, else no
INLINE F where_less(I a, I b, F yes, F no) { return _mm512_mask_mov_ps(no, _mm512_cmplt_epi32_mask(a, b), yes); }
INLINE uint32_t largest(I v) { return _mm512_reduce_max_epu32(v); }
// Lanes below 16, two to a byte, the first in the high half.
INLINE void store_nibbles(uint8_t* p, I v) {
  const I pairs = bit_or(_mm512_slli_epi64(v, 4), _mm512_srli_epi64(v, 32));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
}
template <int S>
INLINE I shift_right(I v) { return S ? _mm512_srli_epi32(v, S) : v; }
template <int S>
INLINE I shift_left(I v) { return S ? _mm512_slli_epi32(v, S) : v; }

// One lane per byte or word of memory.
INLINE I widen_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE I widen_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
INLINE F widen_i8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// One lane per half byte: the high half of byte i/2 for even lanes i, the low half for odd ones, moved to bits 4 to 7.
INLINE I widen_u4(const uint8_t* p) {
  const I bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 36));
}
// The signed byte J of each lane.
template <int J>
INLINE F signed_byte(I v) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(shift_left<24 - 8 * J>(v), 24)); }

INLINE F load_bf16(const uint16_t* p) { return as_floats(shift_left<16>(widen_u16(p))); }
INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE void store_f16(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void store_bf16(uint16_t* p, F v) {
  const I bits = as_bits(v);
  const I even = add_bits(bit_and(shift_right<16>(bits), broadcast_bits(1)), broadcast_bits(0x7fff));
  const I quiet = bit_or(bits, broadcast_bits(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const I rounded = _mm512_mask_mov_epi32(add_bits(bits, even), nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shift_right<16>(rounded)));
}

// From v[j] lane i to consecutive values 4 * i + j.
INLINE void interleave(F (&v)[4]) {
  const F a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
  const F c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
  const F w0 = _mm512_shuffle_ps(a, c, 0x44), w1 = _mm512_shuffle_ps(a, c, 0xee);
  const F w2 = _mm512_shuffle_ps(b, d, 0x44), w3 = _mm512_shuffle_ps(b, d, 0xee);
  const F low01 = _mm512_shuffle_f32x4(w0, w1, 0x44), high01 = _mm512_shuffle_f32x4(w0, w1, 0xee);
  const F low23 = _mm512_shuffle_f32x4(w2, w3, 0x44), high23 = _mm512_shuffle_f32x4(w2, w3, 0xee);
  v[0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
  v[1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
  v[2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
  v[3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
}

// Sixteen values, chosen by the low four bits of each lane.
struct Table16 {
  F values;

  static INLINE Table16 of(const float* v) { return {load(v)}; }
  template <class Fn>
  INLINE Table16 map(Fn&& f) const { return {f(values)}; }
  INLINE F at(I index) const { return _mm512_permutexvar_ps(index, values); }
};

// Four values, chosen by the low two bits of each lane.
struct Table4 {
  F values;

  static INLINE Table4 of(const float* v) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(v))}; }
  INLINE F at(I index) const { return _mm512_permutevar_ps(values, index); }
};

// Lane i gets from[i * count / lanes]; count is a power of two.
class Spread {
 public:
  explicit Spread(int64_t count) : Spread(count, count) {}
  // Only the first `available` values may be read; the others are zero.
  Spread(int64_t count, int64_t available)
      : halves_(count == 2 && available == 2), mask_(static_cast<__mmask16>((1u << available) - 1)) {
    const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    index_ = shift_right<4>(_mm512_mullo_epi32(lane, broadcast_bits(static_cast<uint32_t>(count))));
  }
  INLINE F operator()(const float* from) const {
    // The common case by loads that broadcast, which cost the shuffling unit nothing.
    if (halves_) [[likely]] return _mm512_mask_broadcastss_ps(broadcast(from[0]), 0xff00, _mm_load_ss(from + 1));
    return _mm512_permutexvar_ps(index_, _mm512_maskz_loadu_ps(mask_, from));
  }

 private:
  I index_;
  bool halves_;
  __mmask16 mask_;
};

// to[j][i] = from[i][j] for 16 x 16 dwords; `from_bytes` lies between rows of `from`, `to_stride` dwords
// between rows of `to`. Each line of `from` is read once.
INLINE void transpose(const uint8_t* from, int64_t from_bytes, uint32_t* to, int64_t to_stride) {
  I v[4][4];  // v[q][r]: dwords 4q..4q+3 of rows r, 4+r, 8+r, 12+r
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const auto at = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * from_bytes + 16 * q)); };
      I x = _mm512_castsi128_si512(at(r));
      x = _mm512_mask_broadcast_i32x4(x, 0x00f0, at(4 + r));
      x = _mm512_mask_broadcast_i32x4(x, 0x0f00, at(8 + r));
      v[q][r] = _mm512_mask_broadcast_i32x4(x, 0xf000, at(12 + r));
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const I a = _mm512_unpacklo_epi32(v[q][0], v[q][1]), b = _mm512_unpackhi_epi32(v[q][0], v[q][1]);
    const I c = _mm512_unpacklo_epi32(v[q][2], v[q][3]), d = _mm512_unpackhi_epi32(v[q][2], v[q][3]);
    store_bits(to + (4 * q + 0) * to_stride, _mm512_unpacklo_epi64(a, c));
    store_bits(to + (4 * q + 1) * to_stride, _mm512_unpackhi_epi64(a, c));
    store_bits(to + (4 * q + 2) * to_stride, _mm512_unpacklo_epi64(b, d));
    store_bits(to + (4 * q + 3) * to_stride, _mm512_unpackhi_epi64(b, d));
  }
}

}  // namespace eformer::EFORMER_ISA

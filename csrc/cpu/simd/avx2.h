// Vectors of 8 floats, AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace eformer::EFORMER_ISA {

using F = __m256;
using I = __m256i;
constexpr int lanes = 8;
constexpr int registers = 16;

INLINE F zero() { return _mm256_setzero_ps(); }
INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
INLINE F broadcast(float v) { return _mm256_set1_ps(v); }
INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float sum(F v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE I load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE void store_bits(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
INLINE I broadcast_bits(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
INLINE I as_bits(F v) { return _mm256_castps_si256(v); }
INLINE F as_floats(I v) { return _mm256_castsi256_ps(v); }
INLINE I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
INLINE I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
INLINE I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
INLINE I add_bits(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I larger(I a, I b) { return _mm256_max_epu32(a, b); }
// v + (a > b)
INLINE I add_if_greater(I v, F a, F b) { return _mm256_sub_epi32(v, as_bits(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
// yes where a < b, as signed numbers, else no
INLINE F where_less(I a, I b, F yes, F no) { return _mm256_blendv_ps(no, yes, as_floats(_mm256_cmpgt_epi32(b, a))); }
INLINE uint32_t largest(I v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1))));
}
// Lanes below 16, two to a byte, the first in the high half.
INLINE void store_nibbles(uint8_t* p, I v) {
  const I pairs = bit_or(_mm256_slli_epi64(v, 4), _mm256_srli_epi64(v, 32));
  const I even = _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                  0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const I bytes = _mm256_shuffle_epi8(pairs, even);
  const int low = _mm256_extract_epi16(bytes, 0), high = _mm256_extract_epi16(bytes, 8);
  _mm_storeu_si32(p, _mm_cvtsi32_si128(low | high << 16));
}
template <int S>
INLINE I shift_right(I v) { return S ? _mm256_srli_epi32(v, S) : v; }
template <int S>
INLINE I shift_left(I v) { return S ? _mm256_slli_epi32(v, S) : v; }

// One lane per byte or word of memory.
INLINE I widen_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
INLINE I widen_u16(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
INLINE F widen_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// One lane per half byte: the high half of byte i/2 for even lanes i, the low half for odd ones, moved to bits 4 to 7.
INLINE I widen_u4(const uint8_t* p) {
  const I bytes = _mm256_cvtepu8_epi64(_mm_loadu_si32(p));
  return _mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 36));
}
// The signed byte J of each lane.
template <int J>
INLINE F signed_byte(I v) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(shift_left<24 - 8 * J>(v), 24)); }

INLINE F load_bf16(const uint16_t* p) { return as_floats(shift_left<16>(widen_u16(p))); }
INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE void store_f16(uint16_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void store_bf16(uint16_t* p, F v) {
  const I bits = as_bits(v);
  const I even = add_bits(bit_and(shift_right<16>(bits), broadcast_bits(1)), broadcast_bits(0x7fff));
  const I quiet = bit_or(bits, broadcast_bits(0x400000));
  const I nan = as_bits(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const I high = shift_right<16>(_mm256_blendv_epi8(add_bits(bits, even), quiet, nan));
  const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// From v[j] lane i to consecutive values 4 * i + j.
INLINE void interleave(F (&v)[4]) {
  const F a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
  const F c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
  const F w0 = _mm256_shuffle_ps(a, c, 0x44), w1 = _mm256_shuffle_ps(a, c, 0xee);
  const F w2 = _mm256_shuffle_ps(b, d, 0x44), w3 = _mm256_shuffle_ps(b, d, 0xee);
  v[0] = _mm256_permute2f128_ps(w0, w1, 0x20);
  v[1] = _mm256_permute2f128_ps(w2, w3, 0x20);
  v[2] = _mm256_permute2f128_ps(w0, w1, 0x31);
  v[3] = _mm256_permute2f128_ps(w2, w3, 0x31);
}

// Sixteen values, chosen by the low four bits of each lane.
struct Table16 {
  F low, high;

  static INLINE Table16 of(const float* v) { return {load(v), load(v + 8)}; }
  template <class Fn>
  INLINE Table16 map(Fn&& f) const { return {f(low), f(high)}; }
  INLINE F at(I index) const {
    const F a = _mm256_permutevar8x32_ps(low, index), b = _mm256_permutevar8x32_ps(high, index);
    return _mm256_blendv_ps(a, b, as_floats(shift_left<28>(index)));
  }
};

// Four values, chosen by the low two bits of each lane.
struct Table4 {
  F values;

  static INLINE Table4 of(const float* v) { return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(v))}; }
  INLINE F at(I index) const { return _mm256_permutevar_ps(values, index); }
};

// Lane i gets from[i * count / lanes]; count is a power of two.
class Spread {
 public:
  explicit Spread(int64_t count) : Spread(count, count) {}
  // Only the first `available` values may be read; the others are zero.
  Spread(int64_t count, int64_t available) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    index_ = shift_right<3>(_mm256_mullo_epi32(lane, broadcast_bits(static_cast<uint32_t>(count))));
    mask_ = _mm256_cmpgt_epi32(broadcast_bits(static_cast<uint32_t>(available)), lane);
  }
  INLINE F operator()(const float* from) const {
    return _mm256_permutevar8x32_ps(_mm256_maskload_ps(from, mask_), index_);
  }

 private:
  I index_, mask_;
};

// to[j][i] = from[i][j] for 8 x 8 dwords; `from_bytes` lies between rows of `from`, `to_stride` dwords between rows of `to`.
INLINE void transpose(const uint8_t* from, int64_t from_bytes, uint32_t* to, int64_t to_stride) {
#pragma GCC unroll 2
  for (int q = 0; q < 2; ++q) {
    const auto rows = [&](int r) {  // dwords 4q..4q+3 of rows r and 4+r
      const auto at = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * from_bytes + 16 * q)); };
      return _mm256_inserti128_si256(_mm256_castsi128_si256(at(r)), at(4 + r), 1);
    };
    const I v0 = rows(0), v1 = rows(1), v2 = rows(2), v3 = rows(3);
    const I a = _mm256_unpacklo_epi32(v0, v1), b = _mm256_unpackhi_epi32(v0, v1);
    const I c = _mm256_unpacklo_epi32(v2, v3), d = _mm256_unpackhi_epi32(v2, v3);
    store_bits(to + (4 * q + 0) * to_stride, _mm256_unpacklo_epi64(a, c));
    store_bits(to + (4 * q + 1) * to_stride, _mm256_unpackhi_epi64(a, c));
    store_bits(to + (4 * q + 2) * to_stride, _mm256_unpacklo_epi64(b, d));
    store_bits(to + (4 * q + 3) * to_stride, _mm256_unpackhi_epi64(b, d));
  }
}

}  // namespace eformer::EFORMER_ISA

// FP8: a float of one byte is the upper part of a bf16 after its exponent has been moved.
#pragma once

#include "formats.h"

namespace eformer::EFORMER_ISA {

// The layouts: bits of the exponent, of the mantissa; is the largest exponent kept for infinity and NaN (else for one NaN)?
struct Layout8 {
  int mantissa, bias;
  bool infinity;
};
template <Format format>
constexpr Layout8 layout8 = format == Format::fp8_e4m3 || format == Format::fp8_e4m3_block ? Layout8{3, 7, false} : Layout8{2, 15, true};

#if defined(__AVX512VBMI__)

// The two bytes of the bf16 are looked up, 64 values at a time.
template <Format kind>
struct Fp8 {
  static constexpr Format format = kind;
  static constexpr int per_dword = 4, columns = group_columns, values = 4, overread = 0, finest = 16;
  static constexpr int order(int j, int lane) { return 16 * (lane / 4) + 4 * j + lane % 4; }

  struct Group {
    F value[4];
  };
  struct Bytes {
    alignas(64) uint8_t low[128], high[128];
  };
  static constexpr Bytes bytes = [] {
    constexpr Layout8 layout = layout8<kind>;
    Bytes b{};
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> layout.mantissa, mantissa = code & ((1 << layout.mantissa) - 1);
      const bool special = layout.infinity ? exponent == 31 : code == 127;
      if (exponent == 0 && mantissa) {  // subnormal: no longer in bf16
        for (exponent = 1; !(mantissa >> layout.mantissa); --exponent) mantissa <<= 1;
        mantissa &= (1 << layout.mantissa) - 1;
      }
      int bits = code == 0 ? 0 : (exponent - layout.bias + 127) << 7 | mantissa << (7 - layout.mantissa);
      if (special) bits = 0x7f80 | (mantissa ? 0x40 : 0);
      b.low[code] = static_cast<uint8_t>(bits);
      b.high[code] = static_cast<uint8_t>(bits >> 8);
    }
    return b;
  }();
  // Bytes 2 and 3 of each lane from byte J of the same lane of two vectors.
  struct Places {
    alignas(64) uint8_t of[4][64];
  };
  static constexpr Places places = [] {
    Places p{};
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 64; ++i) p.of[j][i] = static_cast<uint8_t>((i % 4 == 3 ? 64 : 0) + i / 4 * 4 + j);
    return p;
  }();

  I low[2], high[2];

  explicit INLINE Fp8(int)
      : low{load_bits(bytes.low), load_bits(bytes.low + 64)}, high{load_bits(bytes.high), load_bits(bytes.high + 64)} {}

  INLINE I low_bytes(I codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  INLINE I high_bytes(I codes) const {
    const I magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    return _mm512_ternarylogic_epi32(magnitude, codes, broadcast_bits(0x80808080), 0xf8);  // or with the signs
  }
  INLINE Group group(const uint8_t* p) const {
    const I codes = load_bits(p), none = _mm512_setzero_si512(), l = low_bytes(codes), h = high_bytes(codes);
    const I first = _mm512_unpacklo_epi8(l, h), second = _mm512_unpackhi_epi8(l, h);
    return {{as_floats(_mm512_unpacklo_epi16(none, first)), as_floats(_mm512_unpackhi_epi16(none, first)),
             as_floats(_mm512_unpacklo_epi16(none, second)), as_floats(_mm512_unpackhi_epi16(none, second))}};
  }
  template <int J>
  INLINE F value(const Group& g) const { return g.value[J]; }
  template <int J>
  INLINE F value(I codes) const {
    const I l = low_bytes(codes), h = high_bytes(codes);
    return as_floats(_mm512_maskz_permutex2var_epi8(0xccccccccccccccccull, l, load_bits(places.of[J]), h));
  }
  static INLINE void sort(F (&v)[4]) {
    const F a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
    const F c = _mm512_shuffle_f32x4(v[0], v[1], 0xee), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    v[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    v[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    v[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
};

#else

// By arithmetic on the bits, which does not rely on subnormal floats: they may be turned off.
template <Format kind>
struct Fp8 : Bytes<kind> {
  explicit INLINE Fp8(int) {}
  template <int J>
  INLINE F value(I bits) const {
    constexpr Layout8 layout = layout8<kind>;
    constexpr int shift = 1 + layout.mantissa;  // to where the exponent of a float begins
    constexpr uint32_t last = (layout.infinity ? 0x7bu : 0x7eu) << (24 - shift);
    const I top = shift_left<24 - 8 * J>(bits), sign = bit_and(top, broadcast_bits(0x80000000));
    const I magnitude = shift_right<shift>(bit_and(top, broadcast_bits(0x7f000000)));
    const F normal = as_floats(add_bits(magnitude, broadcast_bits(uint32_t{127 - layout.bias} << 23)));
    const F small = sub(add(normal, normal), as_floats(broadcast_bits(uint32_t{128 - layout.bias} << 23)));
    const F finite = where_less(magnitude, broadcast_bits(1u << 23), small, normal);
    const I all = broadcast_bits(layout.infinity ? 0x7f800000 : 0x7fc00000);
    const F value = where_less(broadcast_bits(last), magnitude, as_floats(bit_or(magnitude, all)), finite);
    return as_floats(bit_or(as_bits(value), sign));
  }
};

#endif

template <>
struct Decoder<Format::fp8_e4m3> : Fp8<Format::fp8_e4m3> {
  using Fp8::Fp8;
};
template <>
struct Decoder<Format::fp8_e5m2> : Fp8<Format::fp8_e5m2> {
  using Fp8::Fp8;
};
template <>
struct Decoder<Format::fp8_e4m3_block> : Fp8<Format::fp8_e4m3_block> {
  using Fp8::Fp8;
};
template <>
struct Decoder<Format::fp8_e5m2_block> : Fp8<Format::fp8_e5m2_block> {
  using Fp8::Fp8;
};

}  // namespace eformer::EFORMER_ISA

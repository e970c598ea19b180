// Packed codes to pairs of 16-bit floats, the form in which matrix instructions take them.
//
// A 32-bit word of codes becomes several registers; a register holds two values, the earlier one in its low half:
//   nf4      4 pairs, pair i = values (2i, 2i + 1): lookups by bytes in a table of all 256 pairs; int4, iq4_nl, fp4 likewise
//   int8     2 pairs, pair i = values (2i, 2i + 1); fp8 likewise
//   ternary  8 pairs, pair i = values (i, i + 8)
//   binary  16 pairs, pair i = values (i, i + 16)
// Ternary and binary fields are turned into floats where they stand, in both halves of the word at once, which is why the
// partners of a pair are half a word apart.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace eformer {

template <class E>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint32_t kOne = 0x3F80, kSign = 0x8000;
  static constexpr uint32_t kMagic = 0x4300;  // 128: the mantissa counts ones
  static constexpr int kMagicBits = 7;
  // The bits of a float that this type can hold.
  static __device__ __forceinline__ float cut(float v) { return __uint_as_float(__float_as_uint(v) & 0xFFFF0000u); }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&v);
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000u); }
  // Bits of a power of two or a small sum of two of them, exact in this type.
  static __host__ __device__ constexpr uint32_t bits(int numerator, int shift) {
    int e = 0;
    while ((numerator >> (e + 1)) != 0) ++e;
    uint32_t mantissa = e > 7 ? static_cast<uint32_t>(numerator) >> (e - 7) : static_cast<uint32_t>(numerator) << (7 - e);
    return (static_cast<uint32_t>(127 + e - shift) << 7) | (mantissa & 0x7F);
  }
};
template <>
struct Pair<__half> {
  static constexpr uint32_t kOne = 0x3C00, kSign = 0x8000;
  static constexpr uint32_t kMagic = 0x6400;  // 1024
  static constexpr int kMagicBits = 10;
  static __device__ __forceinline__ float cut(float v) { return __uint_as_float(__float_as_uint(v) & 0xFFFFE000u); }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __half2 v = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&v);
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000u); }
  static __host__ __device__ constexpr uint32_t bits(int numerator, int shift) {
    int e = 0;
    while ((numerator >> (e + 1)) != 0) ++e;
    uint32_t mantissa = e > 10 ? static_cast<uint32_t>(numerator) >> (e - 10) : static_cast<uint32_t>(numerator) << (10 - e);
    return (static_cast<uint32_t>(15 + e - shift) << 10) | (mantissa & 0x3FF);
  }
};

// One 16-bit float does not hold a value of the codebook well enough: with an x of one sign the errors of 16 values do
// not cancel, and grow with the square root of the columns. So a value is the sum of two. The first is cut off rather
// than rounded, and the codebook is stored times a factor with which no second part is zero: both have the sign of the
// value, and an infinity in x gives an infinity.
template <class E>
constexpr float kCodebookFactor = 1.3f;
template <>
constexpr float kCodebookFactor<__half> = 1.3f * 256.f;  // keeps second parts away from subnormal numbers

// The table of pairs of 4-bit values, one copy per lane so that no two lanes of a warp meet in a bank. Rows are 256 bytes apart:
// then a byte permutation makes the address out of the code byte and the lane in one instruction. First parts fill 128
// bytes of a row, second parts the others.
constexpr int kTableBytes = 256 * 256, kSecondPart = 128;

// Without second parts, rows may follow each other: half the room, and one instruction more.
constexpr int kNarrowTableBytes = 256 * 128;

// `mine` is entry (thread & 15) of the codebook. TERMS = 1: no second parts, and no factor.
template <class E, int THREADS, int TERMS = 2, int PITCH = 256>
__device__ __forceinline__ void fill_table(uint8_t* table, int thread, float mine) {
  mine *= TERMS == 2 ? kCodebookFactor<E> : 1.f;
  const float first = Pair<E>::cut(mine), second = mine - first;
#pragma unroll
  for (int i = 0; i < (256 * 8 + THREADS - 1) / THREADS; ++i) {
    const int code = i * (THREADS / 8) + (thread >> 3), high = code >> 4, low = code & 15;  // eight lanes write one row
    const uint32_t big = Pair<E>::pack(__shfl_sync(~0u, first, high), __shfl_sync(~0u, first, low));
    const uint32_t small = Pair<E>::pack(__shfl_sync(~0u, second, high), __shfl_sync(~0u, second, low));
    if (256 * 8 % THREADS == 0 || code < 256) {
      uint4* row = reinterpret_cast<uint4*>(table + code * PITCH + (thread & 7) * 16);
      row[0] = make_uint4(big, big, big, big);
      if constexpr (TERMS == 2) row[kSecondPart / 16] = make_uint4(small, small, small, small);
    }
  }
}

// The rough table: lane t of four has its own. In a word of `mine`, the low half is for the first value of a pair.
template <int THREADS, int PITCH = 256>
__device__ __forceinline__ void fill_rough_table(uint8_t* table, int thread, uint4 mine) {
#pragma unroll
  for (int i = 0; i < (256 * 8 + THREADS - 1) / THREADS; ++i) {
    const int code = i * (THREADS / 8) + (thread >> 3);  // eight lanes write one row
    const uint32_t words[4] = {mine.x, mine.y, mine.z, mine.w};
    uint32_t pair[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
      pair[t] = __byte_perm(__shfl_sync(~0u, words[t], code >> 4), __shfl_sync(~0u, words[t], code & 15), 0x7610);
    if (256 * 8 % THREADS == 0 || code < 256)
      *reinterpret_cast<uint4*>(table + code * PITCH + (thread & 7) * 16) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

template <int FMT, class E>
struct Decoder;

template <class E>
struct Decoder<kNf4, E> {
  const uint8_t* table;
  uint32_t lane4;
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i, int part = 0) const {
    uint32_t offset = __byte_perm(word, lane4, 0x5504 | (i << 4));
    return *reinterpret_cast<const uint32_t*>(table + offset + part * kSecondPart);
  }
};

template <class E>
struct Decoder<kNf4Fine, E> : Decoder<kNf4, E> {};
template <class E>
struct Decoder<kCode4, E> : Decoder<kNf4, E> {};
template <class E>
struct Decoder<kCode4Fine, E> : Decoder<kNf4, E> {};
template <class E>
struct Decoder<kShift4, E> : Decoder<kNf4, E> {};
template <class E>
struct Decoder<kShift4Fine, E> : Decoder<kNf4, E> {};

// Two floats of 8 bits, which f16 and bf16 hold exactly.
template <class E, int FMT>
__device__ __forceinline__ uint32_t float8_to_floats(uint32_t two) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), FMT == kE4m3 ? __NV_E4M3 : __NV_E5M2);
  if constexpr (Pair<E>::kMagicBits == 10) return raw.x | static_cast<uint32_t>(raw.y) << 16;
  const float2 v = __half22float2(__half2(raw));
  return Pair<E>::pack(v.x, v.y);
}
template <class E>
struct Decoder<kE4m3, E> {
  const uint8_t* table;
  uint32_t lane4;
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const { return float8_to_floats<E, kE4m3>(word >> 16 * i); }
};
template <class E>
struct Decoder<kE5m2, E> {
  const uint8_t* table;
  uint32_t lane4;
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const { return float8_to_floats<E, kE5m2>(word >> 16 * i); }
};

template <class E>
struct Decoder<kInt8, E> {
  const uint8_t* table;
  uint32_t lane4;
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const;
};
// bf16 counts to 128 in its mantissa: 128 + low seven bits, minus 128 or (sign bit set) 256.
template <>
__device__ __forceinline__ uint32_t Decoder<kInt8, __nv_bfloat16>::pair(uint32_t word, int i) const {
  uint32_t select = i == 0 ? 0x4140 : 0x4342;
  uint32_t low = __byte_perm(word & 0x7F7F7F7Fu, 0x43434343u, select);
  uint32_t high = __byte_perm(word & 0x80808080u, 0x43434343u, select);
  return Pair<__nv_bfloat16>::fma(high, 0xBF80BF80u, low);
}
template <>
__device__ __forceinline__ uint32_t Decoder<kInt8, __half>::pair(uint32_t word, int i) const {
  uint32_t biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
  return Pair<__half>::fma(biased, 0x3C003C00u, 0xE480E480u);  // minus 1152
}

template <class E>
struct Decoder<kInt8Block, E> : Decoder<kInt8, E> {};
template <class E>
struct Decoder<kShift8, E> : Decoder<kInt8, E> {};
template <class E>
struct Decoder<kE4m3Block, E> : Decoder<kE4m3, E> {};

template <class E>
struct Decoder<kTernary, E> {
  const uint8_t* table;
  uint32_t lane4;
  // The field becomes part of the mantissa of 2^n: (2^n + c * 2^p) / 2^p - (2^n / 2^p + 1) = c - 1, exactly.
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    constexpr int kBits = Pair<E>::kMagicBits;
    constexpr int kSlots = kBits / 2;                     // fields that fit the mantissa without a shift
    const int bit = 8 * (i / 4) + 6 - 2 * (i % 4);
    const int shift = bit / (2 * kSlots) * (2 * kSlots);
    const int p = bit - shift;
    uint32_t field = ((word >> shift) & (0x00030003u << p)) | (Pair<E>::kMagic * 0x00010001u);
    uint32_t factor = Pair<E>::bits(1, p) * 0x00010001u;
    uint32_t bias = (Pair<E>::bits((1 << (kBits - p)) + 1, 0) | 0x8000u) * 0x00010001u;
    return Pair<E>::fma(field, factor, bias);
  }
};

template <class E>
struct Decoder<kBinary, E> {
  const uint8_t* table;
  uint32_t lane4;
  // The bit becomes the sign of one; a set bit means plus.
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    const int bit = 8 * (i / 8) + 7 - i % 8;
    return ((word << (15 - bit)) & 0x80008000u) ^ ((Pair<E>::kOne | Pair<E>::kSign) * 0x00010001u);
  }
};

// The same, but ternary and binary weights come with a known number added: a field is put into a float where it stands,
// as the bits behind the leading one of a small power of two (or, of bf16, with the last bit of the exponent), and
// nothing is subtracted. A sum that starts from x times `bias` has that done for all rows of the matrix at once.
//
// Masks and powers of two of up to four kinds of fields. They come from outside because the compiler would make two
// instructions out of two constants.
struct FieldBits {
  uint32_t mask[4], base[4];
};

template <int FMT, class E>
struct Weights : Decoder<FMT, E> {
  __device__ __forceinline__ Weights(const uint8_t* table, uint32_t lane4, const FieldBits&) : Decoder<FMT, E>{} {
    this->table = table, this->lane4 = lane4;
  }
};

template <int FMT, class E>
struct FieldWeights {
  static constexpr int kBits = FMT == kTernary ? 2 : 1, kKinds = 4 / kBits;
  // Fields are brought to four bits that start here; there are four shifts, which all pairs of a word share.
  static constexpr int kWindow = Pair<E>::kMagicBits == 7 ? 4 : 6;
  static constexpr int kTop = Pair<E>::kMagicBits == 7 ? 1 : 2;  // logarithm of the number the topmost field is added to
  FieldBits bits;
  __device__ __forceinline__ FieldWeights(const uint8_t*, uint32_t, const FieldBits& fields) : bits(fields) {}

  static __host__ __device__ constexpr int bit(int i) { return 8 * (i * kBits / 8) + 8 - kBits - i * kBits % 8; }
  static __host__ __device__ constexpr int kind(int i) { return kKinds - 1 - bit(i) % 4 / kBits; }
  // Ternary 2 and 8, binary 2, 4, 8 and 16 (with two for a set bit); f16 the double.
  static __host__ __device__ constexpr int base(int kind) { return 1 << (kTop + kind * kBits); }
  // Minus what is there too much, twice.
  static __host__ __device__ constexpr uint32_t bias(int i) {
    return (Pair<E>::bits(base(kind(i)) + 1, 0) | Pair<E>::kSign) * 0x00010001u;
  }
  static FieldBits field_bits() {
    FieldBits f{};
    for (int k = 0; k < kKinds; ++k) {
      f.mask[k] = ((1u << kBits) - 1) * 0x00010001u << (kWindow + 4 - kBits - k * kBits);
      f.base[k] = Pair<E>::bits(base(k), 0) * 0x00010001u;
    }
    return f;
  }
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    const int shift = bit(i) / 4 * 4 - kWindow;
    const uint32_t there = shift < 0 ? word << -shift : word >> shift;
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(there), "r"(bits.mask[kind(i)]), "r"(bits.base[kind(i)]));
    return d;
  }
};
template <class E>
struct Weights<kTernary, E> : FieldWeights<kTernary, E> {
  using FieldWeights<kTernary, E>::FieldWeights;
};
template <class E>
struct Weights<kBinary, E> : FieldWeights<kBinary, E> {
  using FieldWeights<kBinary, E>::FieldWeights;
};

}  // namespace eformer

// One value at a time: half precision, codes, scales. The vector code falls back on this at ragged ends.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "problem.h"

namespace eformer::EFORMER_ISA {

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline float from_bf16(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -value : value;
}

inline uint16_t to_f16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past the largest
  if (magnitude < 0x38800000) {                                              // subnormal: let the addition round
    const uint32_t rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

// What the bytes of the types of one byte stand for. The smallest e8m0, 2^-127, is no normal float: threads of XLA take it
// for zero wherever they multiply, so nothing here is computed when the program runs.
struct ByteValues {
  float e8m0[256], e4m3[256];
};
inline constexpr ByteValues byte_values = [] {
  ByteValues v{};
  for (int code = 0; code < 256; ++code) {
    const uint32_t half = code == 0 || code == 255 ? 0x400000 : 0;
    v.e8m0[code] = std::bit_cast<float>(static_cast<uint32_t>(code) << 23 | half);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = static_cast<float>(exponent ? 8 + mantissa : mantissa) / 512;
    for (int e = 1; e < exponent; ++e) value *= 2;
    if ((code & 127) == 127) value = __builtin_nanf("");
    v.e4m3[code] = code < 128 ? value : -value;
  }
  return v;
}();
inline const float* values_of_bytes(Type type) { return type == Type::e8m0 ? byte_values.e8m0 : byte_values.e4m3; }

inline float load_as_f32(const void* data, Type type, int64_t i) {
  switch (type) {
    case Type::f32: return static_cast<const float*>(data)[i];
    case Type::bf16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case Type::f16: return from_f16(static_cast<const uint16_t*>(data)[i]);
    default: return values_of_bytes(type)[static_cast<const uint8_t*>(data)[i]];
  }
}

// f(numbers, number_of): the array as what it holds, and what makes a float of an entry.
template <class Fn>
inline void as_numbers(const void* data, Type type, Fn&& f) {
  if (type == Type::f32) return f(static_cast<const float*>(data), [](float value) { return value; });
  if (type == Type::bf16) return f(static_cast<const uint16_t*>(data), from_bf16);
  if (type == Type::f16) return f(static_cast<const uint16_t*>(data), from_f16);
  f(static_cast<const uint8_t*>(data), [values = values_of_bytes(type)](uint8_t code) { return values[code]; });
}

inline void store_from_f32(void* data, Type type, int64_t i, float value) {
  switch (type) {
    case Type::f32: static_cast<float*>(data)[i] = value; return;
    case Type::bf16: static_cast<uint16_t*>(data)[i] = to_bf16(value); return;
    case Type::f16: static_cast<uint16_t*>(data)[i] = to_f16(value); return;
    default: __builtin_unreachable();
  }
}

// What the codes of the formats of four bits stand for.
inline constexpr float codebooks[4][16] = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
     -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
     0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},                       // nf4
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},                                     // int4
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},                   // iq4_nl
    {0.0f, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6}};                    // fp4
inline constexpr const float* nf4_codebook = codebooks[0];

inline float from_e5m2(uint8_t bits) { return from_f16(static_cast<uint16_t>(bits << 8)); }

inline float from_e4m3(uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return bit_cast<float>(0x7fc00000u);
  return 256 * from_f16(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}

// The value of one code, before any scale.
inline float value_of(const Matrix& d, const uint8_t* row, int64_t col) {
  switch (d.format) {
    case Format::nf4: return codebooks[d.table][row[col / 2] >> (col % 2 ? 0 : 4) & 15];
    case Format::fp8_e4m3:
    case Format::fp8_e4m3_block: return from_e4m3(row[col]);
    case Format::fp8_e5m2:
    case Format::fp8_e5m2_block: return from_e5m2(row[col]);
    case Format::int8:
    case Format::int8_block: return static_cast<float>(static_cast<int8_t>(row[col]));
    case Format::ternary: return static_cast<float>((row[col / 4] >> (6 - col % 4 * 2) & 3) - 1);
    case Format::binary: return row[col / 8] >> (7 - col % 8) & 1 ? 1.0f : -1.0f;
    default: return 0;
  }
}

inline float scale_at(const Matrix& d, int64_t row, int64_t col) {
  if (!d.scale.data) return 1;
  const int64_t at = d.block ? col / d.block : col;
  const float scale = load_as_f32(d.scale.data, d.scale.type, row * d.scale.row_stride + at * d.scale.col_stride);
  return d.scale.factor ? scale * *d.scale.factor : scale;
}

inline float decoded(const Matrix& d, int64_t row, int64_t col) {
  return value_of(d, d.codes + row * d.row_bytes, col) * scale_at(d, row, col);
}

}  // namespace eformer::EFORMER_ISA

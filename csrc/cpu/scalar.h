// One value at a time: half precision, codes, scales. The vector code falls back on this at ragged ends.
#pragma once

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

inline float load_as_f32(const void* data, Type type, int64_t i) {
  switch (type) {
    case Type::f32: return static_cast<const float*>(data)[i];
    case Type::bf16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case Type::f16: return from_f16(static_cast<const uint16_t*>(data)[i]);
  }
  return 0;
}

inline void store_from_f32(void* data, Type type, int64_t i, float value) {
  switch (type) {
    case Type::f32: static_cast<float*>(data)[i] = value; return;
    case Type::bf16: static_cast<uint16_t*>(data)[i] = to_bf16(value); return;
    case Type::f16: static_cast<uint16_t*>(data)[i] = to_f16(value); return;
  }
}

inline constexpr float nf4_codebook[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The value of one code, before any scale.
inline float value_of(Format format, const uint8_t* row, int64_t col) {
  switch (format) {
    case Format::nf4: return nf4_codebook[row[col / 2] >> (col % 2 ? 0 : 4) & 15];
    case Format::int8: return static_cast<float>(static_cast<int8_t>(row[col]));
    case Format::ternary: return static_cast<float>((row[col / 4] >> (6 - col % 4 * 2) & 3) - 1);
    case Format::binary: return row[col / 8] >> (7 - col % 8) & 1 ? 1.0f : -1.0f;
  }
  return 0;
}

inline float scale_at(const Matrix& d, int64_t row, int64_t col) {
  if (!d.scale.data) return 1;
  const int64_t at = d.block ? col / d.block : col;
  return load_as_f32(d.scale.data, d.scale.type, row * d.scale.row_stride + at * d.scale.col_stride);
}

inline float decoded(const Matrix& d, int64_t row, int64_t col) {
  return value_of(d.format, d.codes + row * d.row_bytes, col) * scale_at(d, row, col);
}

}  // namespace eformer::EFORMER_ISA

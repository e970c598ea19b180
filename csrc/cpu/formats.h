// How each format turns bits into values, `lanes` at a time. Scales are left to the caller.
#pragma once

#include "problem.h"
#include "scalar.h"
#include "simd/simd.h"

namespace eformer::EFORMER_ISA {

// Where the bits of element J start in a little-endian dword whose bytes hold their first element in the high bits.
template <int bits>
constexpr int start_of(int j) {
  constexpr int per_byte = 8 / bits;
  return 8 * (j / per_byte) + bits * (per_byte - 1 - j % per_byte);
}

// Calls f.operator()<0>() ... f.operator()<count - 1>().
template <int count, class Fn>
INLINE void unroll(Fn&& f) {
  if constexpr (count > 0) {
    unroll<count - 1>(f);
    f.template operator()<count - 1>();
  }
}

// A group is 4 * lanes consecutive columns of one row, the unit of the kernels that read rows as they are stored.
// `value<J>` of a group gives, in lane i, column order(J, i) of the group; `sort` puts all four in order. Reading one touches `overread` bytes behind it.
constexpr int group_columns = 4 * lanes;

// Formats of 1, 2 or 4 bits: a lane holds the bits of 4 neighbours.
struct Interleaved {
  using Group = I;
  static constexpr int columns = group_columns, values = 4, overread = 0;
  static constexpr int finest = 4;  // columns that always share a lane, so the smallest block a scale per lane serves
  static constexpr int order(int j, int lane) { return 4 * lane + j; }
  static INLINE void sort(F (&group)[4]) { interleave(group); }
};

template <Format format>
struct Decoder;

template <>
struct Decoder<Format::nf4> : Interleaved {
  static constexpr Format format = Format::nf4;
  static constexpr int per_dword = 8;
  Table16 table;

  explicit INLINE Decoder(int which) : table(Table16::of(codebooks[which])) {}
  explicit INLINE Decoder(Table16 table) : table(table) {}
  // The same with every value changed: once for a whole group of columns.
  template <class Fn>
  INLINE Decoder map(Fn&& f) const { return Decoder(table.map(f)); }
  static INLINE I group(const uint8_t* p) { return widen_u16(p); }
  template <int J>
  INLINE F value(I bits) const { return table.at(shift_right<start_of<4>(J)>(bits)); }
};

template <>
struct Decoder<Format::ternary> : Interleaved {
  static constexpr Format format = Format::ternary;
  static constexpr int per_dword = 16;
  static constexpr float meaning[4] = {-1, 0, 1, 2};
  Table4 table = Table4::of(meaning);

  explicit INLINE Decoder(int) {}
  static INLINE I group(const uint8_t* p) { return widen_u8(p); }
  template <int J>
  INLINE F value(I bits) const { return table.at(shift_right<start_of<2>(J)>(bits)); }
};

template <>
struct Decoder<Format::binary> : Interleaved {
  static constexpr Format format = Format::binary;
  static constexpr int per_dword = 32;

  explicit INLINE Decoder(int) {}
  static INLINE I group(const uint8_t* p) { return widen_u4(p); }
  // The bit becomes the sign of -1 and is then turned around.
  template <int J>
  INLINE F value(I bits) const {
    constexpr int start = start_of<1>(J);
    const I sign = bit_and(shift_left<31 - start>(bits), broadcast_bits(0x80000000));
    return as_floats(bit_xor(sign, broadcast_bits(0xbf800000)));
  }
};

template <>
struct Decoder<Format::int8> {
  static constexpr Format format = Format::int8;
  static constexpr int per_dword = 4;
  // Widening a byte is as cheap as moving it inside a dword, and keeps the order of the columns.
  using Group = const uint8_t*;
  static constexpr int columns = group_columns, values = 4, overread = 0, finest = 0;
  static constexpr int order(int j, int lane) { return lanes * j + lane; }
  static INLINE void sort(F (&)[4]) {}

  explicit INLINE Decoder(int) {}
  static INLINE Group group(const uint8_t* p) { return p; }
  template <int J>
  INLINE F value(Group p) const { return widen_i8(p + J * lanes); }
  template <int J>
  INLINE F value(I bits) const { return signed_byte<J>(bits); }
};

// Formats of one byte: a lane holds 4 neighbours, so that it has one scale where there are blocks.
template <Format kind>
struct Bytes : Interleaved {
  static constexpr Format format = kind;
  static constexpr int per_dword = 4;

  static INLINE I group(const uint8_t* p) { return load_bits(p); }
};

template <>
struct Decoder<Format::int8_block> : Bytes<Format::int8_block> {
  explicit INLINE Decoder(int) {}
  template <int J>
  INLINE F value(I bits) const { return signed_byte<J>(bits); }
};

// The same where a block is one group or more, which has one scale: in the order of INT8, whose values come out quicker.
struct WholeInt8 : Decoder<Format::int8> {
  static constexpr Format format = Format::int8_block;
  static constexpr int finest = group_columns;
  using Decoder<Format::int8>::Decoder;
};

// Puts the columns of a group in memory in their order.
template <Format format>
inline void sort_group(float* group) {
  F v[4];
  for (int j = 0; j < 4; ++j) v[j] = load(group + j * lanes);
  Decoder<format>::sort(v);
  for (int j = 0; j < 4; ++j) store(group + j * lanes, v[j]);
}

// Bytes of one group.
template <Format format>
constexpr int group_bytes = group_columns / static_cast<int>(per_byte(format));

}  // namespace eformer::EFORMER_ISA

// What the codes of each format are as bytes, for products with an x of 8 bits.
#pragma once

#include "formats.h"
#include "simd/bytes.h"

namespace eformer::EFORMER_ISA {

// What the codes of the formats of four bits stand for, as integers: value = entry * unit. Those of NF4 are off by at most
// 3.3e-5 of themselves (28776 is the best of all units whose entries fit two bytes); the others are exact.
struct ByteCodebook {
  float unit;
  int entries[16];
};
inline constexpr ByteCodebook byte_codebooks[4] = {
    {1.0f / 28776, {-28776, -20034, -15110, -11364, -8185, -5317, -2620, 0, 2290, 4631, 7082, 9724, 12682, 16190, 20804, 28776}},
    {1.0f, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}},
    {1.0f, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},
    {0.5f, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}}};

// A vector of codes holds `fields` vectors of weights: field J of a byte is its J-th value. So a lane has the fields of
// four bytes, 4 * fields neighbouring values. A weight has one byte, or two: part 0 is the one worth 256.
template <Format format, int weight_parts = 1>
struct ByteWeights {
  static constexpr int parts = weight_parts;
  static constexpr int fields = static_cast<int>(per_byte(format));
  static constexpr int per_dword = 4 * fields;
  static constexpr int part_size = 0;  // from one part to the next: a code has both
  // What is added to every byte, and so to every weight.
  static constexpr int added = !unsigned_weights ? 0 : format == Format::ternary || format == Format::binary ? 1 : 128;
  static constexpr int excess = parts == 2 ? added * 257 : added;

  ByteTable table[parts];

  explicit INLINE ByteWeights(int which) {
    for (int part = 0; part < parts; ++part) table[part] = ByteTable::of(tables.of[part][format == Format::nf4 ? which : own]);
  }

  // Without what is added.
  static INLINE ByteTable signed_table(int which, int part) {
    alignas(16) uint8_t entries[16];
    for (int i = 0; i < 16; ++i) entries[i] = static_cast<uint8_t>(tables.of[part][format == Format::nf4 ? which : own][i] - added);
    return ByteTable::of(entries);
  }

  static float unit(int which) { return format == Format::nf4 ? byte_codebooks[which].unit : 1.0f; }

  template <int J, int part = 0>
  INLINE I field(I codes) const {
    constexpr int bits = 8 / fields, start = bits * (fields - 1 - J);
    if constexpr (fields == 1) {
      return added ? bit_xor(codes, broadcast_bits(0x80808080)) : codes;
    } else if constexpr (format == Format::binary && added) {  // 0 or 2
      const I moved = start ? shift_right<start ? start - 1 : 0>(codes) : shift_left<1>(codes);
      return bit_and(moved, broadcast_bits(0x02020202));
    } else {
      const I code = bit_and(shift_right<start>(codes), broadcast_bits(((1u << bits) - 1) * 0x01010101u));
      return format == Format::ternary && added ? code : table[part].at(code);
    }
  }

 private:
  static constexpr int own = format == Format::ternary ? 4 : 5;
  struct Tables {
    uint8_t of[2][6][16];
  };
  static constexpr Tables tables = [] {
    Tables t{};
    for (int i = 0; i < 16; ++i) {
      for (int which = 0; which < 4; ++which) {
        const int entry = byte_codebooks[which].entries[i], high = (entry + 128) >> 8;
        t.of[0][which][i] = static_cast<uint8_t>((parts == 2 ? high : entry) + added);
        t.of[1][which][i] = static_cast<uint8_t>(entry - 256 * high + added);
      }
      t.of[0][4][i] = static_cast<uint8_t>(i % 4 - 1);
      t.of[0][5][i] = static_cast<uint8_t>(i % 2 * 2 - 1);
    }
    return t;
  }();
};

}  // namespace eformer::EFORMER_ISA

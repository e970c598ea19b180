// Four bits in groups of 8 * lanes columns, for kernels that do so little with a value that decoding it is what takes time.
#pragma once

#include <bit>

#include "formats.h"

namespace eformer::EFORMER_ISA {

#if defined(__AVX2__) && !defined(__AVX512F__)

// Without a lookup of 16 floats: the four bytes of the floats are looked up in one table each, 32 at a time, and joined.
struct WideNf4 {
  static constexpr Format format = Format::nf4;
  static constexpr int columns = 8 * lanes, values = 8, overread = 0, finest = 32;
  // Bytes 0..15 of a group are in the lower half of the vectors, 16..31 in the upper; high halves of bytes come first.
  static constexpr int order(int j, int lane) { return 2 * (16 * (lane / 4) + 4 * (j % 4) + lane % 4) + j / 4; }

  struct Group {
    F value[values];
  };
  struct Bytes {
    alignas(32) uint8_t of[4][32];
  };
  struct Tables {
    Bytes table[4];
  };
  static constexpr Tables tables = [] {
    Tables t{};
    for (int which = 0; which < 4; ++which)
      for (int i = 0; i < 32; ++i)
        for (int b = 0; b < 4; ++b)
          t.table[which].of[b][i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(codebooks[which][i % 16]) >> 8 * b);
    return t;
  }();
  const Bytes& table;

  explicit INLINE WideNf4(int which) : table(tables.table[which]) {}

  INLINE Group group(const uint8_t* p) const {
    const I bits = load_bits(p), low_half = _mm256_set1_epi8(15);
    Group g;
    join(bit_and(shift_right<4>(bits), low_half), g.value);
    join(bit_and(bits, low_half), g.value + 4);
    return g;
  }
  template <int J>
  INLINE F value(const Group& g) const { return g.value[J]; }

 private:
  INLINE void join(I codes, F* to) const {
    I b[4];
    for (int i = 0; i < 4; ++i) b[i] = _mm256_shuffle_epi8(load_bits(table.of[i]), codes);
    const I low = _mm256_unpacklo_epi8(b[0], b[1]), low2 = _mm256_unpacklo_epi8(b[2], b[3]);
    const I high = _mm256_unpackhi_epi8(b[0], b[1]), high2 = _mm256_unpackhi_epi8(b[2], b[3]);
    to[0] = as_floats(_mm256_unpacklo_epi16(low, low2));
    to[1] = as_floats(_mm256_unpackhi_epi16(low, low2));
    to[2] = as_floats(_mm256_unpacklo_epi16(high, high2));
    to[3] = as_floats(_mm256_unpackhi_epi16(high, high2));
  }
};

#else

// A lane holds 8 neighbours, brought to its low end by shifts. Where vectors have two ports, four overlapping loads, one byte
// apart, are cheaper than most of them; where they have four, loads across lines are what takes time.
struct WideNf4 {
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
  static constexpr int loads = 1;
#else
  static constexpr int loads = 4;
#endif
  static constexpr Format format = Format::nf4;
  static constexpr int columns = 8 * lanes, values = 8, overread = loads - 1, finest = 8;
  static constexpr int order(int j, int lane) { return 8 * lane + j; }

  struct Group {
    I bits[loads];
  };
  Table16 table;

  explicit INLINE WideNf4(int which) : table(Table16::of(codebooks[which])) {}
  INLINE Group group(const uint8_t* p) const {
    Group g;
    for (int i = 0; i < loads; ++i) g.bits[i] = load_bits(p + i);
    return g;
  }
  template <int J>
  INLINE F value(const Group& g) const {
    constexpr int each = values / loads;
    return table.at(shift_right<start_of<4>(J % each)>(g.bits[J / each]));
  }
};

#endif

}  // namespace eformer::EFORMER_ISA

// Staging binary codes whose rows run along the outputs: the bits of 8 rows by 8 columns are turned by one instruction.
#pragma once

#include "panel.h"

namespace eformer::EFORMER_ISA {

// The column at a position of a staged tile: joining bytes to dwords turns blocks of 4 x 4 around.
constexpr int turned_column(int position) { return position / 4 % 4 * 16 + position / 16 * 4 + position % 4; }

#if defined(__GFNI__) && defined(__AVX512VBMI__)

constexpr bool can_turn_bits = true;

struct Bytes64 {
  alignas(64) uint8_t at[64];
};

// rows[i] element j of 64 bits becomes rows[j] element i.
INLINE void transpose_qwords(I (&rows)[8]) {
  const I position = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
#pragma GCC unroll 3
  for (int d = 1; d < 8; d *= 2) {  // swap the bit d of row and position
    const __mmask8 set = _mm512_test_epi64_mask(position, _mm512_set1_epi64(d));
    const I low = _mm512_mask_add_epi64(position, set, position, _mm512_set1_epi64(8 - d));
    const I high = _mm512_mask_add_epi64(_mm512_add_epi64(position, _mm512_set1_epi64(d)), set, position, _mm512_set1_epi64(8));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if (i & d) continue;
      const I a = rows[i], b = rows[i + d];
      rows[i] = _mm512_permutex2var_epi64(a, low, b);
      rows[i + d] = _mm512_permutex2var_epi64(a, high, b);
    }
  }
}

// From 8 bytes (columns) of each of 8 rows: bit 7 - r of byte n is bit n, in storage order, of row r.
INLINE I turn_bits(I rows) {
  static constexpr Bytes64 columns_first = [] {
    Bytes64 index{};
    for (int i = 0; i < 64; ++i) index.at[i] = static_cast<uint8_t>(i % 8 * 8 + i / 8);
    return index;
  }();
  const I matrices = _mm512_permutexvar_epi8(load_bits(columns_first.at), rows);
  return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(0x0102040810204080), matrices, 0);
}

// 32 rows of 64 bytes, `step` bytes apart, to one dword per column: 8 tiles, `tile_stride` dwords apart.
inline void turn_rows(const uint8_t* from, int64_t step, uint32_t* to, int64_t tile_stride) {
  I bytes[4][8];  // [rows / 8][tile]
  for (int q = 0; q < 4; ++q) {
    for (int r = 0; r < 8; ++r) bytes[q][r] = load_bits(from + (8 * q + r) * step);
    transpose_qwords(bytes[q]);
    for (int t = 0; t < 8; ++t) bytes[q][t] = turn_bits(bytes[q][t]);
  }
  for (int t = 0; t < 8; ++t, to += tile_stride) {
    const I low = _mm512_unpacklo_epi8(bytes[0][t], bytes[1][t]), high = _mm512_unpackhi_epi8(bytes[0][t], bytes[1][t]);
    const I low2 = _mm512_unpacklo_epi8(bytes[2][t], bytes[3][t]), high2 = _mm512_unpackhi_epi8(bytes[2][t], bytes[3][t]);
    store_bits(to, _mm512_unpacklo_epi16(low, low2));
    store_bits(to + 16, _mm512_unpackhi_epi16(low, low2));
    store_bits(to + 32, _mm512_unpacklo_epi16(high, high2));
    store_bits(to + 48, _mm512_unpackhi_epi16(high, high2));
  }
}

#else

constexpr bool can_turn_bits = false;
inline void turn_rows(const uint8_t*, int64_t, uint32_t*, int64_t) {}

#endif

// Eight tiles of columns n0... (a multiple of 512) for `dwords` times 32 rows k0...: bits [tile][dword of k][position].
inline void stage_columns(const Weights& w, int64_t n0, int64_t k0, int dwords, uint32_t* bits) {
  const int64_t bytes = min(64, w.row_bytes - n0 / 8);
  for (int d = 0; d < dwords && k0 + 32 * d < w.rows; ++d) {
    const int64_t k = k0 + 32 * d, rows = min(32, w.rows - k);
    const uint8_t* from = w.codes + k * w.row_bytes + n0 / 8;
    int64_t step = w.row_bytes;
    uint8_t padded[32 * 64];
    if (rows < 32 || bytes < 64) {
      std::memset(padded, 0, sizeof padded);
      for (int64_t r = 0; r < rows; ++r) std::memcpy(padded + r * 64, from + r * step, bytes);
      from = padded;
      step = 64;
    } else {
      for (int r = 0; r < 32; ++r) __builtin_prefetch(from + (32 * dwords + r) * step, 0, 2);
    }
    turn_rows(from, step, bits + d * tile, dwords * tile);
  }
}

}  // namespace eformer::EFORMER_ISA

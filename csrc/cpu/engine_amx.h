// The tile engine: AMX multiplies 16 x 32 by 32 x 16 bf16 values in one instruction.
//
// x is split into `x_parts` bf16 parts and D into `w_parts`, exactly, and all products of parts are summed in f32.
#pragma once

#include "pairs.h"
#include "rows.h"
#include "tiles_amx.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

constexpr bool has_infinity(Format format) { return format == Format::fp8_e5m2 || format == Format::fp8_e5m2_block; }

// A vector of x into its parts, `apart` words from each other. Infinities and NaN have no remainder. A remainder that is zero
// would make NaN of an infinite value of D: there it is the least number with the sign of x.
INLINE void split(F v, int parts, bool infinite, uint16_t* to, int64_t apart) {
  const I least = bit_or(bit_and(as_bits(v), broadcast_bits(0x80000000)), broadcast_bits(0x800000));
  const __mmask16 nothing = _mm512_fpclass_ps_mask(v, 0x87);  // zero or NaN
  for (int part = 0; part < parts; ++part, to += apart) {
    const __mmask16 special = _mm512_fpclass_ps_mask(v, 0x99);
    const I bits = _mm512_mask_or_epi32(as_bits(v), _mm512_fpclass_ps_mask(v, 0x81), as_bits(v), broadcast_bits(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(shift_right<16>(bits)));
    v = _mm512_mask_mov_ps(sub(v, leading_part(v)), special, zero());
    if (infinite) v = _mm512_mask_mov_ps(v, _mm512_mask_cmp_ps_mask(~nothing, v, zero(), _CMP_EQ_OQ), as_floats(least));
  }
}

// Sums that wait for their scales, and the small parts of x, must stay within what a float holds: is the largest number of each
// row between 2^-70 and 2^90? All must be finite where a value of D comes in parts, some of them zero.
inline bool moderate(const Product& p, bool finite_only) {
  constexpr uint32_t least = (127u - 70) << 23, most = (127u + 90) << 23, infinity = 0x7f800000;
  constexpr int some = 256;
  alignas(64) float values[some];
  for (int64_t i = 0; i < p.m; ++i) {
    I largest_yet = broadcast_bits(0);
    for (int64_t k = 0; k < p.k(); k += some) {
      const int64_t count = min(some, p.k() - k);
      read_row(p.x, p.x_type, i * p.k() + k, count, nullptr, values);
      for (int64_t j = count; j % lanes; ++j) values[j] = 0;
      for (int64_t j = 0; j < count; j += lanes) {
        const I bits = bit_and(as_bits(load(values + j)), broadcast_bits(0x7fffffff));
        const __mmask16 finite = _mm512_cmplt_epu32_mask(bits, broadcast_bits(infinity));
        if (finite_only && finite != 0xffff) return false;
        largest_yet = _mm512_mask_max_epu32(largest_yet, finite, largest_yet, bits);
      }
    }
    const uint32_t found = largest(largest_yet);
    if (found > most || (found && found < least)) return false;
  }
  return true;
}

template <int x_parts, int w_parts>
struct AmxEngine {
  static constexpr int depth = w_parts == 1 ? 256 : 64;  // a panel fits the nearest cache
  static constexpr int side = 16;             // rows and columns of a tile of sums
  static constexpr int step = 32;             // k per instruction
  static constexpr int x_tile = side * step;  // values

  // x is packed as [m / 16][k / 32][part][16][32], rows and columns beyond the end being zero.
  using Packed = uint16_t;
  using Panel = uint32_t;
  using Sink = PairSink<w_parts, depth>;
  static constexpr int panel_size = w_parts * Sink::part_size;
  static int64_t steps(int64_t k) { return ceil_div(k, step); }
  static int64_t packed_size(int64_t m, int64_t k) { return ceil_div(m, side) * steps(k) * x_parts * x_tile; }
  static int64_t packed_chunks(int64_t m) { return ceil_div(m, side); }

  // Lives as long as one thread multiplies.
  struct Session {
    Tiles tiles;
    explicit Session(int64_t m) : tiles(min(m, side)) {}
  };

  static void finish(Panel* panel, int64_t count) { Sink{panel}.pad(count, step); }

  static void pack(const Product& p, const float* factor, int64_t chunk, Packed* packed) {
    constexpr int some = 8 * step;
    const int64_t k = p.k(), m0 = chunk * side;
    Packed* band = packed + chunk * steps(k) * x_parts * x_tile;
    for (int64_t i = 0; i < side; ++i)
      for (int64_t k0 = 0; k0 < k; k0 += some) {
        const int64_t count = m0 + i < p.m ? min(some, k - k0) : 0;
        alignas(64) float values[some] = {};
        read_row(p.x, p.x_type, (m0 + i) * k + k0, count, factor ? factor + k0 : nullptr, values);
        for (int64_t s = 0; s < min(some, k - k0); s += step)
          for (int half = 0; half < step; half += lanes)
            split(load(values + s + half), x_parts, has_infinity(p.d.format),
                  band + (k0 + s) / step * x_parts * x_tile + i * step + half, x_tile);
      }
  }

  // c (m, tile) = or += x[:, k0 : k0 + count] @ panel
  static void multiply(const Packed* packed, int64_t m, int64_t k, int64_t k0, int64_t count, const Panel* panel,
                       bool first, float* c, RowsAhead& ahead) {
    ahead.ask_for_all();
    const int64_t band = steps(k) * x_parts * x_tile, n_steps = steps(count);
    const Packed* x = packed + k0 / step * x_parts * x_tile;
    for (int64_t m0 = 0; m0 < m; m0 += side, x += band)
      one_by_four(x, panel, n_steps, min(m - m0, side), first, c + m0 * tile);
  }

 private:
  // Row-tile sums in tile `t` go to c, `rows` of them.
  template <int t>
  static INLINE void add_to(float* c, int64_t rows, bool first) {
    alignas(64) float sums[side * side];
    store_tile<t>(sums);
    for (int64_t i = 0; i < rows; ++i) {
      const F s = load(sums + i * side);
      store(c + i * tile, first ? s : add(load(c + i * tile), s));
    }
  }

  template <int t>
  static INLINE void store_tile(float* to) {
    if constexpr (t == 0) _tile_stored(0, to, 64);
    if constexpr (t == 1) _tile_stored(1, to, 64);
    if constexpr (t == 2) _tile_stored(2, to, 64);
    if constexpr (t == 3) _tile_stored(3, to, 64);
  }

  // At most 16 rows of x, 64 outputs.
  static void one_by_four(const Packed* x, const Panel* panel, int64_t n_steps, int64_t rows, bool first, float* c) {
    written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < n_steps; ++s, x += x_parts * x_tile, panel += step / 2 * tile)
      for (int wp = 0; wp < w_parts; ++wp) {
        const Panel* w = panel + wp * Sink::part_size;
        for (int xp = 0; xp < x_parts; ++xp) {
          _tile_loadd(4, x + xp * x_tile, step * 2);
          _tile_loadd(6, w, tile * 4);
          _tile_loadd(7, w + side, tile * 4);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(6, w + 2 * side, tile * 4);
          _tile_loadd(7, w + 3 * side, tile * 4);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
        }
      }
    add_to<0>(c, rows, first);
    add_to<1>(c + side, rows, first);
    add_to<2>(c + 2 * side, rows, first);
    add_to<3>(c + 3 * side, rows, first);
  }
};

}  // namespace eformer::EFORMER_ISA

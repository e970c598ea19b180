// The tile engine for bytes: AMX multiplies 16 x 64 by 64 x 16 bytes in one instruction.
#pragma once

#include "byte_gemm.h"
#include "engine_amx.h"

namespace eformer::EFORMER_ISA {

struct ByteTileEngine {
  static constexpr int height = 16;  // rows and columns of a tile of sums
  static constexpr int step = 16;    // dwords of k per instruction
  static constexpr bool from_codes = false;

  struct Session {
    const TileConfig config{height};
  };

  // x is packed as [m / 16][dword / 16][16][16].
  static int64_t packed_size(int64_t m, int64_t dwords) { return round_up(m, height) * padded(dwords); }
  static int64_t padded(int64_t dwords) { return round_up(dwords, step); }
  static INLINE int64_t place(int64_t i, int64_t d, int64_t dwords) {
    return i / height * height * padded(dwords) + d / step * height * step + i % height * step + d % step;
  }

  // As ByteEngine does, of a panel. `count` is a multiple of `step`, or there are zeros behind it in x.
  template <class W, bool in_blocks>
  static void multiply(const W&, const uint32_t* x, int64_t m, int64_t dwords, const uint32_t* panel, int64_t count,
                       const uint32_t* off, const float* scales, bool first, float* c, RowsAhead& ahead) {
    ahead.ask_for_all();
    for (int64_t m0 = 0; m0 < m; m0 += height, x += height * padded(dwords)) {
      alignas(64) uint32_t sums[W::parts][height * tile];
      for (int part = 0; part < W::parts; ++part) add_dots(x, panel + part * W::part_size, count, sums[part]);
      for (int64_t i = 0; i < min(height, m - m0); ++i)
        for (int n = 0; n < tile; n += lanes) {
          I sum = add_bits(load_bits(sums[W::parts - 1] + i * tile + n), broadcast_bits(off[m0 + i]));
          if constexpr (W::parts == 2) sum = add_bits(sum, shift_left<8>(load_bits(sums[0] + i * tile + n)));
          float* at = c + (m0 + i) * tile + n;
          if constexpr (in_blocks) {
            const F s = load(scales + n), value = from_ints(sum);
            store(at, first ? mul(value, s) : fma(value, s, load(at)));
          } else {
            store_bits(at, first ? sum : add_bits(sum, load_bits(at)));
          }
        }
    }
  }

 private:
  // sums (16, tile) of 16 rows of x, signed bytes, times the panel, unsigned ones.
  static void add_dots(const uint32_t* x, const uint32_t* panel, int64_t count, uint32_t* sums) {
    before_tiles_are_loaded();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < count; d += step, x += height * step, panel += step * tile) {
      _tile_loadd(4, x, step * 4);
      _tile_loadd(6, panel, tile * 4);
      _tile_loadd(7, panel + 16, tile * 4);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(6, panel + 32, tile * 4);
      _tile_loadd(7, panel + 48, tile * 4);
      _tile_dpbsud(2, 4, 6);
      _tile_dpbsud(3, 4, 7);
    }
    _tile_stored(0, sums, tile * 4);
    _tile_stored(1, sums + 16, tile * 4);
    _tile_stored(2, sums + 32, tile * 4);
    _tile_stored(3, sums + 48, tile * 4);
  }
};

}  // namespace eformer::EFORMER_ISA

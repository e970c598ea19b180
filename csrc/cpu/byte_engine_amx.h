// The tile engine for panels of INT8, as ByteEngine; rows of x are the left operand.
#pragma once

#include "byte_gemm.h"
#include "tiles_amx.h"

namespace eformer::EFORMER_ISA {

struct ByteTileEngine {
  static constexpr int height = 2 * tile_side;
  static constexpr int step = tile_side;  // dwords of k per instruction
  static constexpr bool from_codes = false, signs = true;

  struct Session {
    const Tiles tiles;
  };

  // x is packed as [m / 16][dword / 16][16][16].
  static int64_t packed_size(int64_t m, int64_t dwords) { return round_up(m, height) * padded(dwords); }
  static int64_t padded(int64_t dwords) { return round_up(dwords, step); }
  static INLINE int64_t place(int64_t i, int64_t d, int64_t dwords) {
    return i / tile_side * tile_side * padded(dwords) + d / step * tile_side * step + i % tile_side * step + d % step;
  }

  // c (m, tile) gets sums of integers. There are zeros in x where `count` is not a multiple of `step`.
  template <class W, bool in_blocks>
  static void multiply(const W&, const uint32_t* x, int64_t m, int64_t dwords, const uint32_t* panel, int64_t count,
                       const uint32_t*, const float*, bool first, float* c, RowsAhead&) {
    static_assert(W::parts == 1 && !in_blocks);
    written();
    const int64_t band = tile_side * padded(dwords);  // from 16 rows of x to the next
    for (int64_t m0 = 0; m0 < m; m0 += height, x += 2 * band)
      for (int n = 0; n < tile; n += 2 * tile_side) {
        float* sums = c + m0 * tile + n;
        const bool two = m - m0 > tile_side;
        if (first) {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        } else {
          _tile_loadd(0, sums, tile * 4);
          _tile_loadd(1, sums + tile_side, tile * 4);
          if (two) {
            _tile_loadd(2, sums + tile_side * tile, tile * 4);
            _tile_loadd(3, sums + tile_side * tile + tile_side, tile * 4);
          }
        }
        add_dots(x, two ? band : 0, panel + n, count);
        _tile_stored(0, sums, tile * 4);
        _tile_stored(1, sums + tile_side, tile * 4);
        if (two) {
          _tile_stored(2, sums + tile_side * tile, tile * 4);
          _tile_stored(3, sums + tile_side * tile + tile_side, tile * 4);
        }
      }
  }

 private:
  // 16 rows of x, or 32 where there is another band, times 32 outputs.
  static void add_dots(const uint32_t* x, int64_t band, const uint32_t* panel, int64_t count) {
    for (int64_t d = 0; d < count; d += step, x += tile_side * step, panel += step * tile) {
      _tile_loadd(4, x, step * 4);
      _tile_loadd(6, panel, tile * 4);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, panel + tile_side, tile * 4);
      _tile_dpbssd(1, 4, 7);
      if (band) {
        _tile_loadd(5, x + band, step * 4);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
  }
};

}  // namespace eformer::EFORMER_ISA

// Tiles: 0 to 3 hold sums, 4 and 5 the left operand, 6 and 7 the right one, unless a kernel says otherwise.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/simd.h"

namespace eformer::EFORMER_ISA {

constexpr int tile_side = 16, line_bytes = 64;

// What has been written so far is in memory: GCC does not know that loads of tiles read it.
INLINE void written() { asm volatile("" ::: "memory"); }

// The configuration of one thread: products of `rows` by `depth` bytes, a multiple of four up to 64, with those by 16.
class Tiles {
 public:
  Tiles(int64_t rows = tile_side, int depth = line_bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) {
      config.bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? depth : line_bytes);
      config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : depth / 4);
    }
    // GCC's _tile_loadconfig says that it reads eight bytes, so what is stored behind these may never be.
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
};

}  // namespace eformer::EFORMER_ISA

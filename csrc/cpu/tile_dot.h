// Dot form on AMX tiles: rows of D are read where they lie.
//
// A tile of D, 16 rows by 32 columns, is the left side of an instruction, and x, packed once, the right side. Its 32 columns may
// come in any order as long as x has the same, so codes are neither turned around nor sorted. Values are sums of bf16: of one
// (integers up to 8 bits, small floats), or of three (NF4); x is split in three, exactly, unless it is bf16. Products of parts
// whose orders add up to more than the f32 result holds are left out. What shares a scale is summed on a tile, and the sums are
// multiplied by the scales as they leave it.
#pragma once

#include <cstring>

#include "engine_amx.h"
#include "fp8.h"
#include "memory.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

constexpr int step_columns = 32;                   // of an instruction
constexpr int tile_words = 16 * step_columns;      // of an operand
constexpr int strips = tile / 16;                  // tiles of D side by side

// Some columns of a row of D as bf16. `order`: the column, in a step, of each word. `put` writes word vectors
// to + (v * parts + part) * strips * tile_words for the steps v.
template <Format format>
struct TileRow;

template <int count>
struct NibbleRow {
  static constexpr int parts = count, steps = 1;
  // The 128-bit lane l has all 16 bytes, shifted by 4 * l.
  static constexpr int order(int q) { return q % 8 * 4 + (q / 8 ^ 1); }
  I tables[parts], shifts;

  explicit NibbleRow(int which) {
    alignas(64) uint16_t words[32];
    float rest[16];
    for (int i = 0; i < 16; ++i) rest[i] = codebooks[which][i];
    for (int part = 0; part < parts; ++part) {
      for (int i = 0; i < 16; ++i) {  // the fifth bit of an index is not looked at
        words[i] = words[i + 16] = static_cast<uint16_t>(bit_cast<uint32_t>(rest[i]) >> 16);
        rest[i] -= from_bf16(words[i]);
      }
      tables[part] = load_bits(words);
    }
    for (int q = 0; q < 32; ++q) words[q] = static_cast<uint16_t>(q / 8 * 4);
    shifts = load_bits(words);
  }
  INLINE void put(const uint8_t* from, uint16_t* to) const {
    const I codes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const I index = _mm512_srlv_epi16(codes, shifts);
    for (int part = 0; part < parts; ++part)
      store_bits(to + part * strips * tile_words, _mm512_permutexvar_epi16(index, tables[part]));
  }
};

struct SignedByteRow {
  static constexpr int parts = 1, steps = 2;
  static constexpr int order(int q) { return q / 2 + q % 2 * 16; }

  explicit SignedByteRow(int) {}
  INLINE void put(const uint8_t* from, uint16_t* to) const {
    for (int v = 0; v < steps; ++v) {
      const I even = as_bits(widen_i8(from + 32 * v)), odd = as_bits(widen_i8(from + 32 * v + 16));
      store_bits(to + v * strips * tile_words, _mm512_mask_blend_epi16(0xaaaaaaaa, shift_right<16>(even), odd));
    }
  }
};

template <Format format>
struct Fp8Row {
  static constexpr int parts = 1, steps = 2;
  static constexpr int order(int q) { return q; }
  const Fp8<format> decoder;
  const I quarters = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking gives 32 neighbours

  explicit Fp8Row(int) : decoder(0) {}
  INLINE void put(const uint8_t* from, uint16_t* to) const {
    const I codes = _mm512_permutexvar_epi64(quarters, load_bits(from));
    const I low = decoder.low_bytes(codes), high = decoder.high_bytes(codes);
    store_bits(to, _mm512_unpacklo_epi8(low, high));
    store_bits(to + strips * tile_words, _mm512_unpackhi_epi8(low, high));
  }
};

template <>
struct TileRow<Format::int8> : SignedByteRow { using SignedByteRow::SignedByteRow; };
template <>
struct TileRow<Format::int8_block> : SignedByteRow { using SignedByteRow::SignedByteRow; };
template <>
struct TileRow<Format::fp8_e4m3> : Fp8Row<Format::fp8_e4m3> { using Fp8Row::Fp8Row; };
template <>
struct TileRow<Format::fp8_e5m2> : Fp8Row<Format::fp8_e5m2> { using Fp8Row::Fp8Row; };
template <>
struct TileRow<Format::fp8_e4m3_block> : Fp8Row<Format::fp8_e4m3> { using Fp8Row::Fp8Row; };
template <>
struct TileRow<Format::fp8_e5m2_block> : Fp8Row<Format::fp8_e5m2> { using Fp8Row::Fp8Row; };

// The instructions, whose registers are constants.
template <int to>
INLINE void tile_load(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(to) : "memory");
}
template <int from>
INLINE void tile_store(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(from) : "memory");
}
template <int sums>
INLINE void tile_clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(sums));
}
template <int sums, int left, int right>
INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

// `parts_of_x` share their sums. With few rows of x its three parts are columns of a tile, and sums of their own until the end.
template <Format format, class Row, int parts_of_x>
class TileDot {
 public:
  static bool takes(const Product& p) {
    return p.form == Form::dot && (!blocked(format) || (p.d.block % step_columns == 0 && moderate(p, parts > 1 || p.d.offset.data)));
  }

  static void run(const Product& p, Runtime& runtime, bool exact) {
    const int64_t side = parts_of_x == 1 && !exact ? 3 : 1, bands = ceil_div(p.m * side, 16);
    const int64_t tiles = ceil_div(p.n(), tile), blocks = p.d.blocks();
    const int64_t wide = bands == 1 ? 1 : max(1, min(most_tiles, tiles / (4 * runtime.workers())));
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<uint16_t>(bands * steps_of(p.k()) * parts_of_x * tile_words);
    const auto of_x = layout.add<float>(p.d.offset.data ? bands * blocks * 16 : 0);
    const auto sums = layout.add<float>(wide * bands * tile * 16, runtime.workers());
    const auto panel = layout.add<uint16_t>(2 * (bands == 1 ? 1 : most_units) * unit_words, runtime.workers());
    const auto lines = layout.add<uint8_t>(tile * 64, runtime.workers());
    const auto numbers = reserve_scales(layout, p.d, wide * tile * blocks, runtime.workers());
    const auto added = layout.add<float>(p.d.offset.data ? wide * tile * blocks : 0, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const int64_t period = blocked(format) ? w.block : round_up(p.k(), unit), stretch = round_up(max(512, period), period);
    const int64_t stretches = ceil_div(p.k(), stretch);
    const TileDot dot{p, w, x.in(base), p.d.offset.data ? of_x.in(base) : nullptr, side, bands, period};
    for_each(runtime, bands * stretches, [&](int64_t i, int64_t) {
      const int64_t k0 = i % stretches * stretch;
      dot.pack(i / stretches, k0, min(p.k(), k0 + stretch), x.in(base), of_x.in(base));
    });
    for_each(runtime, ceil_div(tiles, wide), [&](int64_t i, int64_t worker) {
      const Tiles config;
      const int64_t begin = i * wide * tile, end = min(p.n(), begin + wide * tile);
      const Room room{sums.in(base, worker), panel.in(base, worker), lines.in(base, worker), numbers.in(base, worker), added.in(base, worker)};
      dot.outputs(begin, end, room);
    });
  }

 private:
  static constexpr int64_t most_tiles = 8;
  static constexpr int parts = Row::parts, unit = Row::steps * step_columns, unit_words = Row::steps * parts * strips * tile_words;
  static constexpr int unit_bytes = unit / static_cast<int>(per_byte(format)), units_per_line = 64 / unit_bytes;
  static constexpr int64_t most_units = parts == 1 ? 256 / unit : 4;  // of a panel

  struct Room {
    float* sums;        // [tile of outputs][band][output][column]
    uint16_t* panel;
    uint8_t* lines;     // [output][64 bytes]
    float *numbers, *added;
  };

  int64_t units() const { return ceil_div(p.k(), unit); }
  static int64_t steps_of(int64_t k) { return round_up(k, unit) / step_columns; }

  // Of columns begin ... end - 1 of a band of 16 columns of sums: words [step][part][pair of k][column][2], and sums of blocks.
  void pack(int64_t band, int64_t begin, int64_t end, uint16_t* to, float* of_x) const {
    constexpr int some = 256;
    alignas(64) float values[16][some];
    alignas(64) uint16_t words[3][16][step_columns];
    std::memset(words, 0, sizeof words);
    const int64_t rows = side == 3 ? p.m : min(16, p.m - band * 16), steps = steps_of(p.k());
    if (of_x) {
      for (int64_t b = begin / period; b * period < end; ++b) std::memset(of_x + (band * w.blocks + b) * 16, 0, 64);
    }
    alignas(64) int32_t places[2][16];
    for (int q = 0; q < step_columns; ++q) places[q / 16][q % 16] = Row::order(q);
    const I first = load_bits(places[0]), second = load_bits(places[1]);
    const bool infinite = has_infinity(format);
    for (int64_t k0 = begin; k0 < end; k0 += some) {
      const int64_t count = min(some, end - k0), padded = round_up(count, unit);
      for (int64_t i = 0; i < rows; ++i) {
        read_row(p.x, p.x_type, (band * 16 + i) * p.k() + k0, count, w.along_k ? w.along_k + k0 : nullptr, values[i]);
        for (int64_t k = count; k < padded; ++k) values[i][k] = 0;
      }
      for (int64_t k = 0; k < padded; k += step_columns) {
        uint16_t* out = to + (band * steps + (k0 + k) / step_columns) * parts_of_x * tile_words;
        for (int64_t i = 0; i < rows; ++i) {
          F low = load(values[i] + k), high = load(values[i] + k + 16);
          if (of_x && k0 + k < p.k()) of_x[(band * w.blocks + (k0 + k) / period) * 16 + i] += sum(add(low, high));
          const F a = _mm512_permutex2var_ps(low, first, high), b = _mm512_permutex2var_ps(low, second, high);
          const int count = parts_of_x == 3 || side == 3 ? 3 : 1;
          const int64_t apart = (parts_of_x == 3 ? 16 : p.m) * step_columns;
          split(a, count, infinite, words[0][i], apart);
          split(b, count, infinite, words[0][i] + 16, apart);
        }
        for (int part = 0; part < parts_of_x; ++part)
          transpose(reinterpret_cast<const uint8_t*>(words[part]), 64, reinterpret_cast<uint32_t*>(out + part * tile_words), 16);
      }
    }
  }

  void outputs(int64_t begin, int64_t end, const Room& room) const {
    const int64_t count = end - begin;
    std::memset(room.sums, 0, ceil_div(count, tile) * bands * tile * 16 * sizeof(float));
    const float* scales = nullptr;
    if constexpr (blocked(format)) scales = w.scales(begin * w.blocks, count * w.blocks, room.numbers);
    if constexpr (takes_offsets(format)) {
      if (of_x)
        for (int64_t r = 0; r < count; ++r) w.add_row(begin + r, scales + r * w.blocks, room.added + r * w.blocks);
    }
    bands == 1 ? multiply<true>(begin, count, room, scales) : multiply<false>(begin, count, room, scales);
    for (int64_t n = 0; n < count; n += tile)
      for (int64_t band = 0; band < bands; ++band) write(begin + n, min(tile, count - n), band, room.sums + (n * bands + band * tile) * 16);
  }

  // Sums of a block that have left their tiles, and what is to become of them.
  struct Block {
    const float *sums = nullptr, *scales = nullptr, *added = nullptr, *of_x = nullptr;
    int64_t rows = 0;
    float* c = nullptr;
  };

  // Panels of 64 outputs that all bands are multiplied with, along the outputs first. While tiles are busy the next panel is
  // decoded, some rows at a time, and sums that have left the tiles before are scaled.
  template <bool one_band>
  void multiply(int64_t begin, int64_t count, const Room& room, const float* scales) const {
    const int64_t steps = steps_of(p.k()), units = one_band ? 1 : most_units, tiles = ceil_div(count, tile);
    const int64_t panels = ceil_div(steps, units * Row::steps) * tiles;
    alignas(64) float sums[tile * 16];
    int64_t left = 0, block = 0;
    Block before;
    Decoding next(*this, begin, tiles, units, room);
    for (int64_t i = 0; i < strips * units * 16; i += Decoding::rows_of_one_band) next.template go_on<true>();
    clear();
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t s0 = i / tiles * units * Row::steps, n = i % tiles * tile;
      const int64_t here = min(units * Row::steps, ceil_div(p.k(), step_columns) - s0);  // no block begins behind the last column
      const uint16_t* panel = next.done();
      for (int64_t band = 0; band < bands; ++band) {
        const uint16_t *xs = x + (band * steps + s0) * parts_of_x * tile_words, *d = panel;
        if (!one_band || i == 0) block = s0 * step_columns / period, left = period - s0 * step_columns % period;
        for (int64_t s = 0; s < here; ++s, xs += parts_of_x * tile_words, d += parts * strips * tile_words) {
          step(xs, d, [&]<int j>() __attribute__((always_inline)) {
            next.template go_on<one_band>();
            if (before.c) add_sums(before, j);
          });
          before.c = nullptr;
          if ((left -= step_columns) == 0 || (s + 1 == here && (!one_band || i + 1 == panels))) {
            before = leave(sums, scales + n * w.blocks, room.added + n * w.blocks, min(tile, count - n), block, band,
                           room.sums + (n * bands + band * tile) * 16);
            if (left && (s0 + s + 1) * step_columns < p.k()) before.of_x = nullptr;  // the block goes on: once is enough
            left = period, ++block;
          }
        }
      }
      next.finish();
    }
    for (int j = 0; j < strips; ++j) add_sums(before, j);
  }

  // Goes through panels, [strip][unit][row], some rows at a time.
  class Decoding {
   public:
    static constexpr int rows_of_one_band = 16 / Row::steps;

    Decoding(const TileDot& dot, int64_t begin, int64_t tiles, int64_t units, const Room& room)
        : dot_(dot), room_(room), row_(dot.w.table), begin_(begin), tiles_(tiles), units_(units),
          rows_(max(1, 16 / Row::steps / dot.bands)) {
      while (16 % rows_) ++rows_;
      start();
    }
    template <bool one_band>
    INLINE void go_on() {
      if (strip_ == strips) return;
      const int64_t rows = one_band ? rows_of_one_band : rows_;
      uint8_t* lines = room_.lines + (16 * strip_ + at_) * 64;
      const int64_t u = first_ + unit_;
      if (u % units_per_line == 0) dot_.stage(n_ + 16 * strip_ + at_, u, rows, lines);
      lines += u % units_per_line * unit_bytes;
      uint16_t* to = to_ + unit_ * unit_words + strip_ * tile_words + at_ * step_columns;
      if constexpr (one_band) {
        unroll<rows_of_one_band>([&]<int r>() __attribute__((always_inline)) { row_.put(lines + r * 64, to + r * step_columns); });
      } else {
        for (int64_t r = 0; r < rows; ++r) row_.put(lines + r * 64, to + r * step_columns);
      }
      if ((at_ += rows) < 16) return;
      at_ = 0;
      if (++unit_ < here_) return;
      unit_ = 0, ++strip_;
    }
    // The panel that is complete; those after it go on into the other half of the room.
    const uint16_t* done() {
      const uint16_t* panel = to_;
      ++panel_;
      start();
      return panel;
    }
    void finish() {
      while (strip_ < strips) go_on<false>();
    }

   private:
    void start() {
      n_ = begin_ + panel_ % tiles_ * tile, first_ = panel_ / tiles_ * units_;
      here_ = min(units_, dot_.units() - first_);
      to_ = room_.panel + panel_ % 2 * units_ * unit_words;
      strip_ = here_ > 0 ? 0 : strips, unit_ = at_ = 0;
    }

    const TileDot& dot_;
    const Room& room_;
    const Row row_;
    const int64_t begin_, tiles_, units_;
    int64_t rows_, panel_ = 0, n_, first_, here_, strip_, unit_, at_;
    uint16_t* to_;
  };

  // A line of codes of each of some rows from n on, those of unit u and the ones after it. Rows are often a power of two apart, so
  // that their lines have few places in the nearest cache.
  INLINE void stage(int64_t n, int64_t u, int64_t count, uint8_t* lines) const {
    const int64_t at = w.byte_of<format>(u * unit), step = w.row_bytes, rows = min(count, w.rows - n);
    const uint8_t* from = w.codes + n * step + at;
    if (w.packed<format>()) {
      for (int64_t r = 0; r < rows; ++r, from += step) store_bits(lines + r * 64, w.unpack.vector(from, from - at + step));
      return;
    }
    constexpr int64_t ahead = 256;  // no hardware prefetcher follows so many rows
    const int64_t later = at + ahead < step ? ahead : (tile - 1) * step + ahead;
    const int64_t left = ceil_div(w.cols, per_byte(format)) - at;
    const __mmask64 there = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    for (int64_t r = 0; r < rows; ++r, from += step) {
      __builtin_prefetch(from + later, 0, 2);
      store_bits(lines + r * 64, _mm512_maskz_loadu_epi8(there, from));
    }
  }

  static INLINE void clear() {
    tile_clear<0>();
    tile_clear<1>();
    tile_clear<2>();
    tile_clear<3>();
  }

  template <class Also>
  static INLINE void step(const uint16_t* x, const uint16_t* d, Also&& also) {
    tile_load<4>(x);
    if constexpr (parts_of_x == 3) {
      tile_load<5>(x + tile_words);
      tile_load<6>(x + 2 * tile_words);
    }
    unroll<parts>([&]<int part>() __attribute__((always_inline)) {
      unroll<strips>([&]<int j>() __attribute__((always_inline)) {
        tile_load<7>(d + (part * strips + j) * tile_words);
        tile_multiply<j, 7, 4>();
        if constexpr (parts_of_x == 3 && part < 2) tile_multiply<j, 7, 5>();
        if constexpr (parts_of_x == 3 && part < 1) tile_multiply<j, 7, 6>();
        if constexpr (part == parts - 1) also.template operator()<j>();
      });
    });
  }

  // Takes the sums off the tiles.
  INLINE Block leave(float* sums, const float* scales, const float* added, int64_t rows, int64_t block, int64_t band, float* c) const {
    tile_store<0>(sums);
    tile_store<1>(sums + 256);
    tile_store<2>(sums + 512);
    tile_store<3>(sums + 768);
    clear();
    return {sums, scales + block, added + block, of_x ? of_x + (band * w.blocks + block) * 16 : nullptr, rows, c};
  }

  // Those of tile j, times the scales of their block.
  INLINE void add_sums(const Block& b, int j) const {
    const int64_t first = 16 * j, blocks = w.blocks, rows = min(16, b.rows - first);
    const float *sums = b.sums + first * 16, *s = b.scales + first * blocks;
    float* c = b.c + first * 16;
    if constexpr (!blocked(format)) {
      for (int r = 0; r < 16; ++r) store(c + r * 16, add(load(c + r * 16), load(sums + r * 16)));
      return;
    }
    if constexpr (takes_offsets(format)) {
      if (b.of_x) {
        const F xs = load(b.of_x);
        const float* added = b.added + first * blocks;
        for (int64_t r = 0; r < rows; ++r, c += 16, sums += 16, s += blocks, added += blocks)
          store(c, fma(broadcast(*added), xs, fma(load(sums), broadcast(*s), load(c))));
        return;
      }
    }
    const auto add_row = [&](int64_t r, const float* scale) {
      store(c + r * 16, fma(load(sums + r * 16), broadcast(*scale), load(c + r * 16)));
    };
    if (rows == 16) [[likely]] {
      unroll<4>([&]<int q>() {
        unroll<4>([&]<int i>() { add_row(4 * q + i, s + i * blocks); });
        s += 4 * blocks;
      });
    } else {
      for (int64_t r = 0; r < rows; ++r) add_row(r, s + r * blocks);
    }
  }

  void write(int64_t n, int64_t count, int64_t band, const float* c) const {
    alignas(64) float turned[16][tile];
    for (int j = 0; j < strips; ++j)
      transpose(reinterpret_cast<const uint8_t*>(c + j * 256), 64, reinterpret_cast<uint32_t*>(&turned[0][j * 16]), tile);
    const int64_t rows = side == 3 ? p.m : min(16, p.m - band * 16);
    for (int64_t i = 0; i < rows; ++i) {
      if (side == 3)
        for (int at = 0; at < tile; at += lanes)
          store(turned[i] + at, add(load(turned[i] + at), add(load(turned[p.m + i] + at), load(turned[2 * p.m + i] + at))));
      write_row(turned[i], count, w.along_n ? w.along_n + n : nullptr, w.everywhere, p.y, p.y_type, (band * 16 + i) * p.n() + n);
    }
  }

  TileDot(const Product& p, const Weights& w, const uint16_t* x, const float* of_x, int64_t side, int64_t bands, int64_t period)
      : p(p), w(w), x(x), of_x(of_x), side(side), bands(bands), period(period) {}

  const Product& p;
  const Weights& w;
  const uint16_t* x;
  const float* of_x;           // [band][block][column] sums of x; null without offsets
  const int64_t side, bands;   // columns of sums for each row of x; how many 16 of them
  const int64_t period;        // columns of D that are summed before a scale
};

}  // namespace eformer::EFORMER_ISA

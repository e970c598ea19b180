// Dot form with an x of 8 bits on tiles: AMX multiplies 16 x 64 by 64 x 16 bytes in one instruction.
//
// Rows of D are the left operand, lines of 64 bytes: those of INT8 are read where they lie, others are decoded line by line,
// and nothing is turned but x, once, and the sums, 16 outputs by 16 rows of x. Bytes have signs on both sides.
#pragma once

#include <cstring>

#include "byte_rows.h"
#include "byte_weights.h"
#include "memory.h"
#include "tiles_amx.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

// The codes of one line, as bytes. Where several values share a byte, those of one field follow each other; the values of a
// block shorter than a line stay together, `unit` of them.
template <Format format, int parts>
class LineDecoder {
 public:
  static constexpr int fields = static_cast<int>(per_byte(format)), bytes = line_bytes / fields;

  LineDecoder(int which, int unit) {
    if (fields == 1) return;
    short_blocks_ = unit < line_bytes;
    uint32_t from[lanes], turn[lanes];
    for (int d = 0; d < lanes; ++d) {
      const Place p(4 * d, unit);
      from[d] = p.byte / 4;
      turn[d] = static_cast<uint32_t>(bits * (fields - 1 - p.field) - (format == Format::binary)) % 32;
    }
    from_ = load_bits(from);
    turn_ = load_bits(turn);
    for (int part = 0; part < parts; ++part) table_[part] = ByteWeights<format, parts>::signed_table(which, part);
  }

  // Which of the values of a line, in the order of D, is at a place.
  static int value_at(int place, int unit) {
    const Place p(place, unit);
    return p.byte * fields + p.field;
  }

  INLINE I fields_of(const uint8_t* codes) const {
    if constexpr (fields == 1) return load_bits(codes);
    I v;
    if constexpr (fields == 2) v = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    if constexpr (fields == 4) v = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    if constexpr (fields == 8) v = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    if (short_blocks_) v = _mm512_permutexvar_epi32(from_, v);
    return bit_and(_mm512_rorv_epi32(v, turn_), broadcast_bits((format == Format::binary ? 2 : (1 << bits) - 1) * 0x01010101u));
  }
  template <int part>
  INLINE I part_of(I v) const {
    if constexpr (fields == 1) return v;
    if constexpr (fields > 2) return _mm512_sub_epi8(v, broadcast_bits(0x01010101));  // -1, 0, 1 or -1, 1
    return table_[part].at(v);
  }

 private:
  static constexpr int bits = 8 / fields;
  struct Place {
    int byte, field;
    Place(int place, int unit) {
      const int of_unit = unit / fields, in = place % unit;
      byte = place / unit * of_unit + in % of_unit;
      field = in / of_unit;
    }
  };

  bool short_blocks_ = false;
  I from_, turn_;
  ByteTable table_[parts];
};

template <Format format, int parts = 1>
class ByteTileDot {
 public:
  static void run(const ByteProduct& p, Runtime& runtime) {
    const int64_t lines = ceil_div(p.k(), line_bytes), padded = lines * line_bytes, groups = ceil_div(p.m, side);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto codes = layout.add<int8_t>(groups * side * (padded + line_bytes));
    const auto x = layout.add<int8_t>(groups * side * padded);
    const auto factors = layout.add<RowFactors>(p.m);
    const auto work = layout.add<Work>(1, runtime.workers());
    const auto sums = layout.add<uint32_t>(groups * outputs * side, runtime.workers());
    const auto rows = layout.add<float>(groups * side * across, runtime.workers());
    const auto numbers = reserve_scales(layout, p.d, outputs * (depth * line_bytes / max(1, p.d.block) + 1), runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const ByteTileDot dot{p, w, x.in(base), factors.in(base)};
    for_each(runtime, groups * side, [&](int64_t i, int64_t) { dot.read(i, codes.in(base), factors.in(base)); });
    for_each(runtime, groups, [&](int64_t g, int64_t) { dot.turn(g, codes.in(base), x.in(base)); });
    for_each(runtime, ceil_div(p.n(), across), [&](int64_t i, int64_t worker) {
      const Tiles tiles(side, dot.unit);
      float* to = rows.in(base, worker);
      for (int64_t n = i * across; n < min(p.n(), (i + 1) * across); n += outputs)
        dot.several(n, *work.in(base, worker), sums.in(base, worker), numbers.in(base, worker), to + n % across);
      dot.finish(i * across, to);
    });
  }

 private:
  static constexpr bool in_blocks = blocked(format);
  static constexpr int side = tile_side, tile_size = side * line_bytes;
  static constexpr int outputs = in_blocks ? side : 2 * side;  // at once
  static constexpr int across = 64;                            // of a piece of work
  static constexpr int depth = 8;                              // lines of a panel
  static constexpr int piece = 4;                              // lines at most that are summed as integers, with blocks
  using Lines = LineDecoder<format, parts>;

  struct Work {
    alignas(64) uint8_t panel[depth][parts][outputs][line_bytes];
    alignas(64) uint32_t sums[parts][side * side];
    alignas(64) float scales[(depth * line_bytes / 4 + lanes) * side];  // [block][output]
  };

  // -- x -------------------------------------------------------------------------------------------------------------------

  // Row i of x, sorted as the lines are. Rows are a line further apart, lest they meet in one set of a cache.
  void read(int64_t i, int8_t* codes, RowFactors* factor) const {
    int8_t* to = codes + i * (padded + line_bytes);
    if (i >= p.m) {
      std::memset(to, 0, padded);
      return;
    }
    factor[i] = RowFactors::of(ByteRow::read(p, i, padded, to), ByteWeights<format, parts>::unit(w.table), in_blocks);
    if constexpr (Lines::fields > 1) {
      uint8_t order[line_bytes];
      for (int c = 0; c < line_bytes; ++c) order[c] = static_cast<uint8_t>(Lines::value_at(c, unit));
      const I from = load_bits(order);
      for (int64_t l = 0; l < padded; l += line_bytes) store_bits(to + l, _mm512_permutexvar_epi8(from, load_bits(to + l)));
    }
  }

  // 16 rows of x to [line][dword][row].
  void turn(int64_t g, const int8_t* codes, int8_t* to) const {
    const int64_t step = padded + line_bytes;
    const auto* from = reinterpret_cast<const uint8_t*>(codes + g * side * step);
    auto* x = reinterpret_cast<uint32_t*>(to + g * side * padded);
    for (int64_t l = 0; l < padded; l += line_bytes, x += side * side) transpose(from + l, step, x, side);
  }

  const int8_t* x_of(int64_t group, int64_t line) const { return x + (group * lines + line) * tile_size; }

  // -- D -------------------------------------------------------------------------------------------------------------------

  // Outputs n ... n + outputs - 1; `to` gets [row of x][across], integers where there are no blocks.
  void several(int64_t n, Work& work, uint32_t* sums, float* numbers, float* to) const {
    if (!in_blocks && groups <= 2 && as_they_lie(n)) {
      const uint8_t* from = w.codes + n * w.row_bytes;
      products(from, w.row_bytes, line_bytes, lines, 0, true, true, sums);
    } else {
      for (int64_t l = 0; l < lines; l += depth) {
        const int64_t count = min(depth, lines - l);
        decode(n, l, count, work);
        const bool first = l == 0, last = l + count == lines;
        if constexpr (in_blocks) {
          stage_scales(n, l, count, numbers, work.scales);
          auto* c = reinterpret_cast<float*>(sums);
          for (int64_t g = 0; g < groups; ++g, c += side * side) add_blocks(g, l, count, first, work, c);
        } else {
          products(work.panel[0][0][0], line_bytes, outputs * line_bytes, count, l, first, last, sums);
        }
      }
    }
    for (int64_t g = 0; g < groups; ++g)
      for (int at = 0; at < outputs; at += side, sums += side * side)
        transpose(reinterpret_cast<const uint8_t*>(sums), side * 4, reinterpret_cast<uint32_t*>(to + g * side * across + at), across);
  }

  // Are the codes of these outputs whole lines of bytes? What lies behind the end of a row meets zeros of x.
  bool as_they_lie(int64_t n) const {
    return format == Format::int8 && (n + outputs - 1) * w.row_bytes + padded <= w.rows * w.row_bytes;
  }

  void decode(int64_t n, int64_t line, int64_t count, Work& work) const {
    const Lines decoder = this->decoder;  // in registers
    const int64_t first = w.byte_of<format>(line * line_bytes), step = w.byte_of<format>(line_bytes);
    const int64_t after = outputs * w.row_bytes;
    const int64_t whole = w.packed<format>() ? 0 : min(count, (w.row_bytes - first) / Lines::bytes);
    for (int r = 0; r < outputs; ++r) {
      const uint8_t* row = w.codes + min(n + r, w.rows - 1) * w.row_bytes;
      const uint8_t *from = row + first, *end = row + w.row_bytes;
      for (int64_t b = 0; b < count * step; b += 64) __builtin_prefetch(from + after + b, 0, 2);
      const auto write = [&](int64_t l, I v) {
        unroll<parts>([&]<int part>() { store_bits(work.panel[l][part][r], decoder.template part_of<part>(v)); });
      };
      int64_t l = 0;
      for (; l < whole; ++l, from += step) write(l, decoder.fields_of(from));
      for (; l < count; ++l, from += step) {
        if (w.packed<format>()) {
          write(l, w.unpack.vector(from, end));
        } else {
          uint8_t rest[line_bytes] = {};
          std::memcpy(rest, from, max(0, end - from));
          write(l, decoder.fields_of(rest));
        }
      }
    }
  }

  // -- without blocks ------------------------------------------------------------------------------------------------------

  // Lines of 32 outputs times all rows of x. Sums that go on stay where they are if all of them are in tiles.
  void products(const uint8_t* from, int64_t row, int64_t step, int64_t count, int64_t line, bool first, bool last,
                uint32_t* sums) const {
    written();
    for (int64_t g = 0; g < groups; g += 2) {
      const bool two = groups - g > 1;
      uint32_t* c = sums + g * outputs * side;
      if (first) {
        zero_sums();
      } else if (groups > 2) {
        load_sums(c, two);
      }
      if (two) {
        add_dots<2>(from, row, step, count, x_of(g, line));
      } else {
        add_dots<1>(from, row, step, count, x_of(g, line));
      }
      if (last || groups > 2) store_sums(c, two);
    }
  }

  template <int wide>
  void add_dots(const uint8_t* a, int64_t row, int64_t step, int64_t count, const int8_t* b) const {
    const int8_t* b1 = b + lines * tile_size;
    const uint8_t* a1 = a + side * row;
    for (int64_t l = 0; l < count; ++l, a += step, a1 += step, b += tile_size, b1 += tile_size) {
      if (step == line_bytes)  // rows of D
        for (int r = 0; r < outputs; ++r) __builtin_prefetch(a + (outputs + r) * row, 0, 2);
      _tile_loadd(4, a, row);
      _tile_loadd(6, b, line_bytes);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(5, a1, row);
      _tile_dpbssd(1, 5, 6);
      if constexpr (wide == 2) {
        _tile_loadd(7, b1, line_bytes);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
      }
    }
  }

  static void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  static void load_sums(const uint32_t* c, bool two) {
    constexpr int size = side * side;
    _tile_loadd(0, c, line_bytes);
    _tile_loadd(1, c + size, line_bytes);
    if (!two) return;
    _tile_loadd(2, c + 2 * size, line_bytes);
    _tile_loadd(3, c + 3 * size, line_bytes);
  }
  static void store_sums(uint32_t* c, bool two) {
    constexpr int size = side * side;
    _tile_stored(0, c, line_bytes);
    _tile_stored(1, c + size, line_bytes);
    if (!two) return;
    _tile_stored(2, c + 2 * size, line_bytes);
    _tile_stored(3, c + 3 * size, line_bytes);
  }

  // -- with blocks ---------------------------------------------------------------------------------------------------------

  // [block][output], of the blocks of a panel.
  void stage_scales(int64_t n, int64_t line, int64_t count, float* numbers, float* to) const {
    const int64_t block = line * line_bytes / w.block;
    const int64_t blocks = min(ceil_div((line + count) * line_bytes, w.block), w.blocks) - block;
    const int64_t rows = min(outputs, w.rows - n), first = n * w.blocks + block;
    int64_t step = w.blocks;
    const float* from = static_cast<const float*>(w.per_block.data) + first;
    if (!Weights::are_floats(w.per_block)) {
      read_scales(w.per_block, {first, blocks, rows, step, w.rows * step}, numbers);
      from = numbers, step = blocks;
    }
    for (int64_t b = 0; b < blocks; b += side) {
      if (from != numbers && rows == outputs && first + (outputs - 1) * step + b + side <= w.rows * step) {
        transpose(reinterpret_cast<const uint8_t*>(from + b), step * 4, reinterpret_cast<uint32_t*>(to + b * side), side);
      } else {
        for (int64_t r = 0; r < side; ++r)
          for (int64_t i = b; i < min(blocks, b + side); ++i) to[i * side + r] = from[min(r, rows - 1) * step + i];
      }
    }
  }

  // All blocks of a panel times a group of rows of x.
  void add_blocks(int64_t g, int64_t line, int64_t count, bool first, Work& work, float* c) const {
    F total[side];
#pragma GCC unroll 16
    for (int r = 0; r < side; ++r) total[r] = first ? zero() : load(c + r * side);
    written();
    const int8_t* x = x_of(g, line);
    const uint8_t* panel = work.panel[0][0][0];
    const float* scales = work.scales;
    if (unit < line_bytes) {
      const int64_t end = min(count * line_bytes, w.blocks * w.block - line * line_bytes);  // of the blocks that exist
      for (int64_t at = 0; at < end; at += unit, scales += side) {
        const uint8_t* a = panel + at / line_bytes * parts * outputs * line_bytes + at % line_bytes;
        dots(a, x + at * side, 1, work.sums);
        scale(work.sums, scales, total);
      }
    } else {
      const int64_t each = min(piece, w.block / line_bytes);
      int64_t left = w.block / line_bytes - line % (w.block / line_bytes);
      for (int64_t l = 0; l < count; l += each) {
        dots(panel + l * parts * outputs * line_bytes, x + l * tile_size, min(each, count - l), work.sums);
        scale(work.sums, scales, total);
        if ((left -= each) <= 0) scales += side, left = w.block / line_bytes;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < side; ++r) store(c + r * side, total[r]);
  }

  static INLINE void dots(const uint8_t* a, const int8_t* b, int64_t count, uint32_t (&to)[parts][side * side]) {
    _tile_zero(0);
    if constexpr (parts == 2) _tile_zero(1);
    for (int64_t l = 0; l < count; ++l, a += parts * outputs * line_bytes, b += tile_size) {
      _tile_loadd(6, b, line_bytes);
      _tile_loadd(4, a, line_bytes);
      _tile_dpbssd(0, 4, 6);
      if constexpr (parts == 2) {
        _tile_loadd(5, a + outputs * line_bytes, line_bytes);
        _tile_dpbssd(1, 5, 6);
      }
    }
    _tile_stored(0, to[0], line_bytes);
    if constexpr (parts == 2) _tile_stored(1, to[parts - 1], line_bytes);
  }

  static INLINE void scale(const uint32_t (&sums)[parts][side * side], const float* scales, F (&total)[side]) {
#pragma GCC unroll 16
    for (int r = 0; r < side; ++r) {
      I sum = load_bits(sums[parts - 1] + r * side);
      if constexpr (parts == 2) sum = add_bits(sum, shift_left<8>(load_bits(sums[0] + r * side)));
      total[r] = fma(from_ints(sum), broadcast(scales[r]), total[r]);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------------

  void finish(int64_t n, float* rows) const {
    for (int64_t i = 0; i < p.m; ++i, rows += across) {
      for (int at = 0; at < across; at += lanes)
        store(rows + at, mul(in_blocks ? load(rows + at) : from_ints(load_bits(rows + at)), broadcast(factors[i].first)));
      write_row(rows, min(across, p.n() - n), w.along_n ? w.along_n + n : nullptr, w.everywhere * factors[i].then, p.y, p.y_type,
                i * p.n() + n);
    }
  }

  ByteTileDot(const ByteProduct& p, const Weights& w, const int8_t* x, const RowFactors* factors)
      : p(p), w(w), x(x), factors(factors), lines(ceil_div(p.k(), line_bytes)), padded(lines * line_bytes),
        groups(ceil_div(p.m, side)), unit(static_cast<int>(in_blocks ? min(line_bytes, w.block) : line_bytes)),
        decoder(w.table, unit) {}

  const ByteProduct& p;
  const Weights& w;
  const int8_t* x;  // [16 rows][line][dword][row]
  const RowFactors* factors;
  const int64_t lines, padded, groups;
  const int unit;  // values of a line that are multiplied at once
  const Lines decoder;
};

}  // namespace eformer::EFORMER_ISA

// The product of bytes by panels: bring a panel of D into place once, multiply it with all rows of x, go on along k.
//
// x and panels, where codes are not multiplied as they are staged, are sequences of dwords along k, four values each: those of
// field 0 of the first four bytes, of field 1, ...; in axpy form four neighbours. Without blocks sums are integers to the end,
// and exact; with blocks the integer sum of each piece of a block is multiplied by its scale.
#pragma once

#include "byte_rows.h"
#include "byte_weights.h"
#include "gemm.h"

namespace eformer::EFORMER_ISA {

// Contracted indices of a panel.
constexpr int byte_depth = 256;

// Weights that are bytes already: a panel for each part.
template <int weight_parts>
struct BytePanels {
  static constexpr int parts = weight_parts, fields = 1;
  static constexpr int part_size = byte_depth / 4 * tile;

  template <int J, int part = 0>
  INLINE I field(I bytes) const { return bytes; }
};

// A register tile of `rows_of_x` rows by one strip of outputs. The weights W are those of a panel, or of codes as they are
// staged: decoding them on the way into the registers takes ports that the products leave free, where there are such.
template <int rows_of_x, int width, bool codes>
struct ByteEngine {
  static constexpr bool from_codes = codes;
  static constexpr bool signs = !unsigned_weights;  // do weights come without an excess?
  static constexpr int height = rows_of_x, vectors = width, strip = vectors * lanes;

  struct Session {};

  static int64_t packed_size(int64_t m, int64_t dwords) { return round_up(m, height) * dwords; }
  static int64_t padded(int64_t dwords) { return dwords; }
  // Where dword d of row i of x is.
  static INLINE int64_t place(int64_t i, int64_t d, int64_t dwords) { return i / height * height * dwords + d * height + i % height; }

  // `count` dwords per output. c (m, tile) gets the sums of integers, or with blocks the sum of floats.
  template <class W, bool in_blocks>
  static void multiply(const W& weights, const uint32_t* x, int64_t m, int64_t dwords, const uint32_t* bits, int64_t count,
                       const uint32_t* off, const float* scales, bool first, float* c, RowsAhead& ahead) {
    for (int n = 0; n < tile; n += strip)
      for (int64_t m0 = 0; m0 < m; m0 += height)
        rows<W, height, in_blocks>(min(height, m - m0), weights, x + m0 * dwords, bits + n, count, off + m0, scales + n, first,
                                   c + m0 * tile + n, ahead);
  }

 private:
  template <class W, int most, bool in_blocks>
  static INLINE void rows(int64_t m, const W& weights, const uint32_t* x, const uint32_t* b, int64_t count, const uint32_t* off,
                          const float* scales, bool first, float* c, RowsAhead& ahead) {
    if constexpr (most > 1) {
      if (m < most) return rows<W, most - 1, in_blocks>(m, weights, x, b, count, off, scales, first, c, ahead);
    }
    block<W, most, in_blocks>(weights, x, b, count, off, scales, first, c, ahead);
  }

  template <class W, int m, bool in_blocks>
  static void block(const W& weights, const uint32_t* x, const uint32_t* b, int64_t count, const uint32_t* off,
                    const float* scales, bool first, float* c, RowsAhead& ahead) {
    I sums[m][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < m; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        sums[i][v] = W::parts == 1 ? broadcast_bits(off[i]) : broadcast_bits(0);
        if (!in_blocks && !first) sums[i][v] = add_bits(sums[i][v], load_bits(c + i * tile + v * lanes));
      }
    add_dots<0>(weights, x, b, count, sums, ahead);
    if constexpr (W::parts == 2) {
#pragma GCC unroll 8
      for (int i = 0; i < m; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[i][v] = add_bits(shift_left<8>(sums[i][v]), broadcast_bits(off[i]));
      add_dots<1>(weights, x, b + W::part_size, count, sums, ahead);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        float* at = c + i * tile + v * lanes;
        if constexpr (in_blocks) {
          const F s = load(scales + v * lanes), sum = from_ints(sums[i][v]);
          store(at, first ? mul(sum, s) : fma(sum, s, load(at)));
        } else {
          store_bits(at, sums[i][v]);
        }
      }
  }

  template <int part, class W, int m>
  static INLINE void add_dots(const W& decoder, const uint32_t* x, const uint32_t* b, int64_t count, I (&sums)[m][vectors],
                              RowsAhead& to_come) {
    RowsAhead ahead = to_come;  // in registers, as the tables are
    const W weights = decoder;
    for (int64_t k = 0; k < count; ++k, b += tile) {
      ahead.ask_for_one();
      I bits[vectors];
      for (int v = 0; v < vectors; ++v) bits[v] = load_bits(b + v * lanes);
      unroll<W::fields>([&]<int J>() {
        I w[vectors];
        for (int v = 0; v < vectors; ++v) w[v] = weights.template field<J, part>(bits[v]);
#pragma GCC unroll 8
        for (int i = 0; i < m; ++i) {
          const I xi = broadcast_bits(x[i]);
          for (int v = 0; v < vectors; ++v) sums[i][v] = dot4(sums[i][v], w[v], xi);
        }
        x += height;
      });
    }
    to_come = ahead;
  }
};

using BytePanelEngine = ByteEngine<registers == 32 ? 6 : 4, registers == 32 ? 4 : 2, false>;
using ByteCodeEngine = ByteEngine<8, 2, true>;

template <class Engine, Format format, Form form, int parts = 1>
class ByteGemm {
 public:
  static void run(const ByteProduct& p, Runtime& runtime) {
    const int64_t tiles = ceil_div(p.n(), tile), wide = max(1, min(most_tiles, tiles / (4 * runtime.workers())));
    const int64_t piece = in_blocks ? min(depth, p.d.block) : depth, pieces = ceil_div(p.k(), piece);
    const int64_t padded = round_up(p.k(), per_dword), dwords = padded / 4, rows = round_up(p.m, Engine::height);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<uint32_t>(Engine::packed_size(p.m, dwords));
    const auto off = layout.add<uint32_t>(pieces * rows);
    const auto factors = layout.add<RowFactors>(p.m);
    const auto row = layout.add<int8_t>(2 * padded, runtime.workers());
    const auto sums = layout.add<float>(wide * rows * tile, runtime.workers());
    const auto panel = layout.add<uint32_t>(from_codes ? 0 : panels * parts * Panels::part_size, runtime.workers());
    const auto stage = layout.add<Stage>(form == Form::dot, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const Shared shared{p, w, x.in(base), off.in(base), factors.in(base), piece, dwords, rows};
    for_each(runtime, p.m, [&](int64_t i, int64_t worker) { pack(shared, i, row.in(base, worker)); });
    for_each(runtime, ceil_div(tiles, wide), [&](int64_t i, int64_t worker) {
      [[maybe_unused]] const typename Engine::Session session{};
      const ByteGemm g{shared, i * wide * tile, min(p.n(), (i + 1) * wide * tile), sums.in(base, worker), panel.in(base, worker)};
      if constexpr (form == Form::dot) {
        g.dot(*stage.in(base, worker));
      } else {
        g.axpy();
      }
      g.finish();
    });
  }

 private:
  using W = ByteWeights<format, parts>;
  using Panels = BytePanels<parts>;
  static constexpr bool in_blocks = blocked(format), from_codes = Engine::from_codes;
  static constexpr int64_t most_tiles = 4, panels = form == Form::axpy ? most_tiles : 1;
  static constexpr int depth = byte_depth;
  static constexpr int fields = form == Form::dot ? W::fields : 1;
  static constexpr int per_dword = 4 * fields;
  using Stage = DotStage<format, depth>;

  struct Shared {
    const ByteProduct& p;
    const Weights& w;
    uint32_t* x;     // see Engine::place
    uint32_t* off;    // [piece of k][row of x]: what the excess of the weights adds, with its sign turned
    RowFactors* factors;  // (m)
    int64_t piece;   // contracted indices that are summed at once
    int64_t dwords, rows;
  };

  static void pack(const Shared& s, int64_t i, int8_t* codes) {
    const int64_t k = s.p.k(), padded = 4 * s.dwords, bytes = padded / fields;
    s.factors[i] = RowFactors::of(ByteRow::read(s.p, i, padded, codes), W::unit(s.w.table), in_blocks);
    const int8_t* sorted = codes;
    if constexpr (fields > 1) {
      sort_fields<fields>(codes, bytes, codes + padded);
      sorted += padded;
    }
    for (int64_t d = 0; d < s.dwords; ++d)
      std::memcpy(s.x + Engine::place(i, d, s.dwords), sorted + d % fields * bytes + d / fields * 4, 4);
    for (int64_t d = s.dwords; d < Engine::padded(s.dwords); ++d) s.x[Engine::place(i, d, s.dwords)] = 0;
    for (int64_t k0 = 0; k0 < k; k0 += s.piece) 
      s.off[k0 / s.piece * s.rows + i] = without_excess(Engine::signs ? 0 : W::excess, codes + k0, min(s.piece, k - k0));
  }

  void dot(Stage& stage) const {
    const int64_t k = s.p.k();
    for (int64_t k1 = 0; k1 < k; k1 += stage.span)
      for (int64_t n = begin; n < end; n += tile) {
        stage_codes(w, n, k1, stage);
        RowsAhead ahead = rows_ahead<format, Stage::span>(w, n, k1, begin, end);
        for (int64_t k0 = k1; k0 < min(k1 + stage.span, k); k0 += depth) {
          const int64_t count = min(depth, k - k0);
          if constexpr (in_blocks) stage_scales(w, n, k0, count, stage);
          const uint32_t* bits = stage.bits + (k0 - k1) / per_dword * tile;
          if constexpr (from_codes) {
            multiply(W(w.table), n, k0, count, bits, stage.scales, ahead);
          } else {
            decode(bits, ceil_div(count, per_dword));
            multiply(Panels(), n, k0, count, panel, stage.scales, ahead);
          }
        }
        ahead.ask_for_all();
      }
  }

  // `count` dwords of codes of the stage into the panel.
  void decode(const uint32_t* bits, int64_t count) const {
    const W weights(w.table);
    uint32_t* to = panel;
    for (int64_t d = 0; d < count; ++d, bits += tile, to += fields * tile)
      for (int n = 0; n < tile; n += lanes) {
        const I codes = load_bits(bits + n);
        unroll<parts>([&]<int part>() {
          unroll<W::fields>([&]<int J>() {
            store_bits(to + part * Panels::part_size + J * tile + n, weights.template field<J, part>(codes));
          });
        });
      }
  }

  void axpy() const {
    const int64_t k = s.p.k();
    for (int64_t k0 = 0; k0 < k; k0 += depth) {
      const int64_t count = min(depth, k - k0);
      join(k0, count);
      const uint32_t* from = panel;
      for (int64_t n = begin; n < end; n += tile, from += Panels::part_size) {
        RowsAhead none;
        multiply(Panels(), n, k0, count, from, nullptr, none);
      }
    }
  }

  // Rows k0 ... k0 + count - 1 of the columns begin ... end - 1, four at a time, to [tile][four rows][position]. All columns of a
  // row are read before the next row, which is in another page.
  void join(int64_t k0, int64_t count) const {
    constexpr int64_t ahead = 32;  // rows
    const W weights(w.table);
    for (int64_t k = 0; k < count; k += 4)
      for (int64_t n = begin; n < end; n += vector_bytes) {
        const int64_t available = min(vector_bytes, w.cols - n), at = n - begin;
        I rows[4];
        for (int r = 0; r < 4; ++r) {
          const uint8_t* from = w.codes + (k0 + k + r) * w.row_bytes + n;
          if (k + r < count && available == vector_bytes) [[likely]] {
            __builtin_prefetch(from + ahead * w.row_bytes, 0, 2);
            rows[r] = load_bits(from);
          } else {
            uint8_t padded[vector_bytes] = {};
            if (k + r < count) std::memcpy(padded, from, available);
            rows[r] = load_bits(padded);
          }
        }
        join_rows(rows);
        uint32_t* to = panel + at / tile * Panels::part_size + k / 4 * tile + at % tile;
        for (int j = 0; j < 4; ++j) store_bits(to + j * lanes, Engine::signs ? rows[j] : weights.template field<0>(rows[j]));
      }
  }

  float* sums_of(int64_t n) const { return sums + (n - begin) * s.rows; }

  // `bits` are dwords of `source.fields` times four contracted indices.
  template <class Source>
  void multiply(const Source& source, int64_t n, int64_t k0, int64_t count, const uint32_t* bits, const float* scales,
                RowsAhead& ahead) const {
    constexpr int values = 4 * Source::fields;
    for (int64_t at = 0; at < count; at += s.piece) {
      const int64_t k = k0 + at, here = round_up(min(s.piece, count - at), per_dword) / values;
      const uint32_t* off = s.off + k / s.piece * s.rows;
      const float* factors = in_blocks ? scales + at / s.piece * tile : nullptr;
      Engine::template multiply<Source, in_blocks>(source, s.x + Engine::place(0, k / 4, s.dwords), s.p.m, s.dwords,
                                                   bits + at / values * tile, here, off, factors, k == 0, sums_of(n), ahead);
    }
  }

  void finish() const {
    for (int64_t n = begin; n < end; n += tile) {
      const float* factor = w.along_n ? w.along_n + n : nullptr;
      for (int64_t i = 0; i < s.p.m; ++i) {
        const float* row = sums_of(n) + i * tile;
        float values[tile];
        for (int at = 0; at < tile; at += vector_bytes) {
          F v[4];
          for (int j = 0; j < 4; ++j) {
            const float* from = row + at + j * lanes;
            v[j] = mul(in_blocks ? load(from) : from_ints(load_bits(from)), broadcast(s.factors[i].first));
          }
          if constexpr (form == Form::axpy) sort_columns(v);
          for (int j = 0; j < 4; ++j) store(values + at + j * lanes, v[j]);
        }
        write_row(values, min(tile, end - n), factor, w.everywhere * s.factors[i].then, s.p.y, s.p.y_type,
                  i * s.p.n() + n);
      }
    }
  }

  ByteGemm(const Shared& s, int64_t begin, int64_t end, float* sums, uint32_t* panel)
      : s(s), w(s.w), begin(begin), end(end), sums(sums), panel(panel) {}

  const Shared& s;
  const Weights& w;
  const int64_t begin, end;  // outputs
  float* sums;               // [tile][m, rounded up][position]: integers where there are no blocks
  uint32_t* panel;           // [dword of k][position], in axpy form [tile][dword of k][position]
};

}  // namespace eformer::EFORMER_ISA

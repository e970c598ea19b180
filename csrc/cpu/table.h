// Ternary and binary products by table: four bits of codes choose one of 16 sums of x made in advance.
//
// Four bits are 2 ternary or 4 binary codes along k, and one lookup and one addition replace as many decoded values and
// multiplications. Codes are staged as for a panel, [dword of k][output]; a table of sums per four bits and row of x.
#pragma once

#include <type_traits>

#include "bit_columns.h"
#include "memory.h"
#include "panel.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

template <Format format, Form form>
class Table {
 public:
  static constexpr int most_rows = 8;

  // Looking up 16 values pays where that is one instruction, and so does bringing the bits into place.
  static constexpr bool possible =
      lanes == 16 && (form == Form::dot ? format == Format::ternary || format == Format::binary
                                        : format == Format::binary && can_turn_bits);

  static bool takes(const Product& p) { return possible && p.form == form && p.m <= most_rows; }

  static void run(const Product& p, Runtime& runtime) {
    const int64_t dwords = ceil_div(p.k(), per_dword);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto tables = layout.add<float>(p.m * dwords * table_size);
    const auto stage = layout.add<Stage>(1, runtime.workers());
    const auto sums = layout.add<float>(wide * p.m * tile, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const auto make = [&](int64_t first, int64_t last) { make_tables(p, w.along_k, first, min(dwords, last), tables.in(base)); };
    constexpr int64_t some = 8;      // dwords of tables made by one chunk
    constexpr int64_t alone = 1024;  // tables made in less time than it takes to wake a thread
    const bool few = p.m * dwords <= alone;
    if (!few) for_each(runtime, ceil_div(dwords, some), [&](int64_t i, int64_t) { make(i * some, (i + 1) * some); });
    auto prepare = [&](int64_t, int64_t) { make(0, few ? dwords : 0); };
    constexpr int64_t chunk = wide * tile;
    prepare_for_each(runtime, prepare, ceil_div(p.n(), chunk), [&](int64_t i, int64_t worker) {
      const Table t{p, w, i * chunk, min(p.n(), (i + 1) * chunk), tables.in(base), sums.in(base, worker)};
      t.outputs(*stage.in(base, worker));
    });
  }

 private:
  static constexpr int per_dword = Decoder<format>::per_dword;
  static constexpr int nibbles = 8;  // per dword
  static constexpr int per_nibble = per_dword / nibbles;
  static constexpr int table_size = nibbles * 16;  // floats per dword of codes and row of x
  static constexpr int vectors = tile / lanes;
  // Tiles at once. In axpy form a line of memory holds 8 tiles of binary columns, in dot form it belongs to one.
  static constexpr int wide = form == Form::dot ? 1 : 8;

  struct ColumnStage {
    static constexpr int dwords = 4, span = dwords * per_dword;
    alignas(64) uint32_t bits[wide * dwords * tile + 1];
  };
  using RowStage = DotStage<format, 128>;
  using Stage = std::conditional_t<form == Form::dot, RowStage, ColumnStage>;

  // The value of code `t` of the `per_nibble` codes in four bits, the first in the high ones.
  static constexpr float value(int bits, int t) {
    if (format == Format::binary) return (bits >> (3 - t) & 1) ? 1.0f : -1.0f;
    return static_cast<float>((bits >> (2 - 2 * t) & 3) - 1);
  }

  // Tables [dword][row of x][four bits of the dword, lowest first][16].
  static void make_tables(const Product& p, const float* factor, int64_t begin, int64_t end, float* tables) {
    alignas(64) float pattern[per_nibble][16];
    for (int t = 0; t < per_nibble; ++t)
      for (int bits = 0; bits < 16; ++bits) pattern[t][bits] = value(bits, t);
    for (int64_t d = begin; d < end; ++d)
      for (int64_t i = 0; i < p.m; ++i) {
        const int64_t first = d * per_dword, count = min(per_dword, p.k() - first);
        float x[per_dword] = {};
        read_row(p.x, p.x_type, i * p.k() + first, count, factor ? factor + first : nullptr, x);
        float* to = tables + (d * p.m + i) * table_size;
        for (int nibble = 0; nibble < nibbles; ++nibble, to += 16) {
          const float* xn = x + (nibble ^ 1) * per_nibble;  // the high half of a byte comes first
          for (int at = 0; at < 16; at += lanes) {
            F s = mul(broadcast(xn[0]), load(pattern[0] + at));
            for (int t = 1; t < per_nibble; ++t) s = fma(broadcast(xn[t]), load(pattern[t] + at), s);
            store(to + at, s);
          }
        }
      }
  }

  void outputs(Stage& stage) const {
    const int64_t k = p.k();
    for (int64_t k0 = 0; k0 < k; k0 += stage.span) {
      const int64_t first = k0 / per_dword, count = min(stage.dwords, ceil_div(k - k0, per_dword));
      fill(k0, stage);
      const uint8_t* next = form == Form::dot ? next_codes(k0 + stage.span) : nullptr;
      for (int64_t n = begin; n < end; n += tile) {
        const uint32_t* bits = stage.bits + (n - begin) * stage.dwords;
        for (int64_t i = 0; i < p.m; i += 4)
          rows<4>(i, bits, first, count, i ? nullptr : next, k0 == 0, sums_of(n) + i * tile);
      }
    }
    for (int64_t n = begin; n < end; n += tile)
      for (int64_t i = 0; i < p.m; ++i) write(n, i, sums_of(n) + i * tile);
  }

  void fill(int64_t k0, Stage& stage) const {
    if constexpr (form == Form::dot) {
      stage_codes(w, begin, k0, stage);
    } else {
      stage_columns(w, begin, k0, stage.dwords, stage.bits);
    }
  }

  // Dot form: what will be staged next, k0 going on or beginning again with the next outputs.
  const uint8_t* next_codes(int64_t k0) const {
    return w.codes + (k0 < p.k() ? begin * w.row_bytes + k0 / per_byte(format) : end * w.row_bytes);
  }

  void write(int64_t n, int64_t i, const float* from) const {
    float sorted[tile];
    if constexpr (form == Form::axpy) {
      for (int at = 0; at < tile; ++at) sorted[turned_column(at)] = from[at];
      from = sorted;
    }
    const float* factor = w.along_n ? w.along_n + n : nullptr;
    write_row(from, min(tile, end - n), factor, w.everywhere, p.y, p.y_type, i * p.n() + n);
  }

  float* sums_of(int64_t n) const { return sums + (n - begin) * p.m; }

  // Adds `count` dwords, beginning with `first`, for rows i ... i + m - 1 of x. The lines at `next` are asked for little by
  // little: 64 at once would keep everything else waiting.
  template <int m>
  INLINE void rows(int64_t i, const uint32_t* bits, int64_t first, int64_t count, const uint8_t* next, bool start,
                   float* to) const {
    if constexpr (m > 1) {
      if (p.m - i < m) return rows<m - 1>(i, bits, first, count, next, start, to);
    }
    F acc[m][vectors];
    for (int r = 0; r < m; ++r)
      for (int v = 0; v < vectors; ++v) acc[r][v] = zero();
    const float* table = tables + (first * p.m + i) * table_size;
    for (int64_t d = 0; d < count; ++d, bits += tile, table += p.m * table_size) {
      for (int64_t r = 4 * d; next && r < 4 * d + 4; ++r) __builtin_prefetch(next + r * w.row_bytes, 0, 2);
      unroll<4>([&]<int byte>() {
        // Loads at every byte are cheaper than shifts: what lies above the four bits does not matter.
        I low[vectors], high[vectors];
        for (int v = 0; v < vectors; ++v) {
          low[v] = load_bits(reinterpret_cast<const uint8_t*>(bits + v * lanes) + byte);
          keep_here(low[v]);
          high[v] = shift_right<4>(low[v]);
        }
        for (int r = 0; r < m; ++r) {
          const float* at = table + r * table_size + byte * 32;
          const Table16 t = Table16::of(at), u = Table16::of(at + 16);
          for (int v = 0; v < vectors; ++v) {
            acc[r][v] = add(acc[r][v], add(t.at(low[v]), u.at(high[v])));
            keep_here(acc[r][v]);
          }
        }
      });
    }
    for (int r = 0; r < m; ++r)
      for (int v = 0; v < vectors; ++v) {
        float* at = to + r * tile + v * lanes;
        store(at, start ? acc[r][v] : add(load(at), acc[r][v]));
      }
  }

  Table(const Product& p, const Weights& w, int64_t begin, int64_t end, const float* tables, float* sums)
      : p(p), w(w), begin(begin), end(end), tables(tables), sums(sums) {}

  const Product& p;
  const Weights& w;
  const int64_t begin, end;  // outputs
  const float* tables;
  float* sums;  // [tile][m][position]
};

}  // namespace eformer::EFORMER_ISA

// Dot form with few rows of an x of 8 bits: rows of D are read where they lie, and multiplied as bytes.
#pragma once

#include <cstring>

#include "byte_rows.h"
#include "byte_weights.h"
#include "column_blocks.h"
#include "memory.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

// A block has whole groups of columns, or is a power of two of them that does not cut the columns of a lane.
template <Format format, int parts = 1>
class ByteSmallDot {
 public:
  static constexpr int most_rows = registers == 32 ? 8 : 4;

  static bool takes(const ByteProduct& p) {
#if defined(__AMX_INT8__)
    constexpr int64_t rows_that_pay = 5, blocks_that_pay = 32;  // on tiles
    if (p.m >= rows_that_pay && (!in_blocks || p.d.block >= blocks_that_pay)) return false;
#endif
    return p.form == Form::dot && p.m <= most_rows;
  }

  static void run(const ByteProduct& p, Runtime& runtime) {
    const int64_t groups = ceil_div(p.k(), columns), padded = groups * columns, rows = at_once(p.m);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<int8_t>(rows * padded);
    const auto taken = layout.add<uint32_t>(rows * (in_blocks ? groups * lanes : 1));
    const auto row = layout.add<int8_t>(2 * padded);
    const auto room = reserve_rows<format>(layout, p.d, side_by_side(1), padded, runtime.workers());
    const auto numbers = reserve_scales(layout, p.d, side_by_side(1) * p.d.blocks(), runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    ByteSmallDot dot{p, w, x.in(base), taken.in(base), groups};
    auto pack = [&](int64_t, int64_t) {
      for (int64_t i = 0; i < rows; ++i) dot.pack(i, row.in(base), x.in(base), taken.in(base));
    };
    const int64_t chunk = max(8, min(64, round_up(ceil_div(p.n(), 4 * runtime.workers()), 8)));
    prepare_for_each(runtime, pack, ceil_div(p.n(), chunk), [&](int64_t i, int64_t worker) {
      dot.outputs(i * chunk, min(p.n(), (i + 1) * chunk), room.in(base, worker), numbers.in(base, worker));
    });
  }

 private:
  using W = ByteWeights<format, parts>;
  static constexpr bool in_blocks = blocked(format);
  static constexpr int columns = vector_bytes * W::fields;
  using Blocks = ColumnBlocks<columns, in_blocks>;

  // Rows of x for which there is code: some of them may be zeros.
  static constexpr int64_t at_once(int64_t m) { return m <= 2 ? m : m <= 4 ? 4 : most_rows; }
  // Rows of D at once.
  static constexpr int side_by_side(int m) { return registers == 32 ? (m == 8 ? 2 : 4) : m <= 2 ? 2 : 1; }

  // Row i of x as [group][field][byte], and what the excess of the weights adds to its sums, with its sign turned.
  void pack(int64_t i, int8_t* codes, int8_t* to, uint32_t* off) {
    const int64_t padded = groups * columns, bytes = groups * vector_bytes;
    int8_t* sorted = codes + padded;
    to += i * padded;
    if (i < p.m) {
      factors[i] = RowFactors::of(ByteRow::read(p, i, padded, codes), W::unit(w.table), in_blocks);
    } else {
      std::memset(codes, 0, padded);
    }
    sort_fields<W::fields>(codes, bytes, sorted);
    for (int64_t g = 0; g < groups; ++g)
      for (int j = 0; j < W::fields; ++j, to += vector_bytes)
        std::memcpy(to, sorted + j * bytes + g * vector_bytes, vector_bytes);
    if constexpr (in_blocks) {
      for (int64_t lane = 0; lane < groups * lanes; ++lane)
        off[i * groups * lanes + lane] = without_excess(W::excess, codes + lane * W::per_dword, W::per_dword);
    } else {
      off[i] = without_excess(W::excess, codes, padded);
    }
  }

  void outputs(int64_t begin, int64_t end, uint8_t* room, float* numbers) const {
    switch (at_once(p.m)) {
      case 1: return outputs<1>(begin, end, room, numbers);
      case 2: return outputs<2>(begin, end, room, numbers);
      case 4: return outputs<4>(begin, end, room, numbers);
      default: return outputs<most_rows>(begin, end, room, numbers);
    }
  }

  template <int m>
  void outputs(int64_t begin, int64_t end, uint8_t* room, float* numbers) const {
    constexpr int step = side_by_side(m);
    for (int64_t n = begin; n < end; n += step) {
      float sums[m][step];
      several<m, step>(n, room, numbers, sums);
      for (int i = 0; i < min(m, p.m); ++i)
        for (int c = 0; c < min(step, end - n); ++c)
          store_from_f32(p.y, p.y_type, i * p.n() + n + c, sums[i][c] * factors[i].first * (w.at_end(n + c) * factors[i].then));
    }
  }

  // Outputs n ... n + step - 1; rows beyond the last are replaced by it.
  template <int m, int step>
  INLINE void several(int64_t n, uint8_t* room, float* numbers, float (&sums)[m][step]) const {
    const uint8_t* codes[step];
    const float* scales[step];
    const int64_t row_bytes = rows_of<format>(w, n, groups * columns, room, numbers, codes, scales);
    const int64_t ahead = bytes_ahead<format, step>(w);
    Blocks blocks(w.block);
    const Spread spread(blocks.per_group);
    I acc[m][step];
    F total[m][step];
    for (int i = 0; i < m; ++i)
      for (int c = 0; c < step; ++c) acc[i][c] = broadcast_bits(0), total[i][c] = zero();
    const int64_t whole = min(groups, row_bytes / vector_bytes);
    const W weights(w.table);
    I bits[step];
    int64_t g = 0;
    for (; g < whole; ++g, blocks.next()) {
      if constexpr (in_blocks) ask_for_scales<step>(w, n, blocks.first, blocks.per_group);
      for (int c = 0; c < step; ++c) {
        bits[c] = load_bits(codes[c] + g * vector_bytes);
        __builtin_prefetch(codes[c] + g * vector_bytes + ahead, 0, 2);
      }
      group<m, step>(weights, g, bits, acc);
      if constexpr (in_blocks) add_blocks<m, step>(scales, blocks.first, spread, acc, total);
    }
    if (g < groups) {
      for (int c = 0; c < step; ++c) {
        uint8_t rest[vector_bytes] = {};
        std::memcpy(rest, codes[c] + g * vector_bytes, row_bytes - g * vector_bytes);
        bits[c] = load_bits(rest);
      }
      group<m, step>(weights, g, bits, acc);
      const Spread existing(blocks.per_group, in_blocks ? min(blocks.per_group, w.blocks - blocks.first) : 1);
      if constexpr (in_blocks) add_blocks<m, step>(scales, blocks.first, existing, acc, total);
    }
    for (int i = 0; i < m; ++i)
      for (int c = 0; c < step; ++c) {
        if constexpr (in_blocks) {
          sums[i][c] = sum(total[i][c]);
        } else {
          sums[i][c] = static_cast<float>(static_cast<int32_t>(sum_ints(acc[i][c]) + off[i]));
        }
      }
  }

  // Adds group g of `step` rows of D times m rows of x.
  template <int m, int step>
  INLINE void group(const W& weights, int64_t g, const I (&bits)[step], I (&acc)[m][step]) const {
    const int8_t* xg = x + g * columns;
    if constexpr (in_blocks) {
      for (int i = 0; i < m; ++i) {
        // With one part what the excess adds is taken off first, which costs nothing.
        const I first = parts == 1 && W::excess ? load_bits(off + (i * groups + g) * lanes) : broadcast_bits(0);
        for (int c = 0; c < step; ++c) acc[i][c] = first;
      }
    }
    unroll<parts>([&]<int part>() {
      unroll<W::fields>([&]<int J>() {
        I value[step];
        for (int c = 0; c < step; ++c) value[c] = weights.template field<J, part>(bits[c]);
        for (int i = 0; i < m; ++i) {
          const I xi = load_bits(xg + i * groups * columns + J * vector_bytes);
          for (int c = 0; c < step; ++c) acc[i][c] = dot4(acc[i][c], value[c], xi);
        }
      });
      if constexpr (part + 1 < parts) {
        for (int i = 0; i < m; ++i)
          for (int c = 0; c < step; ++c) acc[i][c] = shift_left<8>(acc[i][c]);
      }
    });
    if constexpr (in_blocks && parts == 2 && W::excess != 0) {
      for (int i = 0; i < m; ++i) {
        const I less = load_bits(off + (i * groups + g) * lanes);
        for (int c = 0; c < step; ++c) acc[i][c] = add_bits(acc[i][c], less);
      }
    }
  }

  // The scales of a group multiply its sums, lane by lane.
  template <int m, int step>
  INLINE void add_blocks(const float* const (&scales)[step], int64_t block, const Spread& spread, const I (&acc)[m][step],
                         F (&total)[m][step]) const {
    for (int c = 0; c < step; ++c) {
      const F s = spread(scales[c] + block);
      for (int i = 0; i < m; ++i) total[i][c] = fma(from_ints(acc[i][c]), s, total[i][c]);
    }
  }

  ByteSmallDot(const ByteProduct& p, const Weights& w, const int8_t* x, const uint32_t* off, int64_t groups)
      : p(p), w(w), x(x), off(off), groups(groups) {}

  const ByteProduct& p;
  const Weights& w;
  const int8_t* x;     // (m, group, field, byte)
  const uint32_t* off;  // (m, group, lane) with blocks, else (m)
  const int64_t groups;
  RowFactors factors[most_rows];
};

}  // namespace eformer::EFORMER_ISA

// Axpy form of INT8 with few rows of an x of 8 bits: whole rows of D stream by, four joined to dwords at a time. The
// contracted axis is cut into pieces with sums of their own, which are integers, so that how it is cut does not matter.
#pragma once

#include <cstring>

#include "byte_rows.h"
#include "byte_weights.h"
#include "memory.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

class ByteSmallAxpy {
 public:
  static constexpr int most_rows = 4;

  static bool takes(const ByteProduct& p) { return p.form == Form::axpy && p.m <= most_rows; }

  static void run(const ByteProduct& p, Runtime& runtime) {
    const Cut cut = cut_of(p);
    const int64_t padded = round_up(p.k(), at_once), rows = p.m <= 2 ? p.m : most_rows;
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<int8_t>(rows * padded);
    const auto sums = layout.add<int32_t>(cut.pieces * rows * cut.columns);
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    ByteSmallAxpy axpy{p, w, cut, x.in(base), sums.in(base), padded, rows};
    auto read = [&](int64_t, int64_t) { axpy.read(x.in(base)); };
    prepare_for_each(runtime, read, cut.pieces * cut.stretches, [&](int64_t i, int64_t) {
      axpy.add_up(i / cut.stretches, i % cut.stretches);
    });
    auto finish = [&](int64_t i, int64_t) { axpy.finish(i); };
    constexpr int64_t alone = 1 << 17;  // sums that are added up in less time than it takes to wake a thread
    if (cut.pieces * rows * cut.columns > alone) return for_each(runtime, cut.stretches, finish);
    for (int64_t i = 0; i < cut.stretches; ++i) finish(i, 0);
  }

 private:
  using W = ByteWeights<Format::int8>;
  static constexpr int at_once = 16;  // rows of D

  struct Cut {
    int64_t pieces, depth;              // of the contracted axis
    int64_t stretches, width, columns;  // of the outputs; columns: all of them, rounded up to whole groups
  };

  // The sums of a stretch stay in the nearest cache; there should be something to do for eight threads.
  static Cut cut_of(const ByteProduct& p) {
    constexpr int64_t shallowest = 512, most_pieces = 16, narrowest = 512, widest = 4096, enough = 8;
    const int64_t depth = round_up(max(shallowest, ceil_div(p.k(), most_pieces)), at_once);
    const int64_t pieces = ceil_div(p.k(), depth);
    const int64_t share = round_up(ceil_div(p.n() * pieces, enough), narrowest);
    const int64_t width = min(widest / (p.m > 2 ? 4 : p.m), share);
    return {pieces, depth, ceil_div(p.n(), width), width, round_up(p.n(), vector_bytes)};
  }

  void read(int8_t* to) {
    for (int64_t i = 0; i < rows; ++i) {
      if (i < p.m) {
        factors[i] = RowFactors::of(ByteRow::read(p, i, padded, to + i * padded), 1, false);
      } else {
        std::memset(to + i * padded, 0, padded);
      }
      off[i] = without_excess(W::excess, to + i * padded, padded);
    }
  }

  int32_t* sums_of(int64_t piece, int64_t i) const { return sums + (piece * rows + i) * cut.columns; }

  void add_up(int64_t piece, int64_t stretch) const {
    const int64_t begin = stretch * cut.width, end = min(p.n(), begin + cut.width);
    const int64_t first = piece * cut.depth, last = min(p.k(), first + cut.depth);
    for (int64_t k0 = first; k0 < last; k0 += at_once)
      for (int64_t n = begin; n < end; n += vector_bytes) {
        int32_t* to = sums_of(piece, 0) + n;
        const bool whole = k0 + at_once <= last && n + vector_bytes <= w.cols;
        whole ? group<true>(n, k0, last, k0 == first, to) : group<false>(n, k0, last, k0 == first, to);
      }
  }

  template <bool whole>
  INLINE void group(int64_t n, int64_t k0, int64_t last, bool start, int32_t* to) const {
    switch (rows) {
      case 1: return group<whole, 1>(n, k0, last, start, to);
      case 2: return group<whole, 2>(n, k0, last, start, to);
      default: return group<whole, 4>(n, k0, last, start, to);
    }
  }

  // Adds rows k0 ... k0 + 15, those before `last`, of the group of columns at n.
  template <bool whole, int m>
  void group(int64_t n, int64_t k0, int64_t last, bool start, int32_t* to) const {
    const W weights(0);
    const uint8_t* from = w.codes + k0 * w.row_bytes + n;
    I acc[m][4];
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) acc[i][j] = start ? broadcast_bits(0) : load_bits(to + i * cut.columns + j * lanes);
    for (int r = 0; r < at_once; r += 4) {
      I value[4];
      for (int j = 0; j < 4; ++j) {
        const uint8_t* row = from + (r + j) * w.row_bytes;
        __builtin_prefetch(row + at_once * w.row_bytes);
        if constexpr (whole) {
          value[j] = load_bits(row);
        } else {
          uint8_t part[vector_bytes] = {};
          if (k0 + r + j < last) std::memcpy(part, row, min(vector_bytes, w.cols - n));
          value[j] = load_bits(part);
        }
      }
      join_rows(value);
      for (int j = 0; j < 4; ++j) value[j] = weights.template field<0>(value[j]);
      for (int i = 0; i < m; ++i) {
        uint32_t four;
        std::memcpy(&four, x + i * padded + k0 + r, 4);
        const I xi = broadcast_bits(four);
        for (int j = 0; j < 4; ++j) acc[i][j] = dot4(acc[i][j], value[j], xi);
      }
    }
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) store_bits(to + i * cut.columns + j * lanes, acc[i][j]);
  }

  void finish(int64_t stretch) const {
    const int64_t begin = stretch * cut.width, end = min(p.n(), begin + cut.width);
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t n = begin; n < end; n += vector_bytes) {
        F v[4];
        for (int j = 0; j < 4; ++j) {
          I sum = broadcast_bits(off[i]);
          for (int64_t piece = 0; piece < cut.pieces; ++piece) sum = add_bits(sum, load_bits(sums_of(piece, i) + n + j * lanes));
          v[j] = mul(from_ints(sum), broadcast(factors[i].first));
        }
        sort_columns(v);
        float values[vector_bytes];
        for (int j = 0; j < 4; ++j) store(values + j * lanes, v[j]);
        write_row(values, min(vector_bytes, end - n), w.along_n ? w.along_n + n : nullptr, w.everywhere * factors[i].then, p.y,
                  p.y_type, i * p.n() + n);
      }
  }

  ByteSmallAxpy(const ByteProduct& p, const Weights& w, const Cut& cut, const int8_t* x, int32_t* sums, int64_t padded, int64_t rows)
      : p(p), w(w), cut(cut), x(x), sums(sums), padded(padded), rows(rows) {}

  const ByteProduct& p;
  const Weights& w;
  const Cut& cut;
  const int8_t* x;  // (rows, padded)
  int32_t* sums;    // (pieces, rows, columns)
  const int64_t padded, rows;
  RowFactors factors[most_rows];
  uint32_t off[most_rows];  // what the excess of the weights adds, with its sign turned
};

}  // namespace eformer::EFORMER_ISA

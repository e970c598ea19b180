// Axpy form with few rows of x: whole rows of D stream by, a few at a time. The contracted axis is cut into pieces, each
// with sums of its own that are added up in the end, so that every thread reads long runs of memory.
#pragma once

#include "groups.h"
#include "memory.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

template <Format format>
class SmallAxpy {
 public:
  static constexpr int most_rows = registers == 32 ? 4 : 2;

  static bool takes(const Product& p) { return p.form == Form::axpy && p.m <= most_rows; }

  static void run(const Product& p, Runtime& runtime) {
    const Cut cut = cut_of(p);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<float>(p.m * p.k());
    const auto sums = layout.add<float>(cut.pieces * p.m * cut.columns);
    const auto room = reserve_scales(layout, p.d, at_once * most_blocks(p.d, cut.width), runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const SmallAxpy axpy{p, w, cut, x.in(base), sums.in(base)};
    auto read = [&](int64_t, int64_t) {
      for (int64_t i = 0; i < p.m; ++i) read_row(p.x, p.x_type, i * p.k(), p.k(), w.along_k, x.in(base) + i * p.k());
    };
    prepare_for_each(runtime, read, cut.pieces * cut.stretches, [&](int64_t i, int64_t worker) {
      axpy.add_up(i / cut.stretches, i % cut.stretches, room.in(base, worker));
    });
    auto finish = [&](int64_t i, int64_t) { axpy.finish(i); };
    constexpr int64_t alone = 1 << 17;  // sums that are added up in less time than it takes to wake a thread
    if (cut.pieces * p.m * cut.columns > alone) return for_each(runtime, cut.stretches, finish);
    for (int64_t i = 0; i < cut.stretches; ++i) finish(i, 0);
  }

 private:
  static constexpr int at_once = 16;  // rows of D

  // How the work is cut, by the sizes alone: the order of summation must not depend on the number of threads.
  struct Cut {
    int64_t pieces, depth;              // of the contracted axis
    int64_t stretches, width, columns;  // of the outputs; columns: all of them, rounded up to whole groups
  };

  // The sums of a stretch stay in the nearest cache; there should be something to do for eight threads.
  static Cut cut_of(const Product& p) {
    constexpr int64_t shallowest = 512, most_pieces = 16, narrowest = 512, widest = 4096, enough = 8;
    const int64_t depth = round_up(max(shallowest, ceil_div(p.k(), most_pieces)), at_once);
    const int64_t pieces = ceil_div(p.k(), depth);
    const int64_t share = round_up(ceil_div(p.n() * pieces, enough), narrowest);
    const int64_t width = min(widest / (p.m > 2 ? 4 : p.m), share);
    return {pieces, depth, ceil_div(p.n(), width), width, round_up(p.n(), group_columns)};
  }

  float* sums_of(int64_t piece, int64_t i) const { return sums + (piece * p.m + i) * cut.columns; }

  void add_up(int64_t piece, int64_t stretch, float* room) const {
    const int64_t begin = stretch * cut.width, end = min(p.n(), begin + cut.width);
    const int64_t first = piece * cut.depth, last = min(p.k(), first + cut.depth);
    for (int64_t k0 = first; k0 < last; k0 += at_once) {
      const int64_t count = min(at_once, last - k0);
      const ScaleRows scales = scale_rows<format>(w, k0, count, begin, end, room);
      for (int64_t n = begin; n < end; n += group_columns)
        group<most_rows>(n, k0, count, scales, k0 == first, sums_of(piece, 0) + n);
    }
  }

  void finish(int64_t stretch) const {
    const int64_t begin = stretch * cut.width, end = min(p.n(), begin + cut.width);
    for (int64_t i = 0; i < p.m; ++i) {
      float* total = sums_of(0, i);
      for (int64_t n = begin; n < end; n += group_columns) {
        for (int64_t at = n; at < n + group_columns; at += lanes) {
          F sum = load(total + at);
          for (int64_t piece = 1; piece < cut.pieces; ++piece) sum = add(sum, load(sums_of(piece, i) + at));
          store(total + at, sum);
        }
        sort_group<format>(total + n);
      }
      write_row(total + begin, end - begin, w.along_n ? w.along_n + begin : nullptr, w.everywhere, p.y, p.y_type,
                i * p.n() + begin);
    }
  }

  // Adds rows k0 ... k0 + count - 1 of the group of columns at n.
  template <int m>
  INLINE void group(int64_t n, int64_t k0, int64_t count, const ScaleRows& scales, bool start, float* to) const {
    if constexpr (m > 1) {
      if (p.m < m) return group<m - 1>(n, k0, count, scales, start, to);
    }
    const GroupReader<format> reader(w, n);
    F acc[m][4];
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) acc[i][j] = start ? zero() : load(to + i * cut.columns + j * lanes);
    for (int64_t r = 0; r < count; ++r) {
      __builtin_prefetch(reader.codes(k0 + r + at_once));
      F value[4];
      reader.read(k0 + r, scales.at(r, reader), value);
      for (int i = 0; i < m; ++i) {
        const F xi = broadcast(x[i * p.k() + k0 + r]);
        for (int j = 0; j < 4; ++j) acc[i][j] = fma(value[j], xi, acc[i][j]);
      }
    }
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) store(to + i * cut.columns + j * lanes, acc[i][j]);
  }

  SmallAxpy(const Product& p, const Weights& w, const Cut& cut, const float* x, float* sums)
      : p(p), w(w), cut(cut), x(x), sums(sums) {}

  const Product& p;
  const Weights& w;
  const Cut& cut;
  const float* x;  // (m, k)
  float* sums;     // (pieces, m, columns)
};

}  // namespace eformer::EFORMER_ISA

// Axpy form with few rows of x: rows of D stream by, a few at a time, and the sums of a stretch of columns stay in cache.
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
    const int64_t chunk = chunk_of(p.n(), runtime.workers());
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<float>(p.m * p.k());
    const auto sums = layout.add<float>(p.m * chunk, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    auto read = [&](int64_t, int64_t) {
      for (int64_t i = 0; i < p.m; ++i) read_row(p.x, p.x_type, i * p.k(), p.k(), w.along_k, x.in(base) + i * p.k());
    };
    prepare_for_each(runtime, read, ceil_div(p.n(), chunk), [&](int64_t i, int64_t worker) {
      const SmallAxpy axpy{p, w, x.in(base), sums.in(base, worker), chunk};
      axpy.outputs(i * chunk, min(p.n(), (i + 1) * chunk));
    });
  }

 private:
  static constexpr int at_once = 16;  // rows of D

  // Wide stretches make long runs of memory; narrow ones feed more threads.
  static int64_t chunk_of(int64_t n, int64_t workers) {
    return max(group_columns, min(2048, round_up(ceil_div(n, 2 * workers), 512)));
  }

  void outputs(int64_t begin, int64_t end) const {
    for (int64_t i = 0; i < p.m * chunk; ++i) sums[i] = 0;
    for (int64_t k0 = 0; k0 < p.k(); k0 += at_once) {
      const int64_t count = min(at_once, p.k() - k0);
      for (int64_t n = begin; n < end; n += group_columns) group<most_rows>(n, k0, count, sums + (n - begin));
    }
    for (int64_t i = 0; i < p.m; ++i) {
      float* row = sums + i * chunk;
      for (int64_t n = begin; n < end; n += group_columns) sort_group<format>(row + (n - begin));
      write_row(row, end - begin, w.along_n ? w.along_n + begin : nullptr, w.everywhere, p.y, p.y_type, i * p.n() + begin);
    }
  }

  // Adds rows k0 ... k0 + count - 1 of the group of columns at n.
  template <int m>
  INLINE void group(int64_t n, int64_t k0, int64_t count, float* to) const {
    if constexpr (m > 1) {
      if (p.m < m) return group<m - 1>(n, k0, count, to);
    }
    const GroupReader<format> reader(w, n);
    F acc[m][4];
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) acc[i][j] = zero();
    for (int64_t r = 0; r < count; ++r) {
      __builtin_prefetch(reader.codes(k0 + r + at_once));
      F value[4];
      reader.read(k0 + r, value);
      for (int i = 0; i < m; ++i) {
        const F xi = broadcast(x[i * p.k() + k0 + r]);
        for (int j = 0; j < 4; ++j) acc[i][j] = fma(value[j], xi, acc[i][j]);
      }
    }
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 4; ++j) {
        float* at = to + i * chunk + j * lanes;
        store(at, add(load(at), acc[i][j]));
      }
  }

  SmallAxpy(const Product& p, const Weights& w, const float* x, float* sums, int64_t chunk)
      : p(p), w(w), x(x), sums(sums), chunk(chunk) {}

  const Product& p;
  const Weights& w;
  const float* x;  // (m, k)
  float* sums;     // (m, chunk)
  const int64_t chunk;
};

}  // namespace eformer::EFORMER_ISA

// The f32 engine: a register tile of `height` rows of x by one strip of outputs, fused multiply-add.
#pragma once

#include "panel.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

struct FmaEngine {
  static constexpr int depth = 128;
  static constexpr int height = 6;
  static constexpr int vectors = registers == 32 ? 4 : 2;
  static constexpr int strip = vectors * lanes;

  // x is packed as [m / height][k][height], a panel as [strip][k][position in strip].
  using Packed = float;
  using Panel = float;
  static constexpr int panel_size = depth * tile;
  static int64_t packed_size(int64_t m, int64_t k) { return round_up(m, height) * k; }
  static int64_t packed_chunks(int64_t m) { return ceil_div(m, height); }

  struct Sink {
    Panel* panel;
    INLINE void put(int64_t k, int at, F even, F odd) const {
      float* to = panel + at / strip * strip * depth + k * strip + at % strip;
      store(to, even);
      store(to + strip, odd);
    }
  };

  struct Session {
    explicit Session(int64_t) {}
  };

  static void finish(Panel*, int64_t) {}

  static void pack(const Product& p, const float* factor, int64_t chunk, Packed* packed) {
    const int64_t k = p.k(), m0 = chunk * height;
    float* to = packed + m0 * k;
    constexpr int64_t step = 256;
    float part[step];
    for (int64_t i = 0; i < min(height, p.m - m0); ++i)
      for (int64_t k0 = 0; k0 < k; k0 += step) {
        const int64_t count = min(step, k - k0);
        read_row(p.x, p.x_type, (m0 + i) * k + k0, count, factor ? factor + k0 : nullptr, part);
        for (int64_t j = 0; j < count; ++j) to[(k0 + j) * height + i] = part[j];
      }
  }

  // c (m, tile) = or += x[:, k0 : k0 + count] @ panel
  static void multiply(const Packed* packed, int64_t m, int64_t k, int64_t k0, int64_t count, const Panel* panel,
                       bool first, float* c, RowsAhead& ahead) {
    for (int n = 0; n < tile; n += strip)
      for (int64_t m0 = 0; m0 < m; m0 += height) {
        const float* x = packed + m0 * k + k0 * height;
        const float* b = panel + n * depth;
        rows<height>(min(height, m - m0), x, b, count, first, c + m0 * tile + n, ahead);
      }
  }

 private:
  template <int most>
  static INLINE void rows(int64_t m, const float* x, const float* b, int64_t count, bool first, float* c, RowsAhead& ahead) {
    if constexpr (most > 1) {
      if (m < most) return rows<most - 1>(m, x, b, count, first, c, ahead);
    }
    block<most>(x, b, count, first, c, ahead);
  }

  template <int m>
  static void block(const float* x, const float* b, int64_t count, bool first, float* c, RowsAhead& to_come) {
    F sums[m][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < m; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[i][v] = zero();
    RowsAhead ahead = to_come;  // in registers
    for (int64_t k = 0; k < count; ++k, x += height, b += strip) {
      ahead.ask_for_one();
      F w[vectors];
      for (int v = 0; v < vectors; ++v) w[v] = load(b + v * lanes);
#pragma GCC unroll 8
      for (int i = 0; i < m; ++i) {
        const F xi = broadcast(x[i]);
        for (int v = 0; v < vectors; ++v) sums[i][v] = fma(w[v], xi, sums[i][v]);
      }
    }
    to_come = ahead;
#pragma GCC unroll 8
    for (int i = 0; i < m; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        float* at = c + i * tile + v * lanes;
        store(at, first ? sums[i][v] : add(load(at), sums[i][v]));
      }
  }
};

}  // namespace eformer::EFORMER_ISA

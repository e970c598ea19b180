// The product by panels: decode a panel of D once, multiply it with all rows of x, go on along k.
#pragma once

#include "memory.h"
#include "panel.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

// Rows of x taken at once: enough to make decoding cheap, few enough to bound the scratch space.
constexpr int64_t gemm_rows = 384;

template <class Engine, Format format, Form form>
class Gemm {
 public:
  static void run(const Product& p, Runtime& runtime) {
    const int64_t tiles = ceil_div(p.n(), tile);
    const int64_t wide = max(1, min(most_tiles, tiles / (4 * runtime.workers())));
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<typename Engine::Packed>(Engine::packed_size(p.m, p.k()));
    const auto sums = layout.add<float>(wide * p.m * tile, runtime.workers());
    const auto panel = layout.add<typename Engine::Panel>(Engine::panel_size, runtime.workers());
    const auto stage = layout.add<Stage>(form == Form::dot, runtime.workers());
    const int64_t blocks = form == Form::axpy ? most_blocks(p.d, wide * tile) : 0;
    const auto room = reserve_scales(layout, p.d, depth * blocks, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    auto* packed = x.in(base);
    for_each(runtime, Engine::packed_chunks(p.m), [&](int64_t i, int64_t) { Engine::pack(p, w.along_k, i, packed); });
    for_each(runtime, ceil_div(tiles, wide), [&](int64_t i, int64_t worker) {
      [[maybe_unused]] const typename Engine::Session session(p.m);
      const Gemm g{p, w, i * wide * tile, min(p.n(), (i + 1) * wide * tile), packed, sums.in(base, worker), panel.in(base, worker)};
      if constexpr (form == Form::dot) {
        g.dot(*stage.in(base, worker));
      } else {
        g.axpy(room.in(base, worker));
      }
      g.finish();
    });
  }

 private:
  // Tiles side by side: while the product moves on along k, the part of x in use is read from near caches again.
  static constexpr int64_t most_tiles = 4;
  static constexpr int depth = Engine::depth;
  using Stage = DotStage<format, depth>;

  void dot(Stage& stage) const {
    const int64_t k = p.k();
    for (int64_t s = 0; s < k; s += stage.span)
      for (int64_t n = begin; n < end; n += tile) {
        stage_codes(w, n, s, stage);
        RowsAhead ahead = rows_ahead<format, Stage::span>(w, n, s, begin, end);
        for (int64_t k0 = s; k0 < min(s + stage.span, k); k0 += depth) {
          const int64_t count = min(depth, k - k0);
          if constexpr (blocked(format)) stage_scales(w, n, k0, count, stage);
          decode(stage, s, k0, count);
          multiply(n, k0, count, ahead);
        }
        ahead.ask_for_all();
      }
  }

  void decode(const Stage& stage, int64_t stage_k, int64_t k0, int64_t count) const {
    const typename Engine::Sink sink{panel};
    if constexpr (takes_offsets(format)) {
      if (w.offset.data) return decode_dot<true>(w, stage, stage_k, k0, count, sink);
    }
    decode_dot<false>(w, stage, stage_k, k0, count, sink);
  }

  void axpy(float* room) const {
    const int64_t k = p.k();
    for (int64_t k0 = 0; k0 < k; k0 += depth) {
      const int64_t count = min(depth, k - k0);
      const ScaleRows scales = scale_rows<format>(w, k0, count, begin, end, room);
      for (int64_t n = begin; n < end; n += tile) {
        decode_axpy<format, depth>(w, n, k0, count, scales, typename Engine::Sink{panel});
        RowsAhead none;
        multiply(n, k0, count, none);
      }
    }
  }

  float* sums_of(int64_t n) const { return sums + (n - begin) * p.m; }

  void multiply(int64_t n, int64_t k0, int64_t count, RowsAhead& ahead) const {
    Engine::finish(panel, count);
    Engine::multiply(packed, p.m, p.k(), k0, count, panel, k0 == 0, sums_of(n), ahead);
  }

  void finish() const {
    for (int64_t n = begin; n < end; n += tile) {
      const float* factor = w.along_n ? w.along_n + n : nullptr;
      for (int64_t i = 0; i < p.m; ++i) {
        float* row = sums_of(n) + i * tile;
        if constexpr (form == Form::axpy)
          for (int g = 0; g < tile; g += group_columns) sort_group<format>(row + g);
        write_row(row, min(tile, end - n), factor, w.everywhere, p.y, p.y_type, i * p.n() + n);
      }
    }
  }

  const Product& p;
  const Weights& w;
  const int64_t begin, end;  // outputs
  const typename Engine::Packed* packed;
  float* sums;  // [tile][m][position]
  typename Engine::Panel* panel;

  Gemm(const Product& p, const Weights& w, int64_t begin, int64_t end, const typename Engine::Packed* packed,
       float* sums, typename Engine::Panel* panel)
      : p(p), w(w), begin(begin), end(end), packed(packed), sums(sums), panel(panel) {}
};

}  // namespace eformer::EFORMER_ISA

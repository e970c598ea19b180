// Decoded rows of D, for embeddings: only the rows asked for are touched.
#pragma once

#include "groups.h"
#include "memory.h"
#include "rows.h"

namespace eformer::EFORMER_ISA {

template <Format format>
class RowGather {
 public:
  static void run(const Gather& g, Runtime& runtime) {
    const Matrix& d = g.d;
    const int64_t width = round_up(d.cols, group_columns), scales = max(d.blocks(), d.cols) + group_columns;
    Layout layout;
    const auto values = layout.add<float>(width, runtime.workers());
    const auto factors = layout.add<float>(scales, runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const int64_t chunk = max(1, 16384 / max(1, d.cols));
    for_each(runtime, ceil_div(g.count, chunk), [&](int64_t c, int64_t worker) {
      for (int64_t i = c * chunk; i < min(g.count, (c + 1) * chunk); ++i)
        row(g, i, values.in(base, worker), factors.in(base, worker));
    });
  }

 private:
  static void row(const Gather& g, int64_t i, float* values, float* factors) {
    const Matrix& d = g.d;
    const int64_t at = max(0, min(g.indices[i], d.rows - 1));
    const int64_t first = at * d.scale.row_stride;
    // A row of blocks has one factor per block even where it is a single block, whose scale has no second stride.
    const bool varies = d.scale.data && (blocked(format) || d.scale.col_stride);
    if (varies) read_scales(d.scale, {first, d.block ? d.blocks() : d.cols, 1, 0, scale_count(d)}, factors);
    Weights w{format, d.table, Form::dot, d.codes + at * d.row_bytes, d.row_bytes, 1, d.cols, d.block, d.blocks(), Unpacker(d.bits)};
    w.offset = d.offset.moved(at * d.blocks() * static_cast<int64_t>(d.offset.size()));
    for (int64_t n = 0; n < d.cols; n += group_columns) {
      F value[4];
      const GroupReader<format> reader(w, n);
      reader.template read<true>(0, factors + reader.block(), value);
      Decoder<format>::sort(value);
      for (int j = 0; j < 4; ++j) store(values + n + j * lanes, value[j]);
    }
    const float everywhere = varies ? 1 : scale_at(d, at, 0);
    write_row(values, d.cols, varies && !blocked(format) ? factors : nullptr, everywhere, g.out, g.type, i * d.cols);
  }
};

}  // namespace eformer::EFORMER_ISA

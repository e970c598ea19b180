// Dot form with few rows of x: rows of D are read where they lie and decoded straight into registers.
#pragma once

#include <cstring>

#include "column_blocks.h"
#include "fp8.h"
#include "memory.h"
#include "rows.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

// For up to `most_rows` rows of x; D is a decoder of groups of columns.
template <class D, int most_rows>
class SmallDot {
 public:
  // A group needs one scale, or a power of two of them that does not cut the columns of a lane.
  static bool takes(const Product& p) {
    const bool fits = p.form == Form::dot && p.m <= most_rows;
    if constexpr (!in_blocks) return fits;
    const int64_t block = p.d.block;
    return fits && (block % D::columns == 0 || (D::columns % block == 0 && block >= D::finest));
  }

  static void run(const Product& p, Runtime& runtime) {
    const int64_t padded = round_up(p.k(), D::columns);
    Layout layout;
    const auto scale = reserve_scale(layout, p.d);
    const auto x = layout.add<float>(p.m * padded);
    const int64_t sums = p.d.offset.data ? padded / D::columns * lanes : 0;
    const auto of_lanes = layout.add<float>(p.m * sums);
    const auto added = layout.add<float>(p.d.offset.data ? side_by_side(1) * p.d.blocks() : 0, runtime.workers());
    const auto room = reserve_rows<D::format>(layout, p.d, side_by_side(1), padded, runtime.workers());
    const auto numbers = reserve_scales(layout, p.d, side_by_side(1) * p.d.blocks(), runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    const Weights w = weights_of(p, scale.in(base));
    const SmallDot dot{p, w, x.in(base), padded, of_lanes.in(base), sums};
    auto pack = [&](int64_t, int64_t) {
      for (int64_t i = 0; i < p.m; ++i) dot.pack(i, x.in(base) + i * padded, of_lanes.in(base) + i * sums);
    };
    const int64_t chunk = max(8, min(64, round_up(ceil_div(p.n(), 4 * runtime.workers()), 8)));
    prepare_for_each(runtime, pack, ceil_div(p.n(), chunk), [&](int64_t i, int64_t worker) {
      const int64_t begin = i * chunk, end = min(p.n(), begin + chunk);
      if constexpr (takes_offsets(D::format)) {
        if (w.offset.data) return dot.template outputs<most_rows, true>(begin, end, {room.in(base, worker), numbers.in(base, worker), added.in(base, worker)});
      }
      dot.template outputs<most_rows, false>(begin, end, {room.in(base, worker), numbers.in(base, worker), nullptr});
    });
  }

 private:
  static constexpr bool in_blocks = blocked(D::format);
  static constexpr int bytes = D::columns / static_cast<int>(per_byte(D::format));

  using Blocks = ColumnBlocks<D::columns, in_blocks>;

  // Of one worker, for the rows of D at work: unpacked codes, scales, what offsets add.
  struct Room {
    uint8_t* codes;
    float *scales, *added;
  };

  // Rows of D at once, for m rows of x at once: as many as the registers hold.
  static constexpr int side_by_side(int m) { return registers == 32 ? 4 : m <= 2 ? 2 : 1; }

  // A row of x in the order in which the columns of a group come out, zero beyond the end; and of every group the sums of
  // what meets in a lane.
  void pack(int64_t row, float* to, float* sums) const {
    const int64_t k = p.k();
    for (int64_t first = 0; first < k; first += D::columns, to += D::columns) {
      float part[D::columns] = {};
      const float* factor = w.along_k ? w.along_k + first : nullptr;
      read_row(p.x, p.x_type, row * k + first, min(D::columns, k - first), factor, part);
      for (int at = 0; at < D::columns; ++at) to[at] = part[D::order(at / lanes, at % lanes)];
      if (!of_x) continue;
      F total = load(to);
      for (int j = 1; j < D::values; ++j) total = add(total, load(to + j * lanes));
      store(sums + first / D::columns * lanes, total);
    }
  }

  template <int m, bool offset>
  void outputs(int64_t begin, int64_t end, const Room& room) const {
    if constexpr (m > 1) {
      if (p.m < m) return outputs<m - 1, offset>(begin, end, room);
    }
    constexpr int step = side_by_side(m);
    for (int64_t n = begin; n < end; n += step) {
      float sums[m][step];
      several<m, step, offset>(n, room, sums);
      for (int i = 0; i < m; ++i)
        for (int c = 0; c < min(step, end - n); ++c)
          store_from_f32(p.y, p.y_type, i * p.n() + n + c, sums[i][c] * w.at_end(n + c));
    }
  }

  // Outputs n ... n + step - 1; rows beyond the last are replaced by it.
  template <int m, int step, bool offset>
  INLINE void several(int64_t n, const Room& room, float (&sums)[m][step]) const {
    const uint8_t* codes[step];
    const float* scales[step];
    float* added = room.added;
    const int64_t row_bytes = rows_of<D::format>(w, n, padded, room.codes, room.scales, codes, scales);
    for (int c = 0; offset && c < step; ++c) w.add_row(min(n + c, w.rows - 1), scales[c], added + c * w.blocks);
    const int64_t ahead = bytes_ahead<D::format, step>(w);
    Blocks blocks(w.block);
    const Spread spread(blocks.per_group);
    F acc[m][step];
    for (int i = 0; i < m; ++i)
      for (int c = 0; c < step; ++c) acc[i][c] = zero();
    const int64_t whole = min(w.cols / D::columns, max(0, row_bytes - D::overread) / bytes);
    const D decoder(w.table);
    const uint8_t* at[step];
    int64_t g = 0;
    for (; g < whole; ++g, blocks.next()) {
      if constexpr (in_blocks) ask_for_scales<step>(w, n, blocks.first, blocks.per_group);
      for (int c = 0; c < step; ++c) {
        at[c] = codes[c] + g * bytes;
        __builtin_prefetch(at[c] + ahead, 0, 2);
      }
      group<m, step, offset>(decoder, g, at, scales, added, blocks.first, spread, acc);
    }
    for (; g * D::columns < w.cols; ++g, blocks.next()) {
      uint8_t rest[step][bytes + D::overread] = {};
      for (int c = 0; c < step; ++c) {
        std::memcpy(rest[c], codes[c] + g * bytes, min(bytes, row_bytes - g * bytes));
        at[c] = rest[c];
      }
      const Spread existing(blocks.per_group, in_blocks ? min(blocks.per_group, w.blocks - blocks.first) : 1);
      group<m, step, offset>(decoder, g, at, scales, added, blocks.first, existing, acc);
    }
    for (int i = 0; i < m; ++i)
      for (int c = 0; c < step; ++c) sums[i][c] = sum(acc[i][c]);
  }

  // Adds group g of `step` rows of D times m rows of x.
  template <int m, int step, bool offset>
  INLINE void group(const D& decoder, int64_t g, const uint8_t* const (&at)[step], const float* const (&scales)[step],
                    [[maybe_unused]] const float* added, int64_t block, const Spread& spread, F (&acc)[m][step]) const {
    const float* xg = x + g * D::columns;
    typename D::Group bits[step];
    for (int c = 0; c < step; ++c) bits[c] = decoder.group(at[c]);
    F part[m][step];  // with blocks: the scales of a group multiply its sum, lane by lane
    unroll<D::values>([&]<int J>() {
      F value[step];
      for (int c = 0; c < step; ++c) value[c] = decoder.template value<J>(bits[c]);
      for (int i = 0; i < m; ++i) {
        const F xi = load(xg + i * padded + J * lanes);
        for (int c = 0; c < step; ++c) {
          if constexpr (!in_blocks) {
            acc[i][c] = fma(value[c], xi, acc[i][c]);
          } else {
            part[i][c] = J == 0 ? mul(value[c], xi) : fma(value[c], xi, part[i][c]);
          }
        }
      }
    });
    if constexpr (in_blocks) {
      for (int c = 0; c < step; ++c) {
        const F s = spread(scales[c] + block);
        for (int i = 0; i < m; ++i) acc[i][c] = fma(part[i][c], s, acc[i][c]);
        if constexpr (offset) {
          const F b = spread(added + c * w.blocks + block);
          for (int i = 0; i < m; ++i) acc[i][c] = fma(load(of_x + i * of_row + g * lanes), b, acc[i][c]);
        }
      }
    }
  }

  SmallDot(const Product& p, const Weights& w, const float* x, int64_t padded, const float* sums, int64_t of_row)
      : p(p), w(w), x(x), padded(padded), of_x(of_row ? sums : nullptr), of_row(of_row) {}

  const Product& p;
  const Weights& w;
  const float* x;        // (m, padded)
  const int64_t padded;  // columns of x, whole groups
  const float* of_x;     // (m, of_row) sums of x, `lanes` a group; null without offsets
  const int64_t of_row;
};

}  // namespace eformer::EFORMER_ISA

// Reading groups of columns of one row, scaled where the format has scales inside the row.
#pragma once

#include <cstring>

#include "fp8.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

// The group that starts at column `first` of every row.
template <Format format>
class GroupReader {
 public:
  static constexpr int bytes = group_bytes<format>;

  GroupReader(const Weights& w, int64_t first) : w_(w), decoder_(w.table), byte_(w.byte_of<format>(first)) {
    available_ = w.row_bytes - byte_;
    if constexpr (blocked(format)) {
      base_ = first / w.block;
      one_block_ = base_ == (min(first + group_columns, w.cols) - 1) / w.block;
      by_lane_ = group_columns % w.block == 0 && w.block >= Decoder<format>::finest && !w.offset.data;
      if (by_lane_) spread_ = Spread(group_columns / w.block, min(group_columns / w.block, w.blocks - base_));
      if (one_block_ || by_lane_) return;
      for (int p = 0; p < group_columns; ++p) {
        const int64_t column = first + decoder_.order(p / lanes, p % lanes);
        offset_[p] = static_cast<int32_t>(min(column, w.cols - 1) / w.block - base_);
      }
    }
  }

  const uint8_t* codes(int64_t row) const { return w_.codes + row * w_.row_bytes + byte_; }

  // Of the first column.
  int64_t block() const { return base_; }

  // value[j] lane i is column order(j, i) of the group; `scales` are those of the row from `block()` on. Never reads past the
  // end of the row. With an offset an exact value is rounded after every operation, as the definition is, others once or
  // twice.
  template <bool exact = false>
  INLINE void read(int64_t row, [[maybe_unused]] const float* scales, F (&value)[4]) const {
    const uint8_t* from = codes(row);
    uint8_t padded[bytes];
    if (w_.packed<format>()) {
      store_bits(padded, w_.unpack.vector(from, from + available_));
      from = padded;
    } else if (available_ < bytes) [[unlikely]] {
      std::memset(padded, 0, bytes);
      std::memcpy(padded, from, available_);
      from = padded;
    }
    const auto group = decoder_.group(from);
    if constexpr (blocked(format)) {
      if (one_block_) [[likely]] {
        const F s = broadcast(*scales);
        if constexpr (takes_offsets(format)) {
          if (w_.offset.data) {
            if constexpr (exact) {
              const auto b = w_.beyond(row, base_);
              const F before = broadcast(b.before), after = broadcast(b.after);
              return scaled(group, value, [&](F v) { return rounded(v, before, s, after); });
            }
            const F b = broadcast(w_.added(row, base_, *scales));
            return scaled(group, value, [&](F v) { return fma(v, s, b); });
          }
        }
        return scaled(group, value, [&](F v) { return mul(v, s); });
      }
      if (by_lane_) [[likely]] {
        const F s = spread_(scales);
        unroll<4>([&]<int J>() { value[J] = mul(decoder_.template value<J>(group), s); });
        return;
      }
      float each[group_columns];
      for (int p = 0; p < group_columns; ++p) each[p] = scales[offset_[p]];
      if constexpr (takes_offsets(format)) {
        if (w_.offset.data) {
          float before[group_columns], after[group_columns];
          for (int p = 0; p < group_columns; ++p) {
            const auto b = w_.beyond(row, base_ + offset_[p]);
            before[p] = b.before, after[p] = b.after;
          }
          unroll<4>([&]<int J>() {
            constexpr int at = J * lanes;
            value[J] = rounded(decoder_.template value<J>(group), load(before + at), load(each + at), load(after + at));
          });
          return;
        }
      }
      unroll<4>([&]<int J>() { value[J] = mul(decoder_.template value<J>(group), load(each + J * lanes)); });
    } else {
      unroll<4>([&]<int J>() { value[J] = decoder_.template value<J>(group); });
    }
  }

 private:
  static INLINE F rounded(F v, F before, F s, F after) {
    F product = mul(add(v, before), s);
    keep_here(product);  // apart from the sum
    return add(product, after);
  }

  // All values of a group that are one block: of a table of values, its entries are changed instead.
  template <class Group, class Fn>
  INLINE void scaled(const Group& group, F (&value)[4], Fn&& f) const {
    if constexpr (format == Format::nf4) {
      const auto made = decoder_.map(f);
      unroll<4>([&]<int J>() { value[J] = made.template value<J>(group); });
    } else {
      unroll<4>([&]<int J>() { value[J] = f(decoder_.template value<J>(group)); });
    }
  }

  const Weights& w_;
  const Decoder<format> decoder_;
  const int64_t byte_;
  int64_t available_;
  // With blocks: the one of the first column, whether all columns share it, or those of a lane do, and if not where the
  // others are.
  int64_t base_ = 0;
  bool one_block_ = true, by_lane_ = false;
  Spread spread_{1};
  int32_t offset_[blocked(format) ? group_columns : 1];
};

// The scales of some blocks of some rows, one row after the other, from the block numbered `block` on.
struct ScaleRows {
  const float* first;
  int64_t step, block;

  // Of row r of these, what a reader of groups wants.
  template <class Reader>
  INLINE const float* at(int64_t r, const Reader& reader) const { return first + r * step + (reader.block() - block); }
};

// Blocks that columns of this number can touch.
inline int64_t most_blocks(const Matrix& d, int64_t columns) { return d.block ? min(d.blocks(), columns / d.block + 2) : 0; }

// Of rows k0 ... k0 + count - 1 and the blocks that hold columns begin ... end - 1; `room` is space for them.
template <Format format>
inline ScaleRows scale_rows(const Weights& w, int64_t k0, int64_t count, int64_t begin, int64_t end, float* room) {
  if constexpr (!blocked(format)) return {room, 0, 0};
  const int64_t block = begin / w.block, blocks = (end - 1) / w.block - block + 1, first = k0 * w.blocks + block;
  if (Weights::are_floats(w.per_block)) return {static_cast<const float*>(w.per_block.data) + first, w.blocks, block};
  read_scales(w.per_block, {first, blocks, count, w.blocks, w.rows * w.blocks}, room);
  return {room, blocks, block};
}

}  // namespace eformer::EFORMER_ISA

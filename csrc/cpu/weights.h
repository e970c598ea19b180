// D as the kernels read it: scales sorted by what they multiply, and in f32 but for those of blocks.
#pragma once

#include "memory.h"
#include "problem.h"
#include "rows.h"
#include "scalar.h"
#include "scales.h"
#include "unpack.h"

namespace eformer::EFORMER_ISA {

struct Weights {
  Format format;
  int table;
  Form form;
  const uint8_t* codes;
  int64_t row_bytes, rows, cols;
  int64_t block, blocks;
  Unpacker unpack;
  Scale per_block = {};                 // (rows, blocks), as stored
  const float* along_k = nullptr;       // one per contracted index: goes into x
  const float* along_n = nullptr;       // one per output: applied at the end
  float everywhere = 1;                 // applied at the end
  Offset offset = {};

  int64_t k() const { return form == Form::dot ? cols : rows; }
  int64_t n() const { return form == Form::dot ? rows : cols; }
  // Where column `col` of the first row is, and are its codes bytes only once they are unpacked?
  template <Format format>
  INLINE int64_t byte_of(int64_t col) const {
    if constexpr (format == Format::int8_block) return unpack.bytes(col);
    return col / per_byte(format);
  }
  template <Format format>
  INLINE bool packed() const { return format == Format::int8_block && unpack.bits() < 8; }
  // D of a block is (value + before) * scale + after.
  struct Beyond {
    float before, after;
  };
  INLINE Beyond beyond(int64_t row, int64_t block) const {
    const int64_t at = row * blocks + block;
    if (offset.is_zero) return {offset.half - static_cast<const uint8_t*>(offset.data)[at], 0};
    return {offset.half, load_as_f32(offset.data, offset.type, at)};
  }
  // The same as value * scale + added.
  INLINE float added(int64_t row, int64_t block, float scale) const {
    const Beyond b = beyond(row, block);
    return b.before * scale + b.after;
  }
  // For all blocks of a row, which have these scales.
  void add_row(int64_t row, const float* scales, float* to) const {
    if (offset.is_zero) {
      const uint8_t* zeros = static_cast<const uint8_t*>(offset.data) + row * blocks;
      for (int64_t b = 0; b < blocks; ++b) to[b] = (offset.half - static_cast<float>(zeros[b])) * scales[b];
    } else {
      read_row(offset.data, offset.type, row * blocks, blocks, nullptr, to);
      for (int64_t b = 0; b < blocks; ++b) to[b] += offset.half * scales[b];
    }
  }
  float at_end(int64_t j) const { return along_n ? along_n[j] * everywhere : everywhere; }

  // `count` scales of blocks: where they are, or as floats in `room`.
  INLINE const float* scales(int64_t first, int64_t count, float* room) const {
    if (are_floats(per_block)) return static_cast<const float*>(per_block.data) + first;
    read_scales(per_block, {first, count, 1, 0, rows * blocks}, room);
    return room;
  }
  static bool are_floats(const Scale& scale) { return scale.type == Type::f32 && !scale.factor; }
};

inline int64_t scale_count(const Matrix& d) {
  const int64_t cols = d.block ? d.blocks() : d.cols;
  return (d.scale.row_stride ? d.rows : 1) * (d.scale.col_stride ? cols : 1);
}

// Space for the scale in f32 where it is stored otherwise, unless it is one of blocks.
inline Slot<float> reserve_scale(Layout& layout, const Matrix& d) {
  return layout.add<float>(d.scale.data && !blocked(d.format) && !Weights::are_floats(d.scale) ? scale_count(d) + group_columns : 0);
}

// Space for the scales of so many blocks where they are stored otherwise.
inline Slot<float> reserve_scales(Layout& layout, const Matrix& d, int64_t blocks, int64_t workers) {
  return layout.add<float>(blocked(d.format) && !Weights::are_floats(d.scale) ? blocks + group_columns : 0, workers);
}

inline Weights weights_of(const Product& p, float* converted) {
  const Matrix& d = p.d;
  Weights w{d.format, d.table, p.form, d.codes, d.row_bytes, d.rows, d.cols, d.block, d.blocks(), Unpacker(d.bits)};
  if (!d.scale.data) return w;
  if (blocked(d.format)) {
    w.per_block = d.scale;
    w.offset = d.offset;
    return w;
  }
  const float* scale = static_cast<const float*>(d.scale.data);
  if (!Weights::are_floats(d.scale)) {
    read_scales(d.scale, {0, scale_count(d), 1, 0, scale_count(d)}, converted);
    scale = converted;
  }
  const bool by_row = d.scale.row_stride != 0, by_col = d.scale.col_stride != 0;
  if (by_row || by_col) {  // not both: a scale per element is left to `plain`
    (by_row == (p.form == Form::dot) ? w.along_n : w.along_k) = scale;
  } else {
    w.everywhere = *scale;
  }
  return w;
}

// -- rows of D that are read side by side, in the dot form ------------------------------------------------------------------

// Space for `step` rows of `padded` bytes where codes have to be unpacked first.
template <Format format>
inline Slot<uint8_t> reserve_rows(Layout& layout, const Matrix& d, int64_t step, int64_t padded, int64_t workers) {
  const bool packed = format == Format::int8_block && d.bits < 8;
  return layout.add<uint8_t>(packed ? step * padded : 0, workers);
}

// The codes and scales of rows n ... n + step - 1, the last one instead of rows beyond it; returns the bytes of a row.
// `numbers` is space for the scales of `step` rows.
template <Format format, int step>
INLINE int64_t rows_of(const Weights& w, int64_t n, int64_t padded, uint8_t* room, float* numbers,
                       const uint8_t* (&codes)[step], const float* (&scales)[step]) {
  const float* first = nullptr;
  if constexpr (blocked(format)) first = w.scales(n * w.blocks, min(step, w.rows - n) * w.blocks, numbers);
  for (int c = 0; c < step; ++c) {
    const int64_t row = min(n + c, w.rows - 1);
    codes[c] = w.codes + row * w.row_bytes;
    scales[c] = blocked(format) ? first + (row - n) * w.blocks : nullptr;
    if (w.packed<format>()) {
      w.unpack(codes[c], codes[c] + w.row_bytes, padded, room + c * padded);
      codes[c] = room + c * padded;
    }
  }
  return w.packed<format>() ? min(padded, w.blocks * w.block) : w.row_bytes;  // blocks that exist
}

// Rows side by side are one stretch of memory; ask for the stretch that comes about 32 KiB later. What has been unpacked
// is near already.
template <Format format, int step>
INLINE int64_t bytes_ahead(const Weights& w) {
  if (w.packed<format>()) return 0;
  const int64_t stretch = step * w.row_bytes;
  return max(1, 32768 / stretch) * stretch;
}

// The scales of the rows after these lie together; those of small blocks are lines enough to wait for. Asks for those that
// lie where the ones at work do, `count` blocks from `block` on in each of `step` rows.
template <int step>
INLINE void ask_for_scales(const Weights& w, int64_t n, int64_t block, int64_t count) {
  const int64_t size = static_cast<int64_t>(size_of(w.per_block.type)), bytes = step * count * size;
  const auto* after = static_cast<const std::byte*>(w.per_block.data) + ((n + step) * w.blocks + step * block) * size;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(after + i, 0, 2);
}

}  // namespace eformer::EFORMER_ISA

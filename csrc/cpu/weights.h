// D as the kernels read it: scales in f32 and sorted by what they multiply.
#pragma once

#include "memory.h"
#include "problem.h"
#include "rows.h"
#include "scalar.h"
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
  const float* per_block = nullptr;     // (rows, blocks)
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
  INLINE float added(int64_t row, int64_t block) const {
    const Beyond b = beyond(row, block);
    return b.before * per_block[row * blocks + block] + b.after;
  }
  // For all blocks of a row.
  void add_row(int64_t row, float* to) const {
    const float* scales = per_block + row * blocks;
    if (offset.is_zero) {
      const uint8_t* zeros = static_cast<const uint8_t*>(offset.data) + row * blocks;
      for (int64_t b = 0; b < blocks; ++b) to[b] = (offset.half - static_cast<float>(zeros[b])) * scales[b];
    } else {
      read_row(offset.data, offset.type, row * blocks, blocks, nullptr, to);
      for (int64_t b = 0; b < blocks; ++b) to[b] += offset.half * scales[b];
    }
  }
  float at_end(int64_t j) const { return along_n ? along_n[j] * everywhere : everywhere; }
};

inline int64_t scale_count(const Matrix& d) {
  const int64_t cols = d.block ? d.blocks() : d.cols;
  return (d.scale.row_stride ? d.rows : 1) * (d.scale.col_stride ? cols : 1);
}

// Space for the scale in f32 where it is stored otherwise.
inline Slot<float> reserve_scale(Layout& layout, const Matrix& d) {
  return layout.add<float>(d.scale.data && d.scale.type != Type::f32 ? scale_count(d) : 0);
}

inline Weights weights_of(const Product& p, float* converted) {
  const Matrix& d = p.d;
  Weights w{d.format, d.table, p.form, d.codes, d.row_bytes, d.rows, d.cols, d.block, d.blocks(), Unpacker(d.bits)};
  if (!d.scale.data) return w;
  const float* scale = static_cast<const float*>(d.scale.data);
  if (d.scale.type != Type::f32) {
    read_row(d.scale.data, d.scale.type, 0, scale_count(d), nullptr, converted);
    scale = converted;
  }
  const bool by_row = d.scale.row_stride != 0, by_col = d.scale.col_stride != 0;
  if (blocked(d.format)) {
    w.per_block = scale;
    w.offset = d.offset;
  } else if (by_row || by_col) {  // not both: a scale per element is left to `plain`
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
template <Format format, int step>
INLINE int64_t rows_of(const Weights& w, int64_t n, int64_t padded, uint8_t* room, const uint8_t* (&codes)[step],
                       const float* (&scales)[step]) {
  for (int c = 0; c < step; ++c) {
    const int64_t row = min(n + c, w.rows - 1);
    codes[c] = w.codes + row * w.row_bytes;
    scales[c] = blocked(format) ? w.per_block + row * w.blocks : nullptr;
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

}  // namespace eformer::EFORMER_ISA

// D as the kernels read it: scales in f32 and sorted by what they multiply.
#pragma once

#include "memory.h"
#include "problem.h"
#include "scalar.h"

namespace eformer::EFORMER_ISA {

struct Weights {
  Format format;
  int table;
  Form form;
  const uint8_t* codes;
  int64_t row_bytes, rows, cols;
  int64_t block, blocks;
  const float* per_block = nullptr;     // (rows, blocks)
  const float* along_k = nullptr;       // one per contracted index: goes into x
  const float* along_n = nullptr;       // one per output: applied at the end
  float everywhere = 1;                 // applied at the end

  int64_t k() const { return form == Form::dot ? cols : rows; }
  int64_t n() const { return form == Form::dot ? rows : cols; }
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
  Weights w{d.format, d.table, p.form, d.codes, d.row_bytes, d.rows, d.cols, d.block, d.blocks()};
  if (!d.scale.data) return w;
  const float* scale = static_cast<const float*>(d.scale.data);
  if (d.scale.type != Type::f32) {
    const int64_t count = scale_count(d);
    for (int64_t i = 0; i < count; ++i) converted[i] = load_as_f32(d.scale.data, d.scale.type, i);
    scale = converted;
  }
  const bool by_row = d.scale.row_stride != 0, by_col = d.scale.col_stride != 0;
  if (blocked(d.format)) {
    w.per_block = scale;
  } else if (by_row || by_col) {  // not both: a scale per element is left to `plain`
    (by_row == (p.form == Form::dot) ? w.along_n : w.along_k) = scale;
  } else {
    w.everywhere = *scale;
  }
  return w;
}

}  // namespace eformer::EFORMER_ISA

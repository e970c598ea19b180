// What a quantized product is, in plain C++: sizes, pointers and strides, no template and no vector type.
//
// D is the decoded matrix of `rows` x `cols`, stored row by row with the packed axis last.
//   dot form:   y = x @ D.T    x (m, cols) -> y (m, rows)
//   axpy form:  y = x @ D      x (m, rows) -> y (m, cols)
#pragma once

#include <cstddef>
#include <cstdint>

namespace eformer {

// In the order of the table in _kernels/formats.py. Formats of four bits are nf4 with another table, int2 to int6 are
// int8_block with fewer bits; the kernels know the others.
enum class Format : int64_t {
  nf4, int8, ternary, binary, int4, iq4_nl, fp4, int8_block, fp8_e4m3, fp8_e5m2, fp8_e4m3_block, fp8_e5m2_block,
  int2, int3, int5, int6
};
constexpr int64_t format_count = 16;
enum class Form : int64_t { dot, axpy };
// The last two are bytes, and types of scales only: an exponent (255 is NaN), a small float.
enum class Type : int64_t { f32, bf16, f16, e8m0, e4m3 };

constexpr bool in_bytes(Type type) { return type == Type::e8m0 || type == Type::e4m3; }
constexpr size_t size_of(Type type) { return type == Type::f32 ? 4 : in_bytes(type) ? 1 : 2; }

// Values per byte of codes.
constexpr int64_t per_byte(Format format) {
  switch (format) {
    case Format::nf4: return 2;
    case Format::ternary: return 4;
    case Format::binary: return 8;
    default: return 1;
  }
}

// Is there a scale per block of columns?
constexpr bool blocked(Format format) {
  return format == Format::nf4 || format == Format::int8_block || format == Format::fp8_e4m3_block ||
         format == Format::fp8_e5m2_block;
}

// One number per element of D (per block of columns where there are blocks), repeated along an axis whose stride is 0.
// `data` is null when there is no scale. Where `factor` is not null, every scale is the number times that, rounded.
struct Scale {
  const void* data = nullptr;
  Type type = Type::f32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  const float* factor = nullptr;
};

// Zero points (bytes) or biases of blocks, laid out as their scales: D = (code - zero) * scale or code * scale + bias, codes
// counted from 0. Decoded values are code - half. `data` is null where D is symmetric, the values times their scales.
struct Offset {
  const void* data = nullptr;
  bool is_zero = false;
  Type type = Type::f32;  // of a bias
  float half = 0;

  size_t size() const { return is_zero ? 1 : size_of(type); }
  Offset moved(int64_t bytes) const {
    return {data ? static_cast<const std::byte*>(data) + bytes : nullptr, is_zero, type, half};
  }
};

// Do integers in blocks, which may have an offset, come as this format?
constexpr bool takes_offsets(Format format) { return format == Format::nf4 || format == Format::int8_block; }

struct Matrix {
  Format format;
  int table;  // nf4: which table of 16 values
  int bits;   // int8_block: of a stored code
  const uint8_t* codes;
  Scale scale;
  Offset offset;
  int64_t rows;
  int64_t cols;
  int64_t block;      // columns per scale, even; 0 without blocks
  int64_t row_bytes;  // distance of two rows of codes

  int64_t blocks() const { return block ? (cols + block - 1) / block : 0; }
};

struct Product {
  Form form;
  const void* x;
  Type x_type;
  Matrix d;
  void* y;
  Type y_type;
  int64_t m;

  int64_t k() const { return form == Form::dot ? d.cols : d.rows; }
  int64_t n() const { return form == Form::dot ? d.rows : d.cols; }
};

// A product whose x is rounded to 8 bits, with the given scale of each row or, where that is null, its own.
struct ByteProduct : Product {
  const float* x_scale;
};

// Products of two bytes, the one of x at most 127, whose sum fits 32 bits.
constexpr int64_t most_byte_products = int64_t{1} << 17;

// Can x be rounded? All that is summed up must share a scale, or blocks fit the panels of the kernels. Values packed along
// the outputs are left to others.
constexpr bool has_byte_product(const Matrix& d, Form form) {
  const int64_t lane = 4 * per_byte(d.format), panel = 256;
  switch (d.format) {
    case Format::nf4:
    case Format::int8_block: return form == Form::dot && d.block % lane == 0 && (panel % d.block == 0 || d.block % panel == 0);
    case Format::int8: return (form == Form::dot ? d.scale.col_stride : d.scale.row_stride) == 0;
    case Format::ternary:
    case Format::binary: return form == Form::dot && d.scale.col_stride == 0;
    default: return false;
  }
}

struct Gather {
  Matrix d;
  const int32_t* indices;
  int64_t count;
  void* out;  // (count, d.cols)
  Type type;
};

struct Encode {
  const void* x;  // (rows, cols)
  Type type;
  int64_t rows;
  int64_t cols;
  int64_t block;
  uint8_t* codes;  // (rows, blocks, block / 2)
  float* absmax;   // (rows, blocks)
};

}  // namespace eformer

// What the handlers know of the kernels: plain functions that put work on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace eformer {

// Which of several groups of `count` matrices, one behind the other, are meant: group *index. Null: there is one group.
// The number is read on the device, where the loop of a program over its layers has it.
struct Stack {
  const int32_t* index;
  int32_t groups, count;
};

// Matrices as they are stored; see src/eformer/_kernels/formats.py for the layout.
struct Matrices {
  // 0 nf4, 1 int8, 2 ternary, 3 binary, 4 int4, 5 iq4_nl, 6 fp4, 8 fp8_e4m3, 9 fp8_e5m2; in blocks 7 int8, 10 fp8_e4m3,
  // 11 fp8_e5m2, 12 int2, 13 int3, 14 int5, 15 int6
  int fmt;
  int64_t count, rows, cols, row_bytes;
  int block;  // 0 where there are none
  const uint8_t* codes;
  const uint8_t* scale;  // null without one
  int scale_dtype;
  int64_t scale_rows, scale_cols;
  // One for every scale of a block, or null: bytes, values are (code - zero) * scale, or floats, code * scale + bias.
  // Without one they are (code - centre) * scale.
  const uint8_t* offset;
  int offset_dtype;  // as of scales; 3 for zero points, which are bytes
  float centre;
  Stack stack;
};

inline uint64_t stored_in(const Matrices& d) { return static_cast<uint64_t>(d.count * (d.stack.index ? d.stack.groups : 1)); }

inline bool in_nibbles(int64_t fmt) { return fmt == 0 || (fmt >= 4 && fmt <= 6); }
inline bool in_blocks(int64_t fmt) { return in_nibbles(fmt) || fmt == 7 || fmt >= 10; }

struct Product {
  Matrices d;
  const uint8_t* x;
  int x_dtype;
  int64_t m;
  void* y;
  int y_dtype;
  float* partial;         // splits * count * m * rows floats when splits > 1
  const int32_t* groups;  // rows of x per matrix; null unless ragged
  int tiles, splits;      // rows of D per block / 16, ways the columns are split
};

struct Rows {
  Matrices d;
  const int32_t* indices;  // null for all rows in order
  int64_t n;
  void* y;
  int y_dtype;
};

// Return a CUDA error, or cudaErrorNotSupported where no kernel takes the sizes.
cudaError_t multiply_bf16(cudaStream_t stream, const Product& p);
cudaError_t multiply_f16(cudaStream_t stream, const Product& p);
cudaError_t decode_rows(cudaStream_t stream, const Rows& r);

// For more rows of x, on Hopper. Outs are the rows of y.T: rows of D (dot form) or columns (axpy form).
struct WideProduct {
  Product p;        // splits as there, without memory for partial sums
  int axpy;         // 1 for the axpy form
  int width, outs;  // rows of x and outs per block; without rows, the kernel for few of them, which finds its own cut
  int rest, rest_splits;  // tiles that are launched behind the others, and their splits
};
cudaError_t multiply_wide_bf16(cudaStream_t stream, const WideProduct& w);
cudaError_t multiply_wide_f16(cudaStream_t stream, const WideProduct& w);
// The same for matrices of any size, without `outs` and `rest`; values of 4 bits are rounded to the type of x.
cudaError_t multiply_odd(cudaStream_t stream, const WideProduct& w);

// Codes of 8 bits on both sides: rows of x are rounded, then multiplied, on Hopper or elsewhere.
struct RoundedRows {
  const void* x;
  int x_dtype;
  int64_t rows, cols, pitch;  // bytes from row to row of the codes, a multiple of 16
  int floats;                 // codes are e4m3, not integers
  const float* given;         // scales; null where they are found
  uint8_t* codes;
  float* scale;
};
cudaError_t round_rows(cudaStream_t stream, const RoundedRows& r);

struct BytesProduct {
  Matrices d;
  const uint8_t* x;  // codes
  const float* x_scale;
  int64_t m, x_pitch;
  void* y;
  int y_dtype;
  int axpy, width, splits;  // rows of x per block, blocks that share a tile
  uint32_t* sums;           // elsewhere than on Hopper: splits * count * m * outs when splits > 1
};
cudaError_t multiply_bytes(cudaStream_t stream, const BytesProduct& p);
cudaError_t multiply_tiles(cudaStream_t stream, const BytesProduct& p);

// One token over a cache whose rows are codes of 8 bits with a float32 scale each, or of 4 bits with a bfloat16 scale for
// every 64. The stack is one of heads: `stack.count` of them for every entry.
struct CacheAttention {
  const void* q;  // (heads, group, size), or at the beginning of a row of all that the token has: see `row`
  void* y;
  int dtype;
  const void *new_keys, *new_values;  // (heads, size): the token's own rows, which are written at its place; or null
  // Where q, new_keys and new_values are parts of one array: how many values a text has in it, and heads of it; else 0.
  int64_t row;
  int heads_of_row;
  const float *cosines, *sines;  // (size / 2): q and new_keys are turned by these angles first; or null
  int halves;                    // a pair is (i, i + size / 2), not (2i, 2i + 1)
  uint8_t *keys, *values, *key_scale, *value_scale;
  int key_bits, value_bits;
  const int32_t* place;  // the token's own, the last one that is seen
  Stack stack;
  int group, size, padded, positions;
  int window;  // 0: none
  float factor, cap;
  int splits;  // blocks that share a head, found when it is launched
};
cudaError_t attend(cudaStream_t stream, const CacheAttention& a);

}  // namespace eformer

// Rows of x as 8-bit codes: c = round(x / s) to the nearest, ties to even, s a given scale or max|x| / 127 (see
// _kernels/activations.py). A row that is not finite has the scale NaN and codes 0, so that its results are NaN.
#pragma once

#include "problem.h"
#include "rows.h"
#include "simd/bytes.h"

namespace eformer::EFORMER_ISA {

// What sums of products with a row of x are multiplied with: by `first`, then by `then` times the scale of the output. The
// scale of the row comes first where it is so small that the product of both scales might not be normal.
struct RowFactors {
  float first, then;

  static RowFactors of(float s, float unit, bool in_blocks) {
    if (in_blocks) return {unit, s};
    return s < 0x1p-64f ? RowFactors{s, 1} : RowFactors{1, s};
  }
};

class ByteRow {
 public:
  // Writes `count` codes, then zeros up to `padded`; returns the scale.
  static float read(const ByteProduct& p, int64_t row, int64_t padded, int8_t* codes) {
    const int64_t count = p.k(), first = row * count;
    float s = p.x_scale ? p.x_scale[row] : 0;
    const uint32_t most = magnitude(p, first, count);
    if (most >= 0x7f800000) s = bit_cast<float>(0x7fc00000u);
    else if (!p.x_scale) s = largest_of(bit_cast<float>(most) / 127, 0x1p-126f);
    const bool none = s == 0 || s != s;
    if (none) std::memset(codes, 0, count);
    else encode(p, first, count, s, codes);
    std::memset(codes + count, 0, padded - count);
    return s;
  }

 private:
  static constexpr int64_t some = 256;
  static float largest_of(float a, float b) { return a > b ? a : b; }

  static uint32_t magnitude(const ByteProduct& p, int64_t first, int64_t count) {
    I most = broadcast_bits(0);
    for (int64_t i = 0; i < count; i += some) {
      alignas(64) float part[some];
      const int64_t here = read_some(p, first + i, count - i, part);
      for (int64_t j = 0; j < here; j += lanes) most = larger(most, bit_and(as_bits(load(part + j)), broadcast_bits(0x7fffffff)));
    }
    return largest(most);
  }

  static void encode(const ByteProduct& p, int64_t first, int64_t count, float s, int8_t* codes) {
    const F divisor = broadcast(s), round = broadcast(12582912.0f);  // 1.5 * 2^23: the last bit stands for 1
    for (int64_t i = 0; i < count; i += some) {
      alignas(64) float part[some];
      int8_t bytes[some];
      const int64_t here = read_some(p, first + i, count - i, part);
      for (int64_t j = 0; j < here; j += lanes)
        store_low_bytes(bytes + j, as_bits(add(clamp(divide(load(part + j), divisor), 127), round)));
      std::memcpy(codes + i, bytes, min(some, count - i));
    }
  }

  // At most `some` values, and zeros up to a whole vector; returns how many there are then.
  static int64_t read_some(const ByteProduct& p, int64_t first, int64_t left, float* part) {
    const int64_t count = min(some, left), padded = round_up(count, lanes);
    read_row(p.x, p.x_type, first, count, nullptr, part);
    for (int64_t j = count; j < padded; ++j) part[j] = 0;
    return padded;
  }
};

// Sorts codes by fields: field j of byte b, value b * fields + j, goes to [j][b].
template <int fields>
inline void sort_fields(const int8_t* codes, int64_t bytes, int8_t* sorted) {
  for (int j = 0; j < fields; ++j)
    for (int64_t b = 0; b < bytes; ++b) sorted[j * bytes + b] = codes[b * fields + j];
}

// What weights with this excess add to a sum of products with these codes, with its sign turned; modulo 2^32.
inline uint32_t without_excess(int excess, const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  if (excess)
    for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return 0u - static_cast<uint32_t>(excess) * static_cast<uint32_t>(sum);
}

}  // namespace eformer::EFORMER_ISA

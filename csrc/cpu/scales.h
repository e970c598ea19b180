// Scales as they are stored: to f32, some at a time, where they are used.
#pragma once

#include "fp8.h"
#include "rows.h"

namespace eformer::EFORMER_ISA {

// The byte moved to the exponent; of 0, 2^-127, and 255, NaN, the highest bit of the mantissa is set. No arithmetic on
// floats, which would take 2^-127 for zero.
INLINE F from_e8m0(I code) {
  const I bits = shift_left<23>(code), one = broadcast_bits(1u << 23), half = broadcast_bits(1u << 22);
  return where_less(add_bits(bits, one), add_bits(one, one), as_floats(bit_or(bits, half)), as_floats(bits));
}

// Scales of neighbouring blocks in some rows.
struct ScaleRange {
  int64_t first, count;  // the number of the first of all, how many there are in each row
  int64_t rows, step;    // step: from one row to the next
  int64_t all;           // of the matrix
};

// Row by row, one after the other. In `to` is room for a group of columns more: scales are read in whole vectors where
// those exist, and what is written behind the end of a row is written over by the next one.
[[gnu::noinline]] inline void read_scales(const Scale& scale, const ScaleRange& range, float* to) {
  const float factor = scale.factor ? *scale.factor : 1;
  const float* values = values_of_bytes(scale.type);
  const int64_t size = static_cast<int64_t>(size_of(scale.type)), count = range.count;
  using Codes = Decoder<Format::fp8_e4m3>;
  const Codes decoder(0);
  for (int64_t r = 0; r < range.rows; ++r, to += count) {
    const int64_t first = range.first + r * range.step, readable = range.all - first;
    const uint8_t* from = static_cast<const uint8_t*>(scale.data) + first * size;
    if (range.rows > 1)  // no hardware prefetcher follows rows that are far apart
      for (int64_t b = 0; b < count * size; b += 64) __builtin_prefetch(from + range.rows * range.step * size + b, 0, 2);
    int64_t i = 0;
    if (scale.type == Type::e4m3) {
      constexpr int few = 8;  // are quicker one by one
      for (; i + few <= count && i + group_columns <= readable; i += group_columns) {
        const auto group = decoder.group(from + i);
        F value[4];
        unroll<4>([&]<int J>() { value[J] = decoder.template value<J>(group); });
        Codes::sort(value);
        for (int j = 0; j < 4; ++j) store(to + i + j * lanes, mul(value[j], broadcast(factor)));
      }
      for (; i < count; ++i) to[i] = values[from[i]] * factor;
      continue;
    }
    if (scale.type == Type::e8m0) {
      for (; i < count && i + lanes <= readable; i += lanes) store(to + i, from_e8m0(widen_u8(from + i)));
      for (; i < count; ++i) to[i] = values[from[i]];
    } else {
      read_row(scale.data, scale.type, first, count, nullptr, to);
    }
    for (i = 0; scale.factor && i < count; ++i) to[i] *= factor;
  }
}

}  // namespace eformer::EFORMER_ISA

// Panels of bf16 pairs for the engine that multiplies bf16: two neighbouring k in one dword, the even one in the low half.
//
// A float is the sum of up to three bf16: its leading 8 bits, the next 8, the last 8. INT8, ternary and binary values need
// one part, so a product of f32 precision takes only the three parts of x.
#pragma once

#include "panel.h"
#include "simd/simd.h"

namespace eformer::EFORMER_ISA {

INLINE F leading_part(F v) { return as_floats(bit_and(as_bits(v), broadcast_bits(0xffff0000))); }

// Panel [part][k / 2][position].
template <int parts, int panel_depth>
struct PairSink {
  static constexpr int part_size = panel_depth / 2 * tile;

  uint32_t* panel;

  INLINE void put(int64_t k, int at, F even, F odd) const {
    uint32_t* to = panel + k / 2 * tile + at;
    for (int part = 0; part < parts; ++part) {
      const I low = shift_right<16>(as_bits(even)), high = bit_and(as_bits(odd), broadcast_bits(0xffff0000));
      store_bits(to + part * part_size, bit_or(low, high));
      even = sub(even, leading_part(even));
      odd = sub(odd, leading_part(odd));
    }
  }

  // Zeros from k = count up to a multiple of `step`.
  void pad(int64_t count, int step) const {
    for (int part = 0; part < parts; ++part) {
      uint32_t* rows = panel + part * part_size;
      if (count % 2)
        for (int at = 0; at < tile; ++at) rows[count / 2 * tile + at] &= 0xffff;
      for (int64_t i = (count + 1) / 2 * tile; i < round_up(count, step) / 2 * tile; ++i) rows[i] = 0;
    }
  }
};

}  // namespace eformer::EFORMER_ISA

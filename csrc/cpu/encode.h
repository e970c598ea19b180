// NF4 quantization, bit for bit what the Python codec does: absmax per block, then the nearest code of x * (1 / absmax).
#pragma once

#include <cstring>

#include "memory.h"
#include "rows.h"

namespace eformer::EFORMER_ISA {

class Nf4Encoder {
 public:
  static void run(const Encode& e, Runtime& runtime) {
    const Nf4Encoder encoder(e);
    const int64_t blocks = e.rows * encoder.blocks_;
    const int64_t chunk = max(1, 65536 / e.block);
    Layout layout;
    const auto values = layout.add<float>(round_up(e.block, lanes), runtime.workers());
    const auto codes = layout.add<uint8_t>(round_up(e.block, lanes), runtime.workers());
    std::byte* base = runtime.scratch(layout.bytes);
    for_each(runtime, ceil_div(blocks, chunk), [&](int64_t c, int64_t worker) {
      int64_t row = c * chunk / encoder.blocks_, column = c * chunk % encoder.blocks_ * e.block;
      for (int64_t b = c * chunk; b < min(blocks, (c + 1) * chunk); ++b) {
        encoder.block(b, row, column, values.in(base, worker), codes.in(base, worker));
        if ((column += e.block) >= e.cols) ++row, column = 0;
      }
    });
  }

 private:
  explicit Nf4Encoder(const Encode& e) : e_(e), blocks_(ceil_div(e.cols, e.block)) {
    // Bisection: the threshold to compare with after the first 0, 1, 2, 3 bits of the code are known.
    for (int level = 0; level < 4; ++level) {
      float at[16] = {};
      for (int prefix = 0; prefix < 1 << level; ++prefix) {
        const int below = (prefix << (4 - level)) + (8 >> level) - 1;
        at[prefix] = (nf4_codebook[below] + nf4_codebook[below + 1]) / 2;
      }
      thresholds_[level] = Table16::of(at);
    }
  }

  // Block b of all, `values` and `codes` being space for one padded to whole vectors.
  void block(int64_t b, int64_t row, int64_t column, float* values, uint8_t* codes) const {
    const int64_t first = row * e_.cols + column, count = min(e_.block, e_.cols - column);
    const int64_t width = round_up(e_.block, lanes);
    const float* x = static_cast<const float*>(e_.x) + first;
    if (e_.type != Type::f32 || count < width) {
      read_row(e_.x, e_.type, first, count, nullptr, values);
      for (int64_t i = count; i < width; ++i) values[i] = 0;
      x = values;
    }
    // Magnitudes are ordered as their bits are; NaN and infinity are above everything.
    const uint32_t bits = largest_magnitude(x, width);
    const float absmax = bits >= 0x7f800000 ? __builtin_nanf("") : bits < 0x00800000 ? 0 : bit_cast<float>(bits);
    // Above 2**126 the reciprocal is subnormal, which a machine may flush to zero.
    const float shrink = absmax > 0x1p120f ? 0x1p-16f : 1;
    const F inverse = broadcast(1 / (absmax == 0 ? 1 : absmax * shrink));
    e_.absmax[b] = absmax;
    uint8_t* out = e_.codes + b * (e_.block / 2);
    uint8_t* to = width == e_.block ? out : codes;
    for (int64_t i = 0; i < width; i += lanes)
      store_nibbles(to + i / 2, nearest(mul(mul(load(x + i), broadcast(shrink)), inverse)));
    if (to != out) std::memcpy(out, to, e_.block / 2);
  }

  static uint32_t largest_magnitude(const float* x, int64_t count) {
    I most = broadcast_bits(0);
    for (int64_t i = 0; i < count; i += lanes)
      most = larger(most, bit_and(as_bits(load(x + i)), broadcast_bits(0x7fffffff)));
    return largest(most);
  }

  // How many thresholds lie below x; 0 for NaN.
  INLINE I nearest(F x) const {
    I code = broadcast_bits(0);
    for (int level = 0; level < 4; ++level)
      code = add_if_greater(add_bits(code, code), x, thresholds_[level].at(code));
    return code;
  }

  const Encode& e_;
  const int64_t blocks_;
  Table16 thresholds_[4];
};

}  // namespace eformer::EFORMER_ISA

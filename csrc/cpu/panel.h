// Decoding a panel of D, some contracted indices (k) by `tile` outputs (n), for an engine.
//
// Where rows of D run along the outputs (axpy form), the columns inside a group keep the order in which they fall out of
// the codes; `sort_group` undoes it at the end. A Sink takes the vectors of two neighbouring k at a time:
// put(k, position, even, odd), k even, position a multiple of `lanes` below `tile`.
#pragma once

#include <cstring>

#include "fp8.h"
#include "groups.h"
#include "weights.h"

namespace eformer::EFORMER_ISA {

constexpr int tile = 64;

// -- dot form: outputs are rows of D ---------------------------------------------------------------------------------
//
// Packed dwords are transposed, not floats: [dword of k][output].

// Room for panels of `depth` contracted indices.
template <Format format, int depth>
struct DotStage {
  static constexpr int per_dword = Decoder<format>::per_dword;
  // Contracted indices per stage. Transposing pays from 16 dwords on, a cache line of codes.
  static constexpr int span = per_dword * 16 > depth ? per_dword * 16 : depth;
  static constexpr int dwords = span / per_dword;
  static constexpr int most_blocks = blocked(format) ? depth / 2 + 1 : 0;  // blocks a panel can touch

  alignas(64) uint32_t bits[dwords * tile + 1];  // one more, to be read at any byte
  alignas(64) uint8_t padded[tile * dwords * 4];
  alignas(64) float scales[most_blocks * tile + 1];
  alignas(64) float added[takes_offsets(format) ? most_blocks * tile + 1 : 1];
};

// What will be staged next. Its rows are far apart, which no hardware prefetcher follows, so they are asked for; but little by
// little, while the product goes on: all at once they keep everything else waiting.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const uint8_t* first, int64_t step, int64_t bytes, int64_t rows)
      : at_(first), step_(step), bytes_(bytes), left_(rows) {}
  // A line of 64 bytes.
  INLINE void ask_for_one() {
    if (left_ == 0) return;
    __builtin_prefetch(at_ + of_row_, 0, 2);
    if ((of_row_ += 64) >= bytes_) at_ += step_, of_row_ = 0, --left_;
  }
  void ask_for_all() {
    while (left_) ask_for_one();
  }

 private:
  const uint8_t* at_ = nullptr;
  int64_t step_ = 0, bytes_ = 0, left_ = 0, of_row_ = 0;
};

// The stage after that of outputs n0 ... and contracted indices k0 ...: of the same indices and the next outputs until `end`,
// then of the next indices and the outputs from `begin` on.
template <Format format, int span>
inline RowsAhead rows_ahead(const Weights& w, int64_t n0, int64_t k0, int64_t begin, int64_t end) {
  const bool last = n0 + tile >= end;
  const int64_t n = last ? begin : n0 + tile, k = last ? k0 + span : k0;
  return {w.codes + n * w.row_bytes + w.byte_of<format>(k), w.row_bytes, w.byte_of<format>(span), tile};
}

// Fills stage.bits for outputs n0... and contracted indices k0... (a multiple of span).
template <Format format, int depth>
inline void stage_codes(const Weights& w, int64_t n0, int64_t k0, DotStage<format, depth>& stage) {
  constexpr int dwords = DotStage<format, depth>::dwords, bytes = dwords * 4;
  const int64_t first = w.byte_of<format>(k0);
  const uint8_t* from = w.codes + n0 * w.row_bytes + first;
  int64_t step = w.row_bytes;
  if (w.packed<format>()) {
    const int64_t rows = min(tile, w.rows - n0);
    for (int64_t r = 0; r < rows; ++r, from += step) w.unpack(from, from - first + step, bytes, stage.padded + r * bytes);
    from = stage.padded;
    step = bytes;
  } else if (n0 + tile > w.rows || first + bytes > w.row_bytes) {
    const int64_t rows = min(tile, w.rows - n0), count = min(bytes, w.row_bytes - first);
    std::memset(stage.padded, 0, sizeof stage.padded);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(stage.padded + r * bytes, from + r * step, count);
    from = stage.padded;
    step = bytes;
  }
  for (int n = 0; n < tile; n += lanes)
    for (int d = 0; d < dwords; d += lanes) transpose(from + n * step + d * 4, step, stage.bits + d * tile + n, tile);
}

// Fills stage.scales and, with offsets, stage.added, [block][output], for the blocks that k0 ... k0 + count - 1 touch.
template <Format format, int depth>
inline void stage_scales(const Weights& w, int64_t n0, int64_t k0, int64_t count, DotStage<format, depth>& stage) {
  const int64_t first = k0 / w.block, blocks = (k0 + count - 1) / w.block - first + 1;
  const int64_t outputs = min(tile, w.rows - n0);
  const auto fill = [&](float* to, const auto* data, auto&& number) {
    for (int64_t n = 0; n < outputs; ++n) {
      const auto* from = data + (n0 + n) * w.blocks + first;
      __builtin_prefetch(from + 64 / sizeof *from);  // of the next panels
      for (int64_t b = 0; b < blocks; ++b) to[b * tile + n] = number(from[b]);
    }
  };
  as_numbers(w.per_block.data, w.per_block.type, [&](const auto* data, auto&& number) { fill(stage.scales, data, number); });
  if (w.per_block.factor) {
    const F factor = broadcast(*w.per_block.factor);
    for (int64_t at = 0; at < blocks * tile; at += lanes) store(stage.scales + at, mul(load(stage.scales + at), factor));
  }
  if constexpr (takes_offsets(format)) {
    if (!w.offset.data) return;
    if (w.offset.is_zero) {
      fill(stage.added, static_cast<const uint8_t*>(w.offset.data), [](uint8_t zero) { return static_cast<float>(zero); });
    } else {
      as_numbers(w.offset.data, w.offset.type, [&](const auto* data, auto&& number) { fill(stage.added, data, number); });
    }
    const F half = broadcast(w.offset.half);
    for (int64_t at = 0; at < blocks * tile; at += lanes) {
      const F s = load(stage.scales + at), number = load(stage.added + at);
      store(stage.added + at, w.offset.is_zero ? mul(sub(half, number), s) : fma(half, s, number));
    }
  }
}

// Decodes k0 ... k0 + count - 1 out of the stage, whose first index is stage_k.
template <bool offset, Format format, int depth, class Sink>
inline void decode_dot(const Weights& w, const DotStage<format, depth>& stage, int64_t stage_k, int64_t k0,
                       int64_t count, const Sink& sink) {
  constexpr int per_dword = Decoder<format>::per_dword;
  constexpr int vectors = registers == 32 ? 4 : 2;  // side by side, so that their latencies overlap
  const Decoder<format> decoder(w.table);
  for (int n = 0; n < tile; n += vectors * lanes) {
    const uint32_t* bits = stage.bits + (k0 - stage_k) / per_dword * tile + n;
    const float* scales = stage.scales + n;
    [[maybe_unused]] const float* added = stage.added + (offset ? n : 0);
    int64_t left = blocked(format) ? w.block - k0 % w.block : 0;
    for (int64_t k = 0; k < count; k += per_dword, bits += tile) {
      I g[vectors];
      for (int v = 0; v < vectors; ++v) g[v] = load_bits(bits + v * lanes);
      unroll<per_dword / 2>([&]<int P>() {
        for (int v = 0; v < vectors; ++v) {
          F even = decoder.template value<2 * P>(g[v]), odd = decoder.template value<2 * P + 1>(g[v]);
          if constexpr (blocked(format)) {
            const F s = load(scales + v * lanes);
            if constexpr (offset) {
              const F b = load(added + v * lanes);
              even = fma(even, s, b), odd = fma(odd, s, b);
            } else {
              even = mul(even, s), odd = mul(odd, s);
            }
          }
          sink.put(k + 2 * P, n + v * lanes, even, odd);
        }
        if constexpr (blocked(format)) {
          if ((left -= 2) == 0) {  // blocks are even
            scales += tile, left = w.block;
            if constexpr (offset) added += tile;
          }
        }
      });
    }
  }
}

// -- axpy form: outputs are columns of D -----------------------------------------------------------------------------

// Decodes rows k0 ... k0 + count - 1 of the columns n0 ... n0 + tile - 1.
template <Format format, int depth, class Sink>
inline void decode_axpy(const Weights& w, int64_t n0, int64_t k0, int64_t count, const ScaleRows& scales, const Sink& sink) {
  for (int g = 0; g < tile && n0 + g < w.cols; g += group_columns) {
    const GroupReader<format> reader(w, n0 + g);
    for (int64_t k = 0; k < count; k += 2) {
      F even[4], odd[4] = {zero(), zero(), zero(), zero()};
      __builtin_prefetch(reader.codes(k0 + k + depth), 0, 2);
      __builtin_prefetch(reader.codes(k0 + k + depth + 1), 0, 2);
      reader.read(k0 + k, scales.at(k, reader), even);
      if (k + 1 < count) reader.read(k0 + k + 1, scales.at(k + 1, reader), odd);
      for (int j = 0; j < 4; ++j) sink.put(k, g + j * lanes, even[j], odd[j]);
    }
  }
}

}  // namespace eformer::EFORMER_ISA

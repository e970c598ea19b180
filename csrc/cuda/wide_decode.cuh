// Codes in shared memory to the left operand of `wgmma`: 64 rows of weights, 16 columns per instruction, in registers.
//
// A lane (g = lane / 4, t = lane % 4) of warp w holds, of the rows 16 w + g and 16 w + g + 8, the columns (2t, 2t + 1)
// and (2t + 8, 2t + 9), in this order of registers: first row, second row, first row + 8 columns, second row + 8 columns.
// x is the other operand and lies in shared memory in its natural order, so the order of the columns is given.
//
// A decoder fills the 16 registers of one step: 64 columns of one tile of 64 rows, or (axpy form) 32 of two tiles. It
// first loads stored words, which is worth doing a step ahead.
#pragma once

#include "decode.cuh"
#include "parts.h"
#include "wide_mma.cuh"

namespace eformer {

// NF4 is looked up in f16, rounded in eight ways (books.h), where the result has 16 bits.
template <int FMT, class E, int TERMS>
constexpr bool kRough = FMT == kNf4 && TERMS == 1 && item_kind<E> == kBf16;
// Four bytes for a pair: the rows of the table follow each other, 128 bytes apart.
template <int FMT, class E, int TERMS>
constexpr bool kNarrow = kInNibbles<FMT> && (!kInFloat32<FMT> || kRough<FMT, E, TERMS>);

// What a stage of codes is. `outs` are the rows of y.T, `deep` the axis that is summed over. SIDES warpgroups have outs of
// their own, D of them share the same outs and take turns with the depth.
template <int FMT, int FORM, int SIDES, int D, int TILES>
struct WideStage {
  static constexpr int kPerByte = eformer::kPerByte<FMT>;
  static constexpr int kTiles = TILES;                 // of 64 outs, per warpgroup
  static constexpr int kOuts = 64 * kTiles;            // of a warpgroup
  static constexpr int kAllOuts = SIDES * kOuts;
  static constexpr int kDeep = (FORM == kAxpy && D < 4 && D <= kTiles) || (kInBytes<FMT> && D == 1) ? 128 : 256;
  static constexpr int kXStages = kDeep / 64;
  static constexpr int kSteps = kTiles;  // per 64 columns of x
  static constexpr int kRowBytes = (FORM == kDot ? kDeep : kAllOuts) / kPerByte;  // of a stored row
  static constexpr int kBoxBytes = kRowBytes < 128 ? kRowBytes : 128;
  static constexpr int kBoxes = kRowBytes / kBoxBytes, kBoxRows = FORM == kDot ? kAllOuts : kDeep;
  static constexpr int kBytes = kBoxRows * kRowBytes;
  // Scales of blocks, in 32 bits: dot, one for every out and group of columns; axpy, one for every place along the depth
  // and group of outs, those of two neighbours along the depth side by side. They are made in pieces of kScales. Those of
  // NF4 are float32. Others are sums of two bf16, which stand side by side; axpy, both of two neighbours, then the rest.
  static constexpr int kScales = (FORM == kDot ? kDeep : kAllOuts) / kGroup<FMT>;
  static constexpr int kScaleRows = kInBlocks<FMT> ? (FORM == kDot ? kAllOuts : kDeep) : 0;
  static constexpr int kScaleBytes = kScaleRows * kScales * 4;
  // As they are stored, the copy engine brings them in whole 16 bytes.
  static constexpr int kRawRow = kScales * 4 < 16 ? 16 : kScales * 4, kRawBytes = kScaleRows * kRawRow;
  // With an offset, behind the scales, in the same order: what is added to values before they are multiplied, in bf16, or
  // to the products, in float32. Stored ones come in 16 bytes.
  static constexpr int kShiftBytes = !kShifted<FMT> ? 0 : kInFloat32<FMT> ? kScaleBytes : kScaleBytes / 2;
  static constexpr int kRawShiftBytes = kShifted<FMT> ? kScaleRows * 16 : 0;
  // Loading the words of the next step early pays where they are many and no table is waited for.
  static constexpr bool kAhead = kInBytes<FMT>;
};

#if EFORMER_HAS_WGMMA

// Constants that come out of shared memory stay in registers, where the compiler would repeat those it knows: with one of
// them in a register, (a & b) | c is a single instruction.
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_words(uint32_t* to, uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}
__device__ __forceinline__ float2 load_floats(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
// Two products of values of NF4, as float32 in the table, and their scales: rounded once, as a decoded matrix is. TERMS = 2:
// the sum of two bf16. The first is cut off, and the second made no zero, for both to have the sign of the value.
template <class E, int TERMS>
__device__ __forceinline__ void rounded(uint32_t& first, uint32_t& second, float l, float h) {
  if constexpr (TERMS == 1) {
    first = Pair<E>::pack(l, h);
  } else {
    const uint32_t lb = __float_as_uint(l), hb = __float_as_uint(h);
    first = __byte_perm(lb, hb, 0x7632);
    second = Pair<E>::pack(__uint_as_float(lb | 1) - __uint_as_float(lb & 0xFFFF0000u),
                           __uint_as_float(hb | 1) - __uint_as_float(hb & 0xFFFF0000u));
  }
}
// The same from the table of f16, for a bf16 result: `scale` undoes the factor of that table.
template <class E>
__device__ __forceinline__ uint32_t scaled_rough(uint32_t value, float low, float high) {
  const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&value));
  return Pair<E>::pack(v.x * low, v.y * high);
}
// Exact values times scales that are sums of two bf16: rounded once.
__device__ __forceinline__ uint32_t scaled_exact(uint32_t value, uint32_t scale, uint32_t rest) {
  return Pair<__nv_bfloat16>::fma(value, scale, Pair<__nv_bfloat16>::mul(value, rest));
}
__device__ __forceinline__ uint32_t added(uint32_t value, uint32_t shift) {
  return Pair<__nv_bfloat16>::fma(value, Pair<__nv_bfloat16>::kOne * 0x00010001u, shift);
}
// The place of a pair in the table, whose code is a byte of `word`; the narrow one has it in bits 7 to 14 of that.
template <bool NARROW>
__device__ __forceinline__ uint32_t place_of(uint32_t word, uint32_t lane_at, uint32_t select) {
  return NARROW ? (word & 0x7F80u) | lane_at : __byte_perm(word, lane_at, select);
}
// Fields of WIDTH bits in both halves of a register: (field | 2^n) * factor - bias.
template <class E, int LOW_BIT, int HIGH_BIT, int WIDTH>
struct Fields {
  static constexpr uint32_t kMask = ((1u << WIDTH) - 1) << LOW_BIT | ((1u << WIDTH) - 1) << (HIGH_BIT + 16);
  // Ternary is c - 1; binary 2 c - 1, so its bit counts twice.
  static constexpr int kLow = LOW_BIT - (WIDTH == 1), kHigh = HIGH_BIT - (WIDTH == 1), kBits = Pair<E>::kMagicBits;
  static constexpr uint32_t kFactor = Pair<E>::bits(1, kLow) | Pair<E>::bits(1, kHigh) << 16;
  static constexpr uint32_t kBias =
      (Pair<E>::bits((1 << (kBits - kLow)) + 1, 0) | Pair<E>::bits((1 << (kBits - kHigh)) + 1, 0) << 16) | 0x80008000u;
};
// Bytes in bits 0..7 and 16..23 (`magic` is kByteMagic) or, of 8-bit floats, in 0..7 and 8..15.
template <class E>
constexpr uint32_t kByteMagic = item_kind<E> == kBf16 ? 0x43004300u : 0x64806480u;
template <class E, int FMT>
__device__ __forceinline__ uint32_t bytes_to_floats(uint32_t r, uint32_t magic) {
  if constexpr (kPlain<FMT> != kInt8) {
    return float8_to_floats<E, kPlain<FMT>>(r);
  } else if constexpr (item_kind<E> == kBf16) {  // 128 + low seven bits, minus 128 or (sign bit set) 256
    return Pair<E>::fma((r & 0x00800080u) | magic, 0xBF80BF80u, (r & 0x007F007Fu) | magic);
  } else {
    return Pair<E>::fma((r & 0x00FF00FFu) ^ magic, 0x3C003C00u, 0xE480E480u);  // minus 1152
  }
}

template <int FMT, class E, int FORM, class S, int TERMS>
struct WideDecoder;

template <int FMT, class E, class S, int TERMS>
struct WideDecoder<FMT, E, kDot, S, TERMS> {
  using F = Fields<E, FMT == kTernary ? 2 : 3, FMT == kTernary ? 0 : 2, FMT == kTernary ? 2 : 1>;
  static constexpr int kGroups = 64 / kGroup<FMT>;  // with a scale of their own
  static constexpr int kChunks = 4 / S::kPerByte;                       // of 16 bytes per row and 64 columns
  static constexpr int kWords = FMT == kBinary ? 2 : kChunks ? 4 * kChunks : 4;  // per row and step
  struct Words {
    uint32_t w[2][kWords];  // rows g and g + 8
    uint32_t scale[2][kGroups], shift[2][kGroups];  // of shifts in bf16 the first word has both
  };
  uint32_t table, lane_at, select, rotate, row, g;
  uint32_t magic, factor, bias;  // of integers in a float's low bits

  static __device__ __forceinline__ void put_constants(uint32_t* to) {
    to[0] = kInBytes<FMT> ? kByteMagic<E> : Pair<E>::kMagic * 0x00010001u, to[1] = F::kFactor, to[2] = F::kBias;
  }
  __device__ __forceinline__ void start(uint32_t table_at, uint32_t constants, int side, int warp, int lane) {
    const uint32_t t = lane % 4;
    g = lane / 4, row = side * 64 + warp * 16 + g;
    table = table_at, lane_at = lane * (kInFloat32<FMT> && !kRough<FMT, E, TERMS> ? 8 : 4);
    select = kNarrow<FMT, E, TERMS> ? (8 * t - 7) & 31
             : kInNibbles<FMT>      ? 0x5504 | t << 4
             : kPlain<FMT> == kInt8 ? (2 * t) | (2 * t + 1) << 8
                            : (2 * t) | (2 * t + 1) << 4;
    rotate = FMT == kTernary ? 8 * (t / 2) + (t % 2 ? 0 : 4) : (36 - 2 * t) % 32;
    magic = load_word(constants), factor = load_word(constants + 4), bias = load_word(constants + 8);
  }
  // The copy engine has exchanged the 16-byte chunks of a row, as far as its box has them.
  __device__ __forceinline__ void load(Words& v, uint32_t codes, uint32_t scales, int stage, int) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t r = row + h * 8;
      if constexpr (kInBlocks<FMT>) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const uint32_t at = (r * S::kScales + stage * kGroups + i) * 4;
          v.scale[h][i] = load_word(scales + at);
          if constexpr (kShifted<FMT> && kInFloat32<FMT>) {
            v.shift[h][i] = load_word(scales + S::kScaleBytes + at);
          } else if constexpr (kShifted<FMT>) {
            static_assert(kGroups == 2, "two in a word");
            if (i == 0) v.shift[h][0] = load_word(scales + S::kScaleBytes + at / 2);
          }
        }
      }
      if constexpr (kInNibbles<FMT> || kInBytes<FMT>) {
        constexpr int kPerBox = 8 / kChunks;  // steps in a box
        const uint32_t box = codes + stage / kPerBox * (S::kAllOuts * 128) + r * 128;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) load_words(v.w[h] + 4 * c, box + ((stage % kPerBox * kChunks + c) ^ g) * 16);
      } else if constexpr (FMT == kTernary) {
        load_words(v.w[h], codes + r * 64 + ((stage ^ (r >> 1 & 3)) << 4));
      } else {
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.w[h][0]), "=r"(v.w[h][1])
                     : "r"(codes + r * 32 + (((stage >> 1) ^ (r >> 2 & 1)) << 4) + (stage & 1) * 8));
      }
    }
  }
  __device__ __forceinline__ void look_up(uint32_t& a, uint32_t& rest, uint32_t word, uint32_t scale, uint32_t shift) const {
    constexpr bool kShort = kNarrow<FMT, E, TERMS>;
    const uint32_t at = table + place_of<kShort>(kShort ? __funnelshift_r(word, word, select) : word, lane_at, select);
    const float factor = __uint_as_float(scale);
    if constexpr (!kInFloat32<FMT>) {
      const uint32_t value = kShifted<FMT> ? added(load_word(at), shift) : load_word(at);
      a = scaled_exact(value, __byte_perm(scale, 0, 0x1010), __byte_perm(scale, 0, 0x3232));
    } else if constexpr (kRough<FMT, E, TERMS>) {
      a = scaled_rough<E>(load_word(at), factor, factor);
    } else {
      const float2 value = load_floats(at);
      if constexpr (kShifted<FMT>) {
        const float more = __uint_as_float(shift);
        rounded<E, TERMS>(a, rest, fmaf(value.x, factor, more), fmaf(value.y, factor, more));
      } else {
        rounded<E, TERMS>(a, rest, value.x * factor, value.y * factor);
      }
    }
  }
  __device__ __forceinline__ uint32_t fields(uint32_t halves) const {
    return Pair<E>::fma((halves & F::kMask) | magic, factor, bias);
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[TERMS][16], const Words& v) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 16 columns each
        uint32_t &left = a[0][4 * k + h], &right = a[0][4 * k + 2 + h];
        if constexpr (kInNibbles<FMT>) {
          const int group = k * kGroups / 4;
          constexpr bool kTwo = kShifted<FMT> && !kInFloat32<FMT>;  // in a word
          const uint32_t shift = kTwo ? __byte_perm(v.shift[h][0], 0, group ? 0x3232 : 0x1010) : v.shift[h][group];
          look_up(left, a[TERMS - 1][4 * k + h], v.w[h][2 * k], v.scale[h][group], shift);
          look_up(right, a[TERMS - 1][4 * k + 2 + h], v.w[h][2 * k + 1], v.scale[h][group], shift);
        } else if constexpr (kInBytes<FMT>) {
          left = bytes_to_floats<E, FMT>(__byte_perm(v.w[h][4 * k], v.w[h][4 * k + 1], select), magic);
          right = bytes_to_floats<E, FMT>(__byte_perm(v.w[h][4 * k + 2], v.w[h][4 * k + 3], select), magic);
          if constexpr (kInByteBlocks<FMT>) {
            const uint32_t scale = v.scale[h][k * kGroups / 4];
            const uint32_t most = __byte_perm(scale, 0, 0x1010), rest = __byte_perm(scale, 0, 0x3232);
            left = scaled_exact(left, most, rest), right = scaled_exact(right, most, rest);
          }
        } else if constexpr (FMT == kTernary) {
          const uint32_t w = __funnelshift_r(v.w[h][k], v.w[h][k], rotate);
          left = fields(__byte_perm(w, 0, 0x4040)), right = fields(__byte_perm(w, 0, 0x4242));
        } else {
          const uint32_t w = __funnelshift_r(v.w[h][k / 2], v.w[h][k / 2], rotate);
          left = fields(__byte_perm(w, 0, k % 2 ? 0x4242 : 0x4040)), right = fields(__byte_perm(w, 0, k % 2 ? 0x4343 : 0x4141));
        }
      }
    }
  }
};

// The stored rows run along the outs, so a pair of neighbours along the depth comes out of two rows.
template <int FMT, class E, class S, int TERMS>
struct WideDecoder<FMT, E, kAxpy, S, TERMS> {
  static constexpr int kDepths = 4 / S::kTiles;  // of 16, in a step
  // With one tile per warpgroup, 8 rows times 16 bytes are turned on their way from shared memory.
  static constexpr bool kTurned = S::kTiles == 1 && (kInNibbles<FMT> || kInBytes<FMT>);
  struct Words {
    uint32_t w[kTurned ? 2 : kDepths][4];  // rows 2t, 2t + 8, 2t + 1, 2t + 9 of 16; turned, both rows of 8, four times
    uint2 scale[kDepths][2], shift[kDepths][2];
  };
  uint32_t table, lane_at, even, odd;  // places of rows 2t and 2t + 1 of a stage; turned, of row `lane`
  uint32_t scale_at, up, magic;

  static __device__ __forceinline__ void put_constants(uint32_t* to) {
    to[0] = kInBytes<FMT>                       ? kByteMagic<E>
            : FMT == kTernary ? Pair<E>::kMagic * 0x00010001u
                                              : (Pair<E>::kOne | Pair<E>::kSign) * 0x00010001u;
  }
  // How the copy engine exchanges the 16-byte chunks of a row.
  static __device__ __forceinline__ uint32_t swap(uint32_t row) {
    return S::kBoxBytes == 128 ? row & 7 : S::kBoxBytes == 64 ? row >> 1 & 3 : S::kBoxBytes == 32 ? row >> 2 & 1 : 0;
  }
  static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t byte) {
    const uint32_t chunk = byte % S::kBoxBytes >> 4;
    return byte / S::kBoxBytes * S::kDeep * S::kBoxBytes + row * S::kBoxBytes + ((chunk ^ swap(row)) << 4) + byte % 16;
  }
  __device__ __forceinline__ void start(uint32_t table_at, uint32_t constants, int side, int warp, int lane) {
    const uint32_t t = lane % 4, g = lane / 4;
    constexpr uint32_t kLane = 2 * S::kTiles;  // outs
    table = table_at, magic = load_word(constants);
    lane_at = lane * (kInFloat32<FMT> && !kRough<FMT, E, TERMS> ? 8 : 4);
    scale_at = (t * S::kScales + (side * S::kOuts + warp * 8 * kLane) / kGroup<FMT>) * 8;
    const uint32_t of_warp = side * S::kOuts + warp * 8 * kLane, byte = (of_warp + g * kLane) / S::kPerByte;
    if constexpr (kTurned) {  // two warps share 16 bytes of 4-bit values, and take a byte of every two
      even = place(lane, of_warp / S::kPerByte & ~15u), odd = 0;
      up = warp % 2 ? 0x7531 : 0x6420;
    } else {
      even = place(2 * t, byte), odd = place(2 * t + 1, byte);
      up = g % 2 * 4;
    }
  }
  static __device__ __forceinline__ uint32_t load_some(uint32_t address) {
    uint32_t v;
    if constexpr (kInBytes<FMT>) {
      v = load_word(address);
    } else if constexpr (kInNibbles<FMT>) {
      asm volatile("{ .reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(v) : "r"(address));
    } else {
      asm volatile("{ .reg .u16 h; ld.shared.u8 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(v) : "r"(address));
    }
    return v;
  }
  // Four times 8 rows; a lane gets the 16 bits number g of rows 2t (low) and 2t + 1 of each.
  static __device__ __forceinline__ void load_turned(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
  }
  __device__ __forceinline__ void load(Words& v, uint32_t codes, uint32_t scales, int stage, int part) const {
    if constexpr (kTurned) {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_turned(v.w[i], codes + even + (stage * 64 + i * 32) * S::kBoxBytes);
    }
#pragma unroll
    for (int d = 0; d < kDepths; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t deep = stage * 64 + part * 32 + d * 16 + i % 2 * 8;
        if constexpr (!kTurned) v.w[d][i] = load_some(codes + (i < 2 ? even : odd) + deep * S::kBoxBytes);
        if constexpr (kInBlocks<FMT>) {
          if (i < 2) {
            const float2 two = load_floats(scales + scale_at + deep / 2 * S::kScales * 8);
            v.scale[d][i] = make_uint2(__float_as_uint(two.x), __float_as_uint(two.y));
            if constexpr (kShifted<FMT>) {
              const uint32_t at = scale_at + deep / 2 * S::kScales * 8;
              if constexpr (kInFloat32<FMT>) {
                const float2 more = load_floats(scales + S::kScaleBytes + at);
                v.shift[d][i] = make_uint2(__float_as_uint(more.x), __float_as_uint(more.y));
              } else {
                v.shift[d][i].x = load_word(scales + S::kScaleBytes + at / 2);
              }
            }
          }
        }
      }
    }
  }
  __device__ __forceinline__ void look_up(uint32_t& a, uint32_t& rest, uint32_t word, int byte, uint2 scale, uint2 shift) const {
    constexpr bool kShort = kNarrow<FMT, E, TERMS>;
    const uint32_t shifted = !kShort ? word : byte == 0 ? word << 7 : word >> (8 * byte - 7);
    const uint32_t at = table + place_of<kShort>(shifted, lane_at, 0x5504 | byte << 4);
    const float low = __uint_as_float(scale.x), high = __uint_as_float(scale.y);
    if constexpr (!kInFloat32<FMT>) {
      a = scaled_exact(kShifted<FMT> ? added(load_word(at), shift.x) : load_word(at), scale.x, scale.y);
    } else if constexpr (kRough<FMT, E, TERMS>) {
      a = scaled_rough<E>(load_word(at), low, high);
    } else {
      const float2 value = load_floats(at);
      if constexpr (kShifted<FMT>) {
        rounded<E, TERMS>(a, rest, fmaf(value.x, low, __uint_as_float(shift.x)), fmaf(value.y, high, __uint_as_float(shift.y)));
      } else {
        rounded<E, TERMS>(a, rest, value.x * low, value.y * high);
      }
    }
  }
  // One tile, 4 times 16 deep. A lane has two outs: of 4 bits, a byte of every row, of 8 bits two.
  __device__ __forceinline__ void decode_turned(uint32_t (&a)[TERMS][16], const Words& v) const {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const uint32_t rows = v.w[d / 2][d % 2 * 2], rows8 = v.w[d / 2][d % 2 * 2 + 1];
      if constexpr (kInNibbles<FMT>) {
        // Of a row and the next one, the first value of both and the second of both.
        const uint32_t p = __byte_perm(rows, rows8, up);
        const uint32_t w = (p & 0x0FF00FF0u) | (p >> 12 & 0x000F000Fu) | (p << 12 & 0xF000F000u);
#pragma unroll
        for (int i = 0; i < 4; ++i) look_up(a[0][4 * d + i], a[TERMS - 1][4 * d + i], w, i, v.scale[d][i / 2], v.shift[d][i / 2]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t two = i < 2 ? rows : rows8;
          uint32_t& to = a[0][4 * d + i];
          to = bytes_to_floats<E, FMT>(kPlain<FMT> == kInt8 ? two >> i % 2 * 8 : __byte_perm(two, 0, i % 2 ? 0x4431 : 0x4420), magic);
          if constexpr (kInByteBlocks<FMT>) to = scaled_exact(to, v.scale[d][i / 2].x, v.scale[d][i / 2].y);
        }
      }
    }
  }
  // Field i of both halves; see Decoder in decode.cuh.
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    if constexpr (FMT == kTernary) {
      constexpr int kBits = Pair<E>::kMagicBits, kSlots = kBits / 2;
      const int bit = 8 * (i / 4) + 6 - 2 * (i % 4), shift = bit / (2 * kSlots) * (2 * kSlots), p = bit - shift;
      const uint32_t bias = (Pair<E>::bits((1 << (kBits - p)) + 1, 0) | 0x8000u) * 0x00010001u;
      return Pair<E>::fma(((word >> shift) & (0x00030003u << p)) | magic, Pair<E>::bits(1, p) * 0x00010001u, bias);
    } else {
      const int bit = 8 * (i / 8) + 7 - i % 8;
      return ((word << (15 - bit)) & 0x80008000u) ^ magic;
    }
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[TERMS][16], const Words& v) const {
    if constexpr (kTurned) {
      decode_turned(a, v);
    } else {
      decode_rows(a, v);
    }
  }
  // Registers of tile i and depth d begin at (kTiles * d + i) * 4.
  __device__ __forceinline__ void decode_rows(uint32_t (&a)[TERMS][16], const Words& v) const {
#pragma unroll
    for (int d = 0; d < kDepths; ++d) {
      uint32_t *to = a[0] + 4 * S::kTiles * d, *rest = a[TERMS - 1] + 4 * S::kTiles * d;
      const uint32_t e0 = v.w[d][0], e8 = v.w[d][1], o0 = v.w[d][2], o8 = v.w[d][3];
      if constexpr (kInNibbles<FMT>) {
        const uint32_t e = __byte_perm(e0, e8, 0x5410), o = __byte_perm(o0, o8, 0x5410);
        const uint32_t high = (e & 0xF0F0F0F0u) | (o >> 4 & 0x0F0F0F0Fu), low = (e << 4 & 0xF0F0F0F0u) | (o & 0x0F0F0F0Fu);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            look_up(to[4 * i + 2 * h], rest[4 * i + 2 * h], high, i + 2 * h, v.scale[d][h], v.shift[d][h]);
            look_up(to[4 * i + 2 * h + 1], rest[4 * i + 2 * h + 1], low, i + 2 * h, v.scale[d][h], v.shift[d][h]);
          }
        }
      } else if constexpr (kInBytes<FMT>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t select = i | (4 + i) << (kPlain<FMT> == kInt8 ? 8 : 4);
          uint32_t &first = to[i / 2 * 4 + i % 2], &second = to[i / 2 * 4 + i % 2 + 2];
          first = bytes_to_floats<E, FMT>(__byte_perm(e0, o0, select), magic);
          second = bytes_to_floats<E, FMT>(__byte_perm(e8, o8, select), magic);
          if constexpr (kInByteBlocks<FMT>) {
            first = scaled_exact(first, v.scale[d][0].x, v.scale[d][0].y);
            second = scaled_exact(second, v.scale[d][1].x, v.scale[d][1].y);
          }
        }
      } else {  // with one tile of ternary values, a lane has half of a byte, too
        uint32_t word = __byte_perm(__byte_perm(e0, e8, 0x0040), __byte_perm(o0, o8, 0x0040), 0x5410);
        if constexpr (FMT == kBinary || S::kTiles == 1) word <<= up;
        constexpr int kNext = FMT == kTernary ? 4 : 8;
#pragma unroll
        for (int i = 0; i < 2 * S::kTiles; ++i) {
          to[i / 2 * 4 + i % 2] = pair(word, i), to[i / 2 * 4 + i % 2 + 2] = pair(word, i + kNext);
        }
      }
    }
  }
};
#endif

}  // namespace eformer

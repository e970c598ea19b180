// Rows of a cache as operands of the matrix instruction: codes become float16, exactly, on their way from memory to it. Which
// column of the instruction a value is, is free, as long as both operands agree: so every lane reads whole words.
#pragma once

#include "common.cuh"

namespace eformer {

__device__ __forceinline__ uint32_t scaled_plus(uint32_t a, uint32_t factor, uint32_t b) {
  const __half2 r = __hfma2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(factor), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(r);
}
// A code next to 1024 (0x6400) is a float16. The signed bytes 0 and 2 of a word, whose sign is turned:
__device__ __forceinline__ uint32_t from_bytes(uint32_t w) {
  return scaled_plus((w & 0x00FF00FFu) ^ 0x64806480u, 0x3C003C00u, 0xE480E480u);  // less 1152
}
// The low nibbles of the bytes 0 and 2, less 8; the high ones, which are 16 times too large.
__device__ __forceinline__ uint32_t from_low(uint32_t w) {
  return scaled_plus((w & 0x000F000Fu) | 0x64006400u, 0x3C003C00u, 0xE408E408u);  // less 1032
}
__device__ __forceinline__ uint32_t from_high(uint32_t w) {
  return scaled_plus((w & 0x00F000F0u) | 0x64006400u, 0x2C002C00u, 0xD480D480u);  // a sixteenth, less 72
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ float first_of(uint32_t pair) { return __low2float(reinterpret_cast<const __half2&>(pair)); }
__device__ __forceinline__ float second_of(uint32_t pair) { return __high2float(reinterpret_cast<const __half2&>(pair)); }

// A row or a scale is in the cache or, where it is the new one, in shared memory: which a pointer may point to that is not
// CACHED. Decide for a whole tile: two loads into one register, each under a condition, wait for one another.
template <class T, bool CACHED>
__device__ __forceinline__ T load_as(const void* p) {
  if constexpr (CACHED) return __ldg(static_cast<const T*>(p));
  return *static_cast<const T*>(p);
}

// A row of D codes. Scales are those of blocks of 64 values of 4 bits, or of the row.
template <int BITS, int D>
struct CodeRow {
  static constexpr int kBytes = D * BITS / 8, kBlocks = BITS == 4 ? D / 64 : 1, kScaleBytes = BITS == 4 ? 2 : 4;
  static constexpr bool kLong = D % 64 == 0;
};

template <int BITS, bool CACHED>
__device__ __forceinline__ float load_scale(const uint8_t* p) {
  if constexpr (BITS == 8) return load_as<float, CACHED>(p);
  return __uint_as_float(static_cast<uint32_t>(load_as<uint16_t, CACHED>(p)) << 16);
}

// Keys are the rows of keys * q.T: the four lanes of a row have four values each of every 16.
template <int BITS, int D>
struct Keys : CodeRow<BITS, D> {
  static constexpr int kWords = D * BITS / 128, kSteps = D / 16, kStepsOfBlock = BITS == 4 ? 4 : kSteps;
  uint32_t w[kWords];

  template <bool CACHED>
  __device__ __forceinline__ void load(const uint8_t* row, int t) {
    if constexpr (BITS == 4) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint2 v = load_as<uint2, CACHED>(row + 32 * i + 8 * t);
        w[2 * i] = v.x, w[2 * i + 1] = v.y;
      }
    } else if constexpr (CodeRow<BITS, D>::kLong) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = load_as<uint4, CACHED>(row + 64 * i + 16 * t);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = load_as<uint32_t, CACHED>(row + 16 * i + 4 * t);
    }
  }
  __device__ __forceinline__ uint2 fragment(int step) const {
    if constexpr (BITS == 4) {
      const uint32_t v = w[step / 2] >> (step % 2 * 8);
      return make_uint2(from_low(v), from_high(v));
    }
    return make_uint2(from_bytes(w[step]), from_bytes(w[step] >> 8));
  }
  // A lane has pieces of a row: number i begins at piece_at(i, t). Of these values, one by one, `half` of register `r` of a
  // step is number value_of(step, r, half).
  static constexpr int kPiece = CodeRow<BITS, D>::kLong ? 16 : 4, kPieces = D / (4 * kPiece);
  __device__ static __forceinline__ int piece_at(int i, int t) { return i * 4 * kPiece + t * kPiece; }
  __device__ static constexpr int value_of(int step, int r, int half) {
    if (BITS == 4) return step / 4 * 16 + step % 4 / 2 * 8 + step % 2 * 2 + 1 - r + 4 * half;
    return step * 4 + r + 2 * half;
  }
};

// Values are the columns of values.T * weights.T: a lane has four positions, and one row in each tile of eight.
template <int BITS, int D>
struct Values : CodeRow<BITS, D> {
  static constexpr int kTiles = D / 8, kTilesOfBlock = BITS == 4 ? 8 : kTiles;
  static constexpr int kOfWord = BITS == 4 ? 8 : CodeRow<BITS, D>::kLong ? 4 : 2, kWords = kTiles / kOfWord;
  uint32_t w[kWords];

  template <bool CACHED>
  __device__ __forceinline__ void load(const uint8_t* row, int g) {
    if constexpr (BITS == 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = load_as<uint32_t, CACHED>(row + 32 * i + 4 * g);
    } else if constexpr (D % 128 == 0) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = load_as<uint4, CACHED>(row + 128 * i + 16 * g);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    } else if constexpr (D == 64) {
      const uint2 v = load_as<uint2, CACHED>(row + 8 * g);
      w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = load_as<uint16_t, CACHED>(row + 16 * i + 2 * g);
    }
  }
  // The values of two positions in a tile.
  __device__ static __forceinline__ uint32_t pair(const Values& a, const Values& b, int tile) {
    const int word = tile / kOfWord, at = tile % kOfWord, byte = BITS == 4 ? at / 2 : at;
    const uint32_t z = __byte_perm(a.w[word], b.w[word], 0x4400u + 0x1111u * byte);
    if constexpr (BITS == 4) return at % 2 ? from_low(z) : from_high(z);
    return from_bytes(z);
  }
  __device__ static __forceinline__ int place(int tile, int g) {
    if constexpr (BITS == 4) return tile / 8 * 64 + g * 8 + tile % 8;
    if constexpr (D % 128 == 0) return tile / 16 * 128 + g * 16 + tile % 16;
    if constexpr (D == 64) return g * 8 + tile;
    return tile / 2 * 16 + g * 2 + tile % 2;
  }
};

template <int DTYPE>
__device__ __forceinline__ float load_one(const void* p, int64_t i) {
  if constexpr (DTYPE == kF32) return __ldg(static_cast<const float*>(p) + i);
  const uint16_t half = __ldg(static_cast<const uint16_t*>(p) + i);
  if constexpr (DTYPE == kBf16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
  return __half2float(__ushort_as_half(half));
}

// Four values that begin at a multiple of four.
template <int DTYPE, int COUNT>
__device__ __forceinline__ void load_four(const void* p, int64_t from, float (&v)[COUNT], int at) {
  if constexpr (DTYPE == kF32) {
    const float4 w = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p) + from));
    v[at] = w.x, v[at + 1] = w.y, v[at + 2] = w.z, v[at + 3] = w.w;
  } else {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + from));
    if constexpr (DTYPE == kBf16) {
      v[at] = __uint_as_float(w.x << 16), v[at + 1] = __uint_as_float(w.x & 0xFFFF0000u);
      v[at + 2] = __uint_as_float(w.y << 16), v[at + 3] = __uint_as_float(w.y & 0xFFFF0000u);
    } else {
      v[at] = first_of(w.x), v[at + 1] = second_of(w.x), v[at + 2] = first_of(w.y), v[at + 3] = second_of(w.y);
    }
  }
}

// A value as it would have been stored: in the type of q.
template <int DTYPE>
__device__ __forceinline__ float as_stored(float v) {
  if constexpr (DTYPE == kBf16) return __bfloat162float(__float2bfloat16_rn(v));
  if constexpr (DTYPE == kF16) return __half2float(__float2half_rn(v));
  return v;
}

// Rotary positions: what the pairs of a row are turned by.
struct Turn {
  const float *cosines, *sines;
  int half;  // pairs in a row

  // Four values, which begin at number `at` of the row x + from, a multiple of four. A pair is (i, i + half) or, without
  // HALVES, (2i, 2i + 1).
  template <int DTYPE, bool HALVES, int COUNT>
  __device__ __forceinline__ void apply(const void* x, int64_t from, int at, float (&v)[COUNT], int to) const {
    if constexpr (HALVES) {
      const bool first = at < half;
      const int pair = first ? at : at - half;
      float other[4], c[4], s[4];
      load_four<DTYPE>(x, from + (first ? at + half : pair), other, 0);
      load_four<kF32>(cosines, pair, c, 0), load_four<kF32>(sines, pair, s, 0);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float beside = other[j] * s[j];
        v[to + j] = as_stored<DTYPE>(fmaf(v[to + j], c[j], first ? -beside : beside));
      }
    } else {
      const float2 c = __ldg(reinterpret_cast<const float2*>(cosines + at / 2)), s = __ldg(reinterpret_cast<const float2*>(sines + at / 2));
      const float a0 = v[to], b0 = v[to + 1], a1 = v[to + 2], b1 = v[to + 3];
      v[to] = as_stored<DTYPE>(fmaf(a0, c.x, -(b0 * s.x))), v[to + 1] = as_stored<DTYPE>(fmaf(b0, c.x, a0 * s.x));
      v[to + 2] = as_stored<DTYPE>(fmaf(a1, c.y, -(b1 * s.y))), v[to + 3] = as_stored<DTYPE>(fmaf(b1, c.y, a1 * s.y));
    }
  }
};

// A row that one warp quantizes, as `encode` of src/eformer/_formats/integer/codec.py does: to shared memory and, if it is
// this block's to write, into the cache.
template <int BITS, int D, int DTYPE>
struct NewRow {
  static constexpr int kOfWord = 32 / BITS, kAll = D / kOfWord, kMine = ceil_div(kAll, 32), kHalf = 1 << (BITS - 1);
  float v[kMine][kOfWord];

  __device__ __forceinline__ void load(const void* x, int64_t from, int size) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int j = 0; j < kOfWord; ++j) {
        const int at = (threadIdx.x % 32 + 32 * i) * kOfWord + j;
        v[i][j] = at < size ? load_one<DTYPE>(x, from + at) : 0.f;
      }
    }
  }
  // Of a row that is not padded.
  template <bool HALVES>
  __device__ __forceinline__ void turn(const Turn& by, const void* x, int64_t from) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int j = 0; j < kOfWord; j += 4) {
        const int at = (threadIdx.x % 32 + 32 * i) * kOfWord + j;
        if (at < D) by.apply<DTYPE, HALVES>(x, from, at, v[i], j);
      }
    }
  }
  // Of the words i, ..., in what the lanes of a block or of the row have.
  __device__ __forceinline__ float scale_of(int begin, int end) const {
    float low = 0.f, high = 0.f;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (i < begin || i >= end) continue;
#pragma unroll
      for (int j = 0; j < kOfWord; ++j) {
        low = fminf(low, v[i][j]), high = fmaxf(high, v[i][j]);
        largest = max(largest, __float_as_uint(v[i][j]) & 0x7FFFFFFFu);
      }
    }
#pragma unroll
    for (int apart = BITS == 4 ? 4 : 16; apart; apart /= 2) {
      low = fminf(low, __shfl_xor_sync(~0u, low, apart)), high = fmaxf(high, __shfl_xor_sync(~0u, high, apart));
      largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
    }
    const float s = (-low >= high ? low : high) * (-1.f / kHalf);
    if (largest >= 0x7F800000u) return __uint_as_float(0x7FC00000u);  // not finite
    if (fabsf(s) < 0x1p-126f) return 0.f;
    if constexpr (BITS == 8) return s;
    constexpr float kMost = 3.3895313892515355e38f;  // of bfloat16
    return __bfloat162float(__float2bfloat16_rn(fminf(fmaxf(s, -kMost), kMost)));
  }
  __device__ __forceinline__ void write(uint8_t* codes, uint8_t* scales, bool owner, uint8_t* cache_codes, uint8_t* cache_scales) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int word = threadIdx.x % 32 + 32 * i;
      const float s = BITS == 4 ? scale_of(i, i + 1) : scale_of(0, kMine), by = s == 0.f ? 1.f : s;
      if (word >= kAll) continue;
      uint32_t packed = 0;
#pragma unroll
      for (int j = 0; j < kOfWord; ++j) {
        const float code = rintf(__fdiv_rn(v[i][j], by));
        const int c = code != code ? 0 : static_cast<int>(fminf(fmaxf(code, -kHalf), kHalf - 1));
        // Bytes as they are; of nibbles the first is the high one.
        packed |= BITS == 8 ? static_cast<uint32_t>(c & 0xFF) << 8 * j : static_cast<uint32_t>(c + 8) << (8 * (j / 2) + 4 - 4 * (j % 2));
      }
      reinterpret_cast<uint32_t*>(codes)[word] = packed;
      if (owner) reinterpret_cast<uint32_t*>(cache_codes)[word] = packed;
      if (word % (BITS == 4 ? 8 : kAll) != 0) continue;
      if constexpr (BITS == 4) {
        const uint16_t bits = static_cast<uint16_t>(__float_as_uint(s) >> 16);
        reinterpret_cast<uint16_t*>(scales)[word / 8] = bits;
        if (owner) reinterpret_cast<uint16_t*>(cache_scales)[word / 8] = bits;
      } else {
        *reinterpret_cast<float*>(scales) = s;
        if (owner) *reinterpret_cast<float*>(cache_scales) = s;
      }
    }
  }
};

}  // namespace eformer

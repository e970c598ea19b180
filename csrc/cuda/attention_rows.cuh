// Rows of a cache as operands of the matrix instruction: codes become bfloat16, exactly, on their way from memory to it. Which
// column of the instruction a value is, is free, as long as both operands agree: so every lane reads whole words.
#pragma once

#include "common.cuh"

namespace eformer {

__device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
  const __nv_bfloat162 d = __hsub2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(d);
}
// The signed bytes 0 and 2 of a word: 128 and the low bits, less 128 or, where the sign is set, 256.
__device__ __forceinline__ uint32_t from_bytes(uint32_t w) {
  return minus((w & 0x007F007Fu) | 0x43004300u, (w & 0x00800080u) | 0x43004300u);
}
// The low nibbles of the bytes 0 and 2, less 8.
__device__ __forceinline__ uint32_t from_nibbles(uint32_t w) { return minus((w & 0x000F000Fu) | 0x43004300u, 0x43084308u); }
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ float first_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

template <int BITS>
__device__ __forceinline__ float load_scale(const void* p, int64_t i) {
  if constexpr (BITS == 8) return __ldg(static_cast<const float*>(p) + i);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

// A row of D codes. Scales are those of blocks of 64 values of 4 bits, or of the row.
template <int BITS, int D>
struct CodeRow {
  static constexpr int kBytes = D * BITS / 8, kBlocks = BITS == 4 ? D / 64 : 1;
  static constexpr bool kLong = D % 64 == 0;
};

// Keys are the columns of q * keys.T: the four lanes of a column share a row, and have four values each of every 16.
template <int BITS, int D>
struct Keys : CodeRow<BITS, D> {
  static constexpr int kWords = D * BITS / 128, kSteps = D / 16, kStepsOfBlock = BITS == 4 ? 4 : kSteps;
  uint32_t w[kWords];

  __device__ __forceinline__ void load(const uint8_t* row, int t) {
    if constexpr (BITS == 4) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + 32 * i + 8 * t));
        w[2 * i] = v.x, w[2 * i + 1] = v.y;
      }
    } else if constexpr (CodeRow<BITS, D>::kLong) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(row + 64 * i + 16 * t));
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = __ldg(reinterpret_cast<const uint32_t*>(row + 16 * i + 4 * t));
    }
  }
  __device__ __forceinline__ uint2 fragment(int step) const {
    if constexpr (BITS == 4) {
      const uint32_t v = w[step / 2] >> (step % 2 * 8);
      return make_uint2(from_nibbles(v), from_nibbles(v >> 4));
    }
    return make_uint2(from_bytes(w[step]), from_bytes(w[step] >> 8));
  }
  // The place in a row of value `half` of register `r` of lane t.
  __device__ static __forceinline__ int place(int step, int t, int r, int half) {
    if constexpr (BITS == 4) return step / 4 * 64 + t * 16 + step % 4 / 2 * 8 + step % 2 * 2 + 1 - r + 4 * half;
    if constexpr (CodeRow<BITS, D>::kLong) return step / 4 * 64 + t * 16 + step % 4 * 4 + r + 2 * half;
    return step * 16 + t * 4 + r + 2 * half;
  }
};

// Values are the rows of weights * values: a lane has four positions, and one column in each tile of eight.
template <int BITS, int D>
struct Values : CodeRow<BITS, D> {
  static constexpr int kTiles = D / 8, kTilesOfBlock = BITS == 4 ? 8 : kTiles;
  static constexpr int kOfWord = BITS == 4 ? 8 : CodeRow<BITS, D>::kLong ? 4 : 2, kWords = kTiles / kOfWord;
  uint32_t w[kWords];

  __device__ __forceinline__ void load(const uint8_t* row, int g) {
    if constexpr (BITS == 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = __ldg(reinterpret_cast<const uint32_t*>(row + 32 * i + 4 * g));
    } else if constexpr (D % 128 == 0) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(row + 128 * i + 16 * g));
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    } else if constexpr (D == 64) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + 8 * g));
      w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = __ldg(reinterpret_cast<const uint16_t*>(row + 16 * i + 2 * g));
    }
  }
  // The values of two rows in a tile.
  __device__ static __forceinline__ uint32_t pair(const Values& a, const Values& b, int tile) {
    const int word = tile / kOfWord, at = tile % kOfWord;
    if constexpr (BITS == 4) {
      const uint32_t z = __byte_perm(a.w[word], b.w[word], at < 4 ? 0x5410 : 0x7632);
      return from_nibbles(z >> (at / 2 % 2 * 8 + (at % 2 ? 0 : 4)));
    }
    return from_bytes(__byte_perm(a.w[word], b.w[word], at < 2 ? 0x5410 : 0x7632) >> (at % 2 * 8));
  }
  __device__ static __forceinline__ int place(int tile, int g) {
    if constexpr (BITS == 4) return tile / 8 * 64 + g * 8 + tile % 8;
    if constexpr (D % 128 == 0) return tile / 16 * 128 + g * 16 + tile % 16;
    if constexpr (D == 64) return g * 8 + tile;
    return tile / 2 * 16 + g * 2 + tile % 2;
  }
};

}  // namespace eformer

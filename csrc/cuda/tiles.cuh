// y = (c @ W) * sx * sw for codes of 8 bits on both sides, on GPUs that are not Hopper (bytes.cuh): y.T = W.T c.T, summed up
// in int32 (int8) or float32 (e4m3).
//
// A block of eight warps owns 128 outs (rows of y.T) and N rows of x, and walks along the depth in stages of 128 columns,
// which cp.async brings into a ring in shared memory. W is the left operand of the instruction. In the dot form a lane
// chooses the rows of what it loads so that its two outs are neighbours; in the axpy form they are (bytes_lanes.cuh). Few
// tiles are split along the depth: sums go to memory, and a second kernel adds them up, always in the same order.
//
// Products of e4m3 lose bits of long sums in the matrix unit: those of a stage are added up in float32 outside of it.
#pragma once

#include <type_traits>

#include "bytes_lanes.cuh"
#include "common.cuh"
#include "parts.h"
#include "tiles_mma.cuh"

namespace eformer {

struct TilesArgs {
  const uint8_t *w, *x, *scale;
  const float* x_scale;
  void* y;
  uint32_t* sums;  // of every split; null where there is one
  int32_t m, outs, deep, y_dtype, scale_dtype;
  int32_t scale_step;  // 0: one scale for all outs
  int32_t m_tiles, per_matrix, stages, stages_per_split;
  int64_t w_pitch, w_matrix, x_pitch, scale_matrix;  // bytes
  int64_t results;                                   // elements of y
  Stack stack;
};

template <int N>
struct TilesShape {
  static constexpr int kOuts = 128, kDeep = 128;
  static constexpr int kAcross = N > 32 ? N / 32 : 1;  // warps along the rows of x
  static constexpr int kWarpOuts = kOuts * kAcross / kWarps, kWarpRows = N / kAcross;
  static constexpr int kA = kWarpOuts / 16, kB = kWarpRows / 8;  // operands of a warp
  static constexpr int kW = kOuts * kDeep, kStage = kW + N * kDeep;
  static constexpr int kStages = N > 16 ? 3 : 4, kShared = kStages * kStage;
  static_assert(kShared <= 99 * 1024, "8.6 and 8.9 have no more");
};

// Codes as they are, or, of e4m3 where there is no instruction for these, as f16 divided by 256, which holds them.
template <int KIND>
constexpr bool kAsHalves = KIND == kE4m3 && !EFORMER_HAS_FLOAT8_MMA;
template <int KIND>
constexpr bool kLosesBits = KIND == kE4m3 && EFORMER_HAS_FLOAT8_MMA;
// Blocks that registers are left for.
template <int KIND, int N>
constexpr int kAtOnce = N > 64 || (N > 16 && kLosesBits<KIND>) ? 1 : 2;
template <int KIND>
constexpr float kUnit = kAsHalves<KIND> ? 65536.f : 1.f;

// The first two codes of a word, and the other two: a half is a code without its lowest bit, that bit, and seven zeros. NaN
// stays NaN where weights are converted; a row of x with one has a scale that is NaN.
template <bool WEIGHTS>
__device__ __forceinline__ uint2 halves_of(uint32_t word) {
  const uint32_t magnitudes = word & 0x7F7F7F7Fu, lower = (word << 7) & 0x80808080u;
  uint32_t upper = (word & 0x80808080u) | ((magnitudes >> 1) & 0x7F7F7F7Fu);
  if constexpr (WEIGHTS) upper |= ((magnitudes + 0x01010101u) >> 1) & 0x40404040u;
  return make_uint2(__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362));
}

template <int KIND>
struct Left {
  uint32_t v[kAsHalves<KIND> ? 8 : 4];
  __device__ __forceinline__ void set(const uint32_t (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kAsHalves<KIND>) {  // four codes of a row are two pairs of columns: of the first half, and of the second
        const uint2 h = halves_of<true>(r[i]);
        v[i / 2 * 4 + i % 2] = h.x, v[i / 2 * 4 + i % 2 + 2] = h.y;
      } else {
        v[i] = r[i];
      }
    }
  }
};
template <int KIND>
struct Right {
  uint32_t v[kAsHalves<KIND> ? 4 : 2];
  __device__ __forceinline__ void set(uint32_t r0, uint32_t r1) {
    if constexpr (kAsHalves<KIND>) {
      const uint2 first = halves_of<false>(r0), second = halves_of<false>(r1);
      v[0] = first.x, v[1] = first.y, v[2] = second.x, v[3] = second.y;
    } else {
      v[0] = r0, v[1] = r1;
    }
  }
};

template <int KIND>
using TilesSum = std::conditional_t<KIND == kInt8, int, float>;

template <int KIND>
__device__ __forceinline__ void add_product(TilesSum<KIND> (&c)[4], const Left<KIND>& a, const Right<KIND>& b) {
  if constexpr (KIND == kInt8) {
    mma_int8(c, a.v, b.v);
  } else if constexpr (kAsHalves<KIND>) {
    const uint32_t first[4] = {a.v[0], a.v[1], a.v[2], a.v[3]}, second[4] = {a.v[4], a.v[5], a.v[6], a.v[7]};
    mma<__half>(c, first, b.v[0], b.v[1]);
    mma<__half>(c, second, b.v[2], b.v[3]);
  } else {
#if EFORMER_HAS_FLOAT8_MMA
    mma_e4m3(c, a.v, b.v);
#endif
  }
}

template <int KIND, int FORM, int N>
struct TilesBlock {
  using S = TilesShape<N>;
  using Sum = TilesSum<KIND>;
  const TilesArgs& a;
  uint32_t ring;  // in shared memory
  const uint8_t *w, *x;
  int out0, m0, lane, warp_out, warp_row;
  AcrossLanes across;

  // A thread copies one chunk of 16 bytes of every 32nd row. What lies outside becomes zeros.
  __device__ __forceinline__ void load(int slot, int stage) const {
    const int chunk = threadIdx.x % 8, first = threadIdx.x / 8, column = stage * S::kDeep;
    const uint32_t to = ring + slot * S::kStage;
#pragma unroll
    for (int i = 0; i < S::kOuts; i += kWorkers / 8) {
      const int row = first + i, out = out0 + (FORM == kDot ? row : chunk * 16), deep = column + (FORM == kDot ? chunk * 16 : row);
      const bool there = out < a.outs && deep < a.deep;
      const uint8_t* from = FORM == kDot ? w + out * a.w_pitch + deep : w + deep * a.w_pitch + out;
      const int place = chunk ^ ((FORM == kDot ? row / 2 : row) & 7);
      copy_async16(to + row * 128 + place * 16, there ? from : w, there ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < N; i += kWorkers / 8) {
      const int row = first + i;
      if (N < kWorkers / 8 && row >= N) break;
      const int deep = column + chunk * 16, valid = m0 + row < a.m ? clamp_to(a.deep - deep, 16) : 0;
      const uint8_t* from = valid ? x + (m0 + row) * a.x_pitch + deep : x;
      copy_async16(to + S::kW + row * 128 + (chunk ^ (row & 7)) * 16, from, valid);
    }
  }

  // 16 outs from `out` on, 32 columns. Dot form: rows of the matrices that are loaded are every other out.
  __device__ __forceinline__ void load_left(Left<KIND>& left, uint32_t stage, int out, int k) const {
    uint32_t r[4];
    if constexpr (FORM == kDot) {
      const int row = out + lane % 8 * 2 + lane / 8 % 2;
      load_matrices(r, stage + row * 128 + (((2 * k + lane / 16) ^ (row / 2 & 7)) << 4));
    } else {
      across.load(r, stage, k, out / 16);
    }
    left.set(r);
  }
  // 16 rows of x from `row` on: two operands.
  __device__ __forceinline__ void load_right(Right<KIND>& first, Right<KIND>& second, uint32_t stage, int row, int k) const {
    const int mine = row + lane / 16 * 8 + lane % 8;
    uint32_t r[4];
    load_matrices(r, stage + S::kW + mine * 128 + (((2 * k + lane / 8 % 2) ^ (mine & 7)) << 4));
    first.set(r[0], r[1]), second.set(r[2], r[3]);
  }

  __device__ __forceinline__ void multiply(Sum (&acc)[S::kA][S::kB][4], int slot) const {
    const uint32_t stage = ring + slot * S::kStage;
    Right<KIND> right[4][S::kB];
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int j = 0; j < S::kB; j += 2) load_right(right[k][j], right[k][j + 1], stage, warp_row + j * 8, k);
#pragma unroll
    for (int i = 0; i < S::kA; ++i) {
      Sum part[S::kB][4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Left<KIND> left;
        load_left(left, stage, warp_out + i * 16, k);
#pragma unroll
        for (int j = 0; j < S::kB; ++j) add_product<KIND>(kLosesBits<KIND> ? part[j] : acc[i][j], left, right[k][j]);
      }
      if constexpr (kLosesBits<KIND>) {
#pragma unroll
        for (int j = 0; j < S::kB; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][j][e] += part[j][e];
      }
    }
  }

  __device__ __forceinline__ void run(Sum (&acc)[S::kA][S::kB][4], int first, int last) const {
#pragma unroll
    for (int s = 0; s < S::kStages - 1; ++s) {
      if (first + s < last) load(s, first + s);
      commit_copies();
    }
    int slot = 0;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      wait_for_all_but<S::kStages - 2>();
      __syncthreads();  // all of this stage is there, and nobody reads the one before
      const int ahead = stage + S::kStages - 1;
      if (ahead < last) load(slot == 0 ? S::kStages - 1 : slot - 1, ahead);
      commit_copies();
      multiply(acc, slot);
      if (++slot == S::kStages) slot = 0;
    }
  }

  __device__ __forceinline__ int row_of(int j, int r) const { return m0 + warp_row + j * 8 + lane % 4 * 2 + r; }
  __device__ __forceinline__ int out_of(int i) const { return out0 + warp_out + i * 16 + lane / 4 * 2; }
  // Every two neighbouring outs of a row of x: store(i, j, r, sum, sum).
  template <class Store>
  __device__ __forceinline__ void each(const Sum (&acc)[S::kA][S::kB][4], Store store) const {
#pragma unroll
    for (int j = 0; j < S::kB; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < S::kA; ++i) {
          if (row_of(j, r) < a.m && out_of(i) < a.outs) store(i, j, r, acc[i][j][r], acc[i][j][2 + r]);
        }
  }
};

template <int KIND>
__device__ __forceinline__ float scaled(TilesSum<KIND> sum, float x, float w) {
  return static_cast<float>(sum) * kUnit<KIND> * (x * w);
}
template <class T>
__device__ __forceinline__ uint32_t bits_of(T v) {
  if constexpr (std::is_same_v<T, float>) return __float_as_uint(v);
  return static_cast<uint32_t>(v);
}
__device__ __forceinline__ float tiles_scale(const TilesArgs& a, int64_t matrix, int out) {
  return load_float(a.scale + matrix * a.scale_matrix, static_cast<int64_t>(out) * a.scale_step, a.scale_dtype);
}

template <int KIND, int FORM, int N>
__global__ void __launch_bounds__(kWorkers, kAtOnce<KIND, N>) tiles_kernel(const __grid_constant__ TilesArgs a) {
  using S = TilesShape<N>;
  using Sum = TilesSum<KIND>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int tile = blockIdx.x, matrix = tile / a.per_matrix, here = tile % a.per_matrix, split = blockIdx.y;
  const int64_t stored = first_matrix(a.stack) + matrix, row0 = static_cast<int64_t>(matrix) * a.m;
  TilesBlock<KIND, FORM, N> block{a, shared_address(shared), a.w + stored * a.w_matrix, a.x + row0 * a.x_pitch};
  // Neighbours share outs, so that W comes from memory once.
  block.out0 = here / a.m_tiles * S::kOuts, block.m0 = here % a.m_tiles * N, block.lane = lane;
  block.warp_out = warp / S::kAcross * S::kWarpOuts, block.warp_row = warp % S::kAcross * S::kWarpRows;
  block.across.start(lane);
  Sum acc[S::kA][S::kB][4] = {};
  const int first = split * a.stages_per_split;
  block.run(acc, first, min(a.stages, first + a.stages_per_split));
  const bool even = a.outs % 2 == 0;
  if (a.sums) {
    uint32_t* sums = a.sums + split * a.results;
    block.each(acc, [&](int i, int j, int r, Sum v0, Sum v1) {
      const int out = block.out_of(i);
      uint32_t* to = sums + (row0 + block.row_of(j, r)) * a.outs + out;
      if (even) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bits_of(v0), bits_of(v1));
      } else {
        to[0] = bits_of(v0);
        if (out + 1 < a.outs) to[1] = bits_of(v1);
      }
    });
    return;
  }
  float sx[S::kB][2], sw[S::kA][2];  // all before the first store, which might change them for all the compiler knows
#pragma unroll
  for (int i = 0; i < S::kA * 2; ++i) {
    const int out = block.out_of(i / 2) + i % 2;
    sw[i / 2][i % 2] = out < a.outs ? tiles_scale(a, stored, out) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < S::kB * 2; ++i) {
    const int row = block.row_of(i / 2, i % 2);
    sx[i / 2][i % 2] = row < a.m ? a.x_scale[row0 + row] : 0.f;
  }
  block.each(acc, [&](int i, int j, int r, Sum v0, Sum v1) {
    const float y0 = scaled<KIND>(v0, sx[j][r], sw[i][0]), y1 = scaled<KIND>(v1, sx[j][r], sw[i][1]);
    const int out = block.out_of(i);
    const int64_t at = (row0 + block.row_of(j, r)) * a.outs + out;
    if (even) {
      store_two(a.y, at, a.y_dtype, y0, y1);
    } else {
      store_float(a.y, at, a.y_dtype, y0);
      if (out + 1 < a.outs) store_float(a.y, at + 1, a.y_dtype, y1);
    }
  });
}

// Adds up the splits: a block has 256 outs of a row of x.
template <int KIND>
__global__ void tiles_sum_kernel(const __grid_constant__ TilesArgs a, int splits) {
  const int across = ceil_div<int>(a.outs, blockDim.x), out = blockIdx.x % across * blockDim.x + threadIdx.x;
  const int64_t row = blockIdx.x / across, at = row * a.outs + out;
  if (out >= a.outs) return;
  TilesSum<KIND> total = 0;
  for (int split = 0; split < splits; ++split) {
    const uint32_t part = a.sums[split * a.results + at];
    if constexpr (KIND == kInt8) total += static_cast<int>(part); else total += __uint_as_float(part);
  }
  const int64_t stored = first_matrix(a.stack) + row / a.m;
  store_float(a.y, at, a.y_dtype, scaled<KIND>(total, a.x_scale[row], tiles_scale(a, stored, out)));
}

}  // namespace eformer

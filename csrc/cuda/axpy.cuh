// y = x @ D for at most 16 rows of x and the formats of 4 bits: the gradient's form, where stored rows lie along the outs.
//
// A pair of neighbours along the depth comes out of two stored rows: their nibbles are merged into bytes, each of which is
// looked up in a table of 256 pairs. That gives the left operand of `mma.m16n8k16`, 16 outs times 16 stored rows, as it is
// wanted: lane (g, t) has the stored rows 4t to 4t + 3 and, of each 64 outs, those 8g to 8g + 7. All outs of an instruction
// share a scale per stored row, so x is what is multiplied by it, rounded once to bf16, and sums stay in registers over
// the whole depth. A scale is the sum of two bf16; the second is not zero, so that an infinity in x stays one.
//
// bf16 holds the 16 values of NF4 badly, so they are rounded in sixteen ways, by the place of a stored row in sixteen.
//
// A block owns a strip of 256 outs and a part of the depth. Its warps take stages of 16 stored rows in turn; each copies its
// own into a ring of its own and waits for nobody else. At the end the sums of all warps are added up, then those of the
// blocks that share a strip, which are a cluster: always in the same order.
#pragma once

#include "books.h"
#include "decode.cuh"
#include "skinny_ops.cuh"
#include "wide_mma.cuh"

namespace eformer {

constexpr int kAxpySplits = 8;  // blocks that share a strip

struct AxpyArgs {
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* x;
  __nv_bfloat16* y;
  int32_t m, deep, outs, row_bytes, block, scale_cols, scale_dtype;
  int32_t stages, stages_per_split;
  float factor;  // what sums are multiplied by, for the table's sake
  int64_t codes_batch, scale_batch, x_batch, y_batch;
  Stack stack;
  FineBook book;
};

template <int NT>  // columns of eight rows of x
struct AxpyShape {
  static constexpr int kWarps = 8, kThreads = kWarps * 32, kDeep = 16, kRing = 6 - NT;
  static constexpr int kBlocks = 4;  // of 64 outs
  static constexpr int kCodes = kDeep * kBlocks * 32, kScales = kDeep * kBlocks * 4, kStage = kCodes + kScales + kDeep * NT * 16;
  // Four sums of every lane are a unit of 512 bytes: two columns of x and two halves of the outs per 64 outs.
  static constexpr int kUnits = kBlocks * NT * 4, kSums = kUnits * 512;
  static constexpr int kRegion = kRing * kStage > kSums ? kRing * kStage : kSums;  // of a warp: its ring, then its sums
  static constexpr int kShared = kTableBytes + kWarps * kRegion;
  static_assert(kStage % 128 == 0 && NT <= 2, "places of cells are made for that; a lane copies one piece of x");
};

#if EFORMER_HAS_WGMMA

// The table of pairs, one copy per lane: 128 bytes for the stored rows 4t and 4t + 1, then 128 for 4t + 2 and 4t + 3.
template <int WARPS>
__device__ __forceinline__ void fill_fine_table(uint8_t* table, const FineBook& book, int warp, int lane) {
  const uint4 one = book.v[lane & 15][0], two = book.v[lane & 15][1];
  const uint32_t mine[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w};
#pragma unroll 1
  for (int high = warp; high < 16; high += WARPS) {
    uint32_t first[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) first[j] = __shfl_sync(~0u, mine[j], high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = i * 4 + (lane >> 3);  // eight lanes write one row
      uint32_t pair[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) pair[j] = __byte_perm(first[j], __shfl_sync(~0u, mine[j], low), 0x7610);
      uint4* row = reinterpret_cast<uint4*>(table + (high * 16 + low) * 256 + (lane & 7) * 16);
      row[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      row[kSecondPart / 16] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
    }
  }
}

template <int NT>
struct AxpyWarp {
  using S = AxpyShape<NT>;
  using P = Pair<__nv_bfloat16>;
  using Sums = float[S::kBlocks][4][NT][4];

  const AxpyArgs& a;
  Decoder<kCode4, __nv_bfloat16> table;
  uint8_t* region;  // this warp's
  int lane, g, t;
  int strip;                         // its first 64 outs
  const uint8_t *codes, *scale, *x;  // at the first stored row: this lane's cell, its scale, its matrix
  bool has_codes, has_scale;

  __device__ __forceinline__ void start(int matrix, int64_t stored) {
    const int cell = strip * 2 + lane % 8, outs = (strip + lane % 4) * 64;
    has_codes = cell * 16 < a.row_bytes, has_scale = outs < a.scale_cols * a.block;
    codes = a.codes + stored * a.codes_batch + cell * 16;
    scale = a.scale + stored * a.scale_batch + outs / a.block * item_size(a.scale_dtype);
    x = a.x + matrix * a.x_batch;
  }

  // Cells of 32 bytes change places with the stored row, so that a warp that reads those of four rows uses all banks.
  static __device__ __forceinline__ uint32_t place(int row, int block) {
    return ((row * S::kBlocks + block) ^ (row >> 2 & 3)) * 32;
  }
  // Asks for the codes and x of a stage. Codes of stored rows that do not exist stay what they are: x is zero there.
  __device__ __forceinline__ void issue(int stage, int slot) const {
    const uint32_t to = shared_address(region) + slot * S::kStage;
    const int cell = lane % 8, left = a.deep - stage * S::kDeep;
    const uint8_t* from = codes + static_cast<int64_t>(stage * S::kDeep + lane / 8) * a.row_bytes;
#pragma unroll
    for (int i = 0; i < S::kDeep / 4; ++i) {
      const int row = lane / 8 + i * 4;
      if (has_codes && row < left) copy_async16(to + place(row, cell / 2) + cell % 2 * 16, from);
      from += 4 * a.row_bytes;
    }
    const int row = lane / 2, piece = lane % 2;  // of x, eight columns each
    if (row >= NT * 8) return;
    const bool there = row < a.m && piece * 8 < left;
    const int64_t at = there ? static_cast<int64_t>(row) * a.deep + stage * S::kDeep + piece * 8 : 0;
    copy_async16(to + S::kCodes + S::kScales + row * 32 + piece * 16, x + at * 2, there ? 16 : 0);
  }
  // Those of two stored rows; a lane has the same 64 outs in all stages.
  __device__ __forceinline__ float2 fetch_scales(int stage, int last) const {
    const int64_t at = stage * S::kDeep + lane / 4 * 2;
    const bool some = has_scale && stage < last;
    return make_float2(some && at < a.deep ? load_float(scale, at * a.scale_cols, a.scale_dtype) : 0.f,
                       some && at + 1 < a.deep ? load_float(scale, (at + 1) * a.scale_cols, a.scale_dtype) : 0.f);
  }
  static __device__ __forceinline__ float rest_of(float s) {
    const uint32_t bits = __float_as_uint(s);
    return isfinite(s) ? __uint_as_float(bits | 1) - __uint_as_float(bits & 0xFFFF0000u) : 0.f;
  }
  // Side by side: both first parts, both second ones.
  __device__ __forceinline__ void put_scales(float2 s, int slot) const {
    *reinterpret_cast<uint2*>(region + slot * S::kStage + S::kCodes + lane % 4 * 64 + lane / 4 * 8) =
        make_uint2(__byte_perm(__float_as_uint(s.x), __float_as_uint(s.y), 0x7632), P::pack(rest_of(s.x), rest_of(s.y)));
  }

  static __device__ __forceinline__ uint32_t upper(uint32_t one, uint32_t two) {
    return (one & 0xF0F0F0F0u) | ((two >> 4) & 0x0F0F0F0Fu);
  }
  static __device__ __forceinline__ uint32_t lower(uint32_t one, uint32_t two) {
    return ((one << 4) & 0xF0F0F0F0u) | (two & 0x0F0F0F0Fu);
  }
  __device__ __forceinline__ void multiply(Sums& sums, int slot) const {
    const uint8_t* here = region + slot * S::kStage;
    uint2 raw[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      raw[n] = *reinterpret_cast<const uint2*>(here + S::kCodes + S::kScales + n * 256 + g * 32 + t * 8);
    }
#pragma unroll
    for (int k = 0; k < S::kBlocks; ++k) {
      const uint4 s = *reinterpret_cast<const uint4*>(here + S::kCodes + k * 64 + t * 16);
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = *reinterpret_cast<const uint32_t*>(here + place(4 * t + j, k) + g * 4);
      uint32_t b[NT][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        b[n][0] = P::fma(raw[n].x, s.x, P::mul(raw[n].x, s.y));
        b[n][1] = P::fma(raw[n].y, s.z, P::mul(raw[n].y, s.w));
      }
      const uint32_t even[2] = {upper(w[0], w[1]), upper(w[2], w[3])}, odd[2] = {lower(w[0], w[1]), lower(w[2], w[3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t frag[4] = {table.pair(even[0], i), table.pair(odd[0], i), table.pair(even[1], i, 1), table.pair(odd[1], i, 1)};
#pragma unroll
        for (int n = 0; n < NT; ++n) mma<__nv_bfloat16>(sums[k][i][n], frag, b[n][0], b[n][1]);
      }
    }
  }

  // Every lane has the outs 8g to 8g + 7 of 64 for two columns of x: four units of 512 bytes.
  __device__ __forceinline__ void put_sums(const Sums& sums) const {
#pragma unroll
    for (int k = 0; k < S::kBlocks; ++k)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + 2 * t + e >= a.m) continue;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int unit = (k * NT + n) * 4 + e * 2 + h;
            const float(&one)[4] = sums[k][2 * h][n], (&two)[4] = sums[k][2 * h + 1][n];
            *reinterpret_cast<float4*>(region + unit * 512 + lane * 16) = make_float4(one[e], one[e + 2], two[e], two[e + 2]);
          }
        }
  }
  __device__ __forceinline__ int column_of(int unit) const { return (unit >> 2) % NT * 8 + 2 * t + (unit >> 1 & 1); }
  __device__ __forceinline__ void store(int matrix, int unit, float4 v) const {
    const int out = (strip + (unit >> 2) / NT) * 64 + g * 8 + (unit & 1) * 4;
    if (out >= a.outs) return;
    __nv_bfloat16* to = a.y + matrix * a.y_batch + static_cast<int64_t>(column_of(unit)) * a.outs + out;
    v.x *= a.factor, v.y *= a.factor, v.z *= a.factor, v.w *= a.factor;
    if (a.outs % 4 == 0) {
      *reinterpret_cast<uint2*>(to) = make_uint2(P::pack(v.x, v.y), P::pack(v.z, v.w));
      return;
    }
    const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (out + e < a.outs) to[e] = __float2bfloat16(four[e]);
    }
  }
};
#endif

template <int NT>
__global__ void __launch_bounds__(AxpyShape<NT>::kThreads, 1) axpy_kernel(const __grid_constant__ AxpyArgs a) {
#if EFORMER_HAS_WGMMA
  using W = AxpyWarp<NT>;
  using S = AxpyShape<NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int split = blockIdx.y, splits = gridDim.y, matrix = blockIdx.z;
  W w{a, {shared, static_cast<uint32_t>(lane * 4)}};
  w.lane = lane, w.g = lane / 4, w.t = lane % 4, w.strip = blockIdx.x * S::kBlocks;
  w.region = shared + kTableBytes + warp * S::kRegion;
  w.start(matrix, first_matrix(a.stack) + matrix);
  const int first = split * a.stages_per_split + warp, last = min(a.stages, (split + 1) * a.stages_per_split);
  constexpr int kAhead = S::kRing - 1;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * S::kWarps < last) w.issue(first + i * S::kWarps, i);
    commit_copies();
  }
  float2 early[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) early[i] = w.fetch_scales(first + i * S::kWarps, last);
  float2 next = w.fetch_scales(first + kAhead * S::kWarps, last);
  fill_fine_table<S::kWarps>(shared, a.book, warp, lane);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) w.put_scales(early[i], i);
  __syncthreads();
  typename W::Sums sums;
#pragma unroll
  for (int i = 0; i < S::kBlocks * NT * 16; ++i) sums[i / (NT * 16)][i / (NT * 4) % 4][i / 4 % NT][i % 4] = 0.f;
  int slot = 0;
#pragma unroll 1
  for (int stage = first; stage < last; stage += S::kWarps) {
    wait_for_all_but<S::kRing - 2>();
    __syncwarp();  // the stage is there, and nobody reads the one before any more
    const int free = slot == 0 ? kAhead : slot - 1, ahead = stage + kAhead * S::kWarps;
    if (ahead < last) {
      w.put_scales(next, free);
      w.issue(ahead, free);
      next = w.fetch_scales(ahead + S::kWarps, last);
    }
    commit_copies();
    w.multiply(sums, slot);
    slot = slot == kAhead ? 0 : slot + 1;
  }
  __syncwarp();
  w.put_sums(sums);
  __syncthreads();
  uint8_t* mine = shared + kTableBytes + lane * 16;
#pragma unroll 2
  for (int unit = warp; unit < S::kUnits; unit += S::kWarps) {
    if (w.column_of(unit) >= a.m) continue;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < S::kWarps; ++i) {
      const float4 part = *reinterpret_cast<const float4*>(mine + i * S::kRegion + unit * 512);
      v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
    }
    if (splits == 1) {
      w.store(matrix, unit, v);
    } else {
      *reinterpret_cast<float4*>(mine + unit * 512) = v;
    }
  }
  if (splits == 1) return;
  cluster_sync();
  for (int unit = warp * splits + split; unit < S::kUnits; unit += S::kWarps * splits) {
    if (w.column_of(unit) >= a.m) continue;
    float4 part[kAxpySplits], v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kAxpySplits; ++i) {
      if (i < splits) part[i] = load_from_block(in_block(shared_address(mine) + unit * 512, i));
    }
#pragma unroll
    for (int i = 0; i < kAxpySplits; ++i) {
      if (i < splits) v.x += part[i].x, v.y += part[i].y, v.z += part[i].z, v.w += part[i].w;
    }
    w.store(matrix, unit, v);
  }
  cluster_sync();  // nobody leaves while others read
#endif
}

}  // namespace eformer

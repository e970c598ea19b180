// y = x @ D for at most 64 rows of x and the formats of 4 bits: the gradient's form, where stored rows lie along the outs.
//
// A pair of neighbours along the depth comes out of two stored rows: their nibbles are merged into bytes, each of which is
// looked up in a table of 256 pairs. That gives the left operand of `mma.m16n8k16`, 16 outs times 16 stored rows, as it is
// wanted: lane (g, t) has the stored rows 4t to 4t + 3 and, of each 64 outs, those 8g to 8g + 7. All outs of an instruction
// share a scale per stored row, so x is what is multiplied by it, rounded once to bf16, and sums stay in registers over
// the whole depth. A scale is the sum of two bf16; the second is not zero, so that an infinity in x stays one.
//
// bf16 holds the 16 values of NF4 badly, so they are rounded in sixteen ways, by the place of a stored row in sixteen.
//
// A block owns a strip of up to 256 outs and a part of the depth. Its teams of SIDES warps take stages of the depth in
// turn, the warps of a team different outs of a stage, and a team copies its own stages into a ring of its own and waits
// for nobody else. At the end the sums of all teams are added up, then those of the blocks that share a strip, which are a
// cluster: always in the same order.
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

// NT: columns of eight rows of x. OB: blocks of 64 outs of a warp. STEPS: of 16 stored rows, in a stage.
template <int NT, int OB, int SIDES, int TEAMS, int STEPS, int RING>
struct AxpyShape {
  static constexpr int kWarps = SIDES * TEAMS, kThreads = kWarps * 32, kTeam = SIDES * 32;
  static constexpr int kBlocks = OB * SIDES;  // of 64 outs
  static constexpr int kDeep = 16 * STEPS;
  static constexpr int kCodes = kDeep * kBlocks * 32, kScales = kDeep * kBlocks * 4, kX = kDeep * NT * 16;
  static constexpr int kStage = ceil_div(kCodes + kScales + kX, 128) * 128;
  // Four sums of every lane are a unit of 512 bytes: two columns of x and two halves of the outs per 64 outs.
  static constexpr int kUnits = kBlocks * NT * 4, kSums = kUnits * 512;
  static constexpr int kRegion = RING * kStage > kSums ? RING * kStage : kSums;  // of a team: its ring, then its sums
  static constexpr int kShared = kTableBytes + TEAMS * kRegion;
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4, "the exchange of places is made for these");
  static_assert(kTeam % (2 * kBlocks) == 0 && RING >= 2, "a thread stays with its outs");
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

template <int NT, int OB, int SIDES, int TEAMS, int STEPS, int RING>
struct AxpyWarp {
  using S = AxpyShape<NT, OB, SIDES, TEAMS, STEPS, RING>;
  using P = Pair<__nv_bfloat16>;
  using Sums = float[OB][4][NT][4];
  static constexpr int kPairs = ceil_div(S::kDeep / 2 * S::kBlocks, S::kTeam);  // of scales, per thread and stage
  struct Scales {
    float v[kPairs][2];
  };

  const AxpyArgs& a;
  Decoder<kCode4, __nv_bfloat16> table;
  uint8_t* region;                   // this team's
  int lane, g, t, side, team, thread;  // `thread` of the team
  int strip;                         // its first 64 outs
  const uint8_t *codes, *scale, *x;  // at the first stored row: this thread's cell, its scale, its matrix
  bool has_codes, has_scale;

  __device__ __forceinline__ void start(int matrix, int64_t stored) {
    const int cell = strip * 2 + thread % (2 * S::kBlocks), outs = (strip + thread % S::kBlocks) * 64;
    has_codes = cell * 16 < a.row_bytes, has_scale = outs < a.scale_cols * a.block;
    codes = a.codes + stored * a.codes_batch + cell * 16;
    scale = a.scale + stored * a.scale_batch + outs / a.block * item_size(a.scale_dtype);
    x = a.x + matrix * a.x_batch;
  }
  __device__ __forceinline__ void team_sync() const {
    if constexpr (SIDES == 1) {
      __syncwarp();
    } else {
      some_sync<S::kTeam>(team + 1);
    }
  }

  // Cells of 32 bytes change places with the stored row, so that a warp that reads those of four rows uses all banks.
  static __device__ __forceinline__ uint32_t place(int row, int block) {
    return ((row * S::kBlocks + block) ^ (row >> 2 & 3)) * 32;
  }
  // Asks for the codes and x of a stage. Codes of stored rows that do not exist stay what they are: x is zero there.
  __device__ __forceinline__ void issue(int stage, int slot) const {
    const uint32_t to = shared_address(region) + slot * S::kStage;
    constexpr int kCells = 2 * S::kBlocks, kRows = S::kTeam / kCells;
    const int row0 = thread / kCells, cell = thread % kCells, left = a.deep - stage * S::kDeep;
    const uint8_t* from = codes + static_cast<int64_t>(stage * S::kDeep + row0) * a.row_bytes;
#pragma unroll
    for (int row = row0; row < S::kDeep + row0; row += kRows) {
      if (has_codes && row < left) copy_async16(to + place(row, cell / 2) + cell % 2 * 16, from);
      from += kRows * a.row_bytes;
    }
    constexpr int kPieces = 2 * STEPS;  // of x, eight columns each
#pragma unroll
    for (int i = 0; i < ceil_div(NT * 8 * kPieces, S::kTeam); ++i) {
      const int c = thread + i * S::kTeam, row = c / kPieces, piece = c % kPieces;
      if (NT * 8 * kPieces % S::kTeam != 0 && row >= NT * 8) break;
      const bool there = row < a.m && piece * 8 < left;
      const int64_t at = there ? static_cast<int64_t>(row) * a.deep + stage * S::kDeep + piece * 8 : 0;
      copy_async16(to + S::kCodes + S::kScales + piece / 2 * (NT * 256) + row * 32 + piece % 2 * 16, x + at * 2, there ? 16 : 0);
    }
  }
  __device__ __forceinline__ Scales fetch_scales(int stage, int last) const {
    Scales found;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 2 * (thread / S::kBlocks + i * (S::kTeam / S::kBlocks)) + e, at = stage * S::kDeep + row;
        const bool there = has_scale && stage < last && row < S::kDeep && at < a.deep;
        found.v[i][e] = there ? load_float(scale, static_cast<int64_t>(at) * a.scale_cols, a.scale_dtype) : 0.f;
      }
    return found;
  }
  static __device__ __forceinline__ float rest_of(float s) {
    const uint32_t bits = __float_as_uint(s);
    return isfinite(s) ? __uint_as_float(bits | 1) - __uint_as_float(bits & 0xFFFF0000u) : 0.f;
  }
  // Those of two stored rows side by side: both first parts, both second ones.
  __device__ __forceinline__ void put_scales(const Scales& s, int slot) const {
    uint8_t* to = region + slot * S::kStage + S::kCodes + thread % S::kBlocks * 64;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = thread / S::kBlocks + i * (S::kTeam / S::kBlocks);
      if (S::kDeep / 2 * S::kBlocks % S::kTeam != 0 && pair >= S::kDeep / 2) break;
      const float one = s.v[i][0], two = s.v[i][1];
      *reinterpret_cast<uint2*>(to + pair / 8 * (S::kBlocks * 64) + pair % 8 * 8) =
          make_uint2(__byte_perm(__float_as_uint(one), __float_as_uint(two), 0x7632), P::pack(rest_of(one), rest_of(two)));
    }
  }

  static __device__ __forceinline__ uint32_t upper(uint32_t one, uint32_t two) {
    return (one & 0xF0F0F0F0u) | ((two >> 4) & 0x0F0F0F0Fu);
  }
  static __device__ __forceinline__ uint32_t lower(uint32_t one, uint32_t two) {
    return ((one << 4) & 0xF0F0F0F0u) | (two & 0x0F0F0F0Fu);
  }
  __device__ __forceinline__ void multiply(Sums& sums, int slot) const {
    const uint8_t* here = region + slot * S::kStage;
    const uint8_t* x_here = here + S::kCodes + S::kScales + g * 32 + t * 8;
    const uint8_t* scales_here = here + S::kCodes + side * (OB * 64) + t * 16;
    const uint8_t* codes_here[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes_here[i] = here + t * (S::kBlocks * 128) + (i ^ t ^ (side * OB)) * 32 + g * 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint2 raw[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) raw[n] = *reinterpret_cast<const uint2*>(x_here + step * (NT * 256) + n * 256);
#pragma unroll
      for (int k = 0; k < OB; ++k) {
        const uint4 s = *reinterpret_cast<const uint4*>(scales_here + (step * S::kBlocks + k) * 64);
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int cell = j * S::kBlocks;
          w[j] = *reinterpret_cast<const uint32_t*>(codes_here[(cell & 3) | k] + (step * 16 * S::kBlocks + (cell & ~3)) * 32);
        }
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
  }

  // Every lane has the outs 8g to 8g + 7 of 64 for two columns of x: four units of 512 bytes.
  __device__ __forceinline__ void put_sums(const Sums& sums) const {
#pragma unroll
    for (int k = 0; k < OB; ++k)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + 2 * t + e >= a.m) continue;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int unit = ((side * OB + k) * NT + n) * 4 + e * 2 + h;
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

template <int NT, int OB, int SIDES, int TEAMS, int STEPS, int RING>
__global__ void __launch_bounds__(SIDES* TEAMS * 32, 1) axpy_kernel(const __grid_constant__ AxpyArgs a) {
#if EFORMER_HAS_WGMMA
  using W = AxpyWarp<NT, OB, SIDES, TEAMS, STEPS, RING>;
  using S = typename W::S;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int split = blockIdx.y, splits = gridDim.y, matrix = blockIdx.z;
  W w{a, {shared, static_cast<uint32_t>(lane * 4)}};
  w.lane = lane, w.g = lane / 4, w.t = lane % 4, w.side = warp % SIDES, w.team = warp / SIDES;
  w.thread = w.side * 32 + lane, w.strip = blockIdx.x * S::kBlocks;
  w.region = shared + kTableBytes + w.team * S::kRegion;
  w.start(matrix, first_matrix(a.stack) + matrix);
  const int first = split * a.stages_per_split + w.team, last = min(a.stages, (split + 1) * a.stages_per_split);
  constexpr int kAhead = RING - 1;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * TEAMS < last) w.issue(first + i * TEAMS, i);
    commit_copies();
  }
  typename W::Scales early[kAhead], next;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) early[i] = w.fetch_scales(first + i * TEAMS, last);
  next = w.fetch_scales(first + kAhead * TEAMS, last);
  fill_fine_table<S::kWarps>(shared, a.book, warp, lane);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) w.put_scales(early[i], i);
  __syncthreads();
  typename W::Sums sums;
#pragma unroll
  for (int i = 0; i < OB * NT * 16; ++i) sums[i / (NT * 16)][i / (NT * 4) % 4][i / 4 % NT][i % 4] = 0.f;
  int slot = 0;
#pragma unroll 1
  for (int stage = first; stage < last; stage += TEAMS) {
    wait_for_all_but<RING - 2>();
    w.team_sync();  // the stage is there, and nobody reads the one before any more
    const int free = slot == 0 ? RING - 1 : slot - 1, ahead = stage + kAhead * TEAMS;
    if (ahead < last) {
      w.put_scales(next, free);
      w.issue(ahead, free);
      next = w.fetch_scales(ahead + TEAMS, last);
    }
    commit_copies();
    w.multiply(sums, slot);
    slot = slot == RING - 1 ? 0 : slot + 1;
  }
  w.team_sync();
  w.put_sums(sums);
  __syncthreads();
  uint8_t* mine = shared + kTableBytes + lane * 16;
#pragma unroll 2
  for (int unit = warp; unit < S::kUnits; unit += S::kWarps) {
    if (w.column_of(unit) >= a.m) continue;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < TEAMS; ++i) {
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

// y = (c @ W) * sx * sw for codes of 8 bits on both sides, on Hopper: y.T = W.T c.T, summed up in int32 (int8) or
// float32 (e4m3).
//
// A block owns 128 outs (rows of y.T), 64 for each of two warpgroups, and N rows of x; a third warpgroup asks the copy
// engine for stages of 128 columns. In the dot form both operands lie in shared memory as the matrix unit wants them. In the
// axpy form the outs are neighbours instead of the columns: W is transposed on its way into registers, one load and four
// byte permutations for 16 x 32 values. Blocks stay on their multiprocessor and take one tile after the other; the next
// tile is on its way while the results of this one are stored. Few tiles are split along the depth: the blocks of a cluster
// add up their sums through shared memory, always in the same order.
//
// Products of e4m3 lose bits of long sums in the matrix unit: those of a stage are added up in float32 outside of it, while
// the unit has the next rows of x, or (dot form, many rows) while it has those of the other warpgroup.
#pragma once

#include "bytes_mma.cuh"
#include "decode.cuh"
#include "parts.h"

namespace eformer {

struct BytesArgs {
  CUtensorMap w_map, x_map, y_map;
  const float* x_scale;
  const uint8_t* scale;
  void* y;
  int32_t m, outs, y_dtype, scale_dtype;
  int32_t scale_step;  // 0: one scale for all outs
  int32_t boxed;       // the copy engine stores y
  int32_t m_tiles, per_matrix, tiles;
  int32_t stages, stages_per_split;  // stages in pairs: behind the end there are zeros
  int64_t scale_batch;  // bytes
  Stack stack;
};

template <int KIND, int N>
struct BytesShape {
  static constexpr int kOuts = 128, kDeep = 128;
  static constexpr int kW = kOuts * kDeep, kX = N * kDeep, kStage = kW + kX;
  static constexpr int kPass = N > 128 ? N / 2 : N;  // rows of x whose results wait in shared memory to be stored
  static constexpr int kResults = 2 * kPass * 128;
  static constexpr int kMost = 226 * 1024, kFit = (kMost - kResults) / kStage;
  static constexpr int kStages = kFit > 12 ? 12 : kFit;
  static constexpr int kBarriers = kStages * kStage + kResults;
  static constexpr int kShared = kBarriers + 2 * kStages * 8;
  static constexpr int kPitch = kOuts + 4;  // of sums that other blocks read
  static_assert(kStages >= 3 && N * kPitch * 4 <= kStages * kStage, "does not fit");
  static constexpr int kThreads = 384, kSpare = 40, kRegisters = 232;
};

#if EFORMER_HAS_WGMMA

template <int KIND, int FORM, int N>
struct BytesBlock {
  using S = BytesShape<KIND, N>;
  using Sum = SumOf<KIND>;
  const BytesArgs& a;
  uint8_t* shared;
  uint64_t *full, *empty;
  int first, last;  // stages of this block
  int out0, m0, matrix, first_stored;

  __device__ __forceinline__ uint32_t w_at(int slot) const { return shared_address(shared) + slot * S::kStage; }
  __device__ __forceinline__ uint32_t x_at(int slot) const { return w_at(slot) + S::kW; }
  __device__ __forceinline__ uint32_t results_at(int group) const {
    return shared_address(shared) + S::kStages * S::kStage + group * (S::kResults / 2);
  }
  // Neighbours in time share outs, so that W comes from memory once.
  __device__ __forceinline__ void go_to(int tile) {
    matrix = tile / a.per_matrix;
    const int here = tile - matrix * a.per_matrix;
    out0 = here / a.m_tiles * S::kOuts, m0 = here % a.m_tiles * N;
  }

  __device__ __forceinline__ void load_w(int slot, int stage) const {
    barrier_arrive_expecting(&full[slot], S::kStage);
    const int deep = stage * S::kDeep;
    copy_box(w_at(slot), &a.w_map, FORM == kDot ? deep : out0, FORM == kDot ? out0 : deep, first_stored + matrix, &full[slot]);
  }
  __device__ __forceinline__ void load_x(int slot, int stage) const {
    copy_box(x_at(slot), &a.x_map, stage * S::kDeep, m0, matrix, &full[slot]);
  }
  // By one thread. Codes of x are being written by the kernel before this one, the weights are there.
  __device__ __forceinline__ void load() {
    int slot = 0, phase = 1, tile = blockIdx.x;
    go_to(tile);
    const int early = min(S::kStages, last - first);
    for (int i = 0; i < early; ++i) load_w(i, first + i);
    wait_for_previous_kernel();
    for (int i = 0; i < early; ++i) load_x(i, first + i);
    int stage = first + early;
    if (early == S::kStages) phase = 0; else slot = early;
    for (; tile < a.tiles; tile += gridDim.x, stage = first) {
      go_to(tile);
#pragma unroll 1
      for (; stage < last; ++stage) {
        barrier_wait(&empty[slot], phase);
        load_w(slot, stage);
        load_x(slot, stage);
        if (++slot == S::kStages) slot = 0, phase ^= 1;
      }
    }
  }

  // Integers in the dot form come from shared memory; everything else goes through registers.
  static constexpr bool kInRegisters = FORM == kAxpy || KIND != kInt8;

  // The left operand of four instructions. Dot form: 16 rows of outs.
  struct Lanes {
    AcrossLanes across;
    uint32_t row;
    int chunk;
    __device__ __forceinline__ void start(int group, int warp, int lane) {
      if constexpr (FORM == kDot) {
        row = group * 64 + warp * 16 + lane % 16, chunk = lane / 16;
      } else {
        across.start(lane), chunk = group * 4 + warp;
      }
    }
    __device__ __forceinline__ void load(uint32_t (&frag)[4][4], uint32_t w) const {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (FORM == kDot) {
          load_matrices(frag[k], w + row * 128 + (((2 * k + chunk) ^ (row & 7)) << 4));
        } else {
          across.load(frag[k], w, k, chunk);
        }
      }
    }
  };

  struct Place {
    int slot = 0, phase = 0;
  };

  // Four instructions: a stage, `WIDTH` rows of x of it.
  template <int WIDTH, bool REGISTERS = kInRegisters>
  __device__ __forceinline__ void issue(Sum (&acc)[WIDTH / 2], const uint32_t (&frag)[4][4], uint32_t w, uint32_t x, bool keep) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (REGISTERS) {
        wgmma_bytes<KIND, WIDTH>(acc, frag[k], describe_x(x) + 2 * k, k > 0 || keep ? 1 : 0);
      } else {
        wgmma_bytes<KIND, WIDTH>(acc, describe_x(w) + 2 * k, describe_x(x) + 2 * k, k > 0 || keep ? 1 : 0);
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ static void advance(Place& p) {
    if (++p.slot == S::kStages) p.slot = 0, p.phase ^= 1;
  }

  // Integers: the matrix unit has the next stage before the last one is done. Stages come in pairs.
  __device__ __forceinline__ void multiply(int (&acc)[N / 2], Place& p, const Lanes& lanes, int group, int lane) {
    uint32_t frag[2][4][4];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = 0;
    int done = -1;
#pragma unroll 1
    for (int stage = first; stage < last; stage += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        barrier_wait(&full[p.slot], p.phase);
        if constexpr (kInRegisters) lanes.load(frag[i], w_at(p.slot));
        issue<N>(acc, frag[i], w_at(p.slot) + group * 8192, x_at(p.slot), true);
        wgmma_wait<1>();
        if (done >= 0 && lane == 0) barrier_arrive(&empty[done]);
        done = p.slot;
        advance(p);
      }
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&empty[done]);
  }
  // Floats from shared memory: the warpgroups take turns with half of the rows of x.
  static constexpr bool kTurns = KIND != kInt8 && FORM == kDot && N == 256;
  __device__ __forceinline__ static void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(4 + group) : "memory"); }
  __device__ __forceinline__ static void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(4 + group) : "memory"); }
  __device__ __forceinline__ void multiply_in_turns(float (&sums)[N / 2], Place& p, int group, int lane) {
    float acc[N / 4];
    const uint32_t none[4][4] = {};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0.f;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, advance(p)) {
      barrier_wait(&full[p.slot], p.phase);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        take_turn(group);
        issue<N / 2, false>(acc, none, w_at(p.slot) + group * 8192, x_at(p.slot) + half * (N / 2 * 128), false);
        give_turn(1 - group);
        wgmma_wait<0>();
        if (half == 1 && lane == 0) barrier_arrive(&empty[p.slot]);
#pragma unroll
        for (int i = 0; i < N / 4; ++i) sums[half * (N / 4) + i] += acc[i];
      }
    }
  }
  // Floats: 64 rows of x at a time, whose sums over one stage are added to those before while the matrix unit has the next.
  __device__ __forceinline__ void multiply(float (&sums)[N / 2], Place& p, const Lanes& lanes, int group, int lane) {
    if constexpr (kTurns) return multiply_in_turns(sums, p, group, lane);
    constexpr int kPart = N > 64 ? 64 : N, kParts = N / kPart;
    uint32_t frag[4][4];
    float acc[2][kPart / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kPart / 2; ++i) acc[1][i] = 0.f;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      barrier_wait(&full[p.slot], p.phase);
      lanes.load(frag, w_at(p.slot));
      if constexpr (kParts == 1) {
        issue<kPart>(acc[0], frag, 0, x_at(p.slot), false);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kPart / 2; ++i) sums[i] += acc[0][i];
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          issue<kPart>(acc[part % 2], frag, 0, x_at(p.slot) + part * kPart * 128, false);
          wgmma_wait<1>();
          const int before = (part + kParts - 1) % kParts * (kPart / 2);  // zeros in the first stage
#pragma unroll
          for (int i = 0; i < kPart / 2; ++i) sums[before + i] += acc[(part + 1) % 2][i];
        }
        wgmma_wait<0>();
      }
      if (lane == 0) barrier_arrive(&empty[p.slot]);
      advance(p);
    }
    if constexpr (kParts > 1) {
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) sums[N / 2 - kPart / 2 + i] += acc[1][i];
    }
  }

  __device__ __forceinline__ float scale_of(int out) const {
    return out < a.outs ? load_float(a.scale + (first_stored + matrix) * a.scale_batch, out * a.scale_step, a.scale_dtype) : 0.f;
  }
  __device__ __forceinline__ float x_scale_of(int row) const {
    return row < a.m ? a.x_scale[static_cast<int64_t>(matrix) * a.m + row] : 0.f;
  }
  // Of the sums of a thread: the first, or the second, of its two outs.
  __device__ __forceinline__ static int out_of(int group, int warp, int g, int h) {
    return group * 64 + warp * 16 + (FORM == kDot ? g + 8 * h : 2 * g + h);
  }

  // 16-bit results, through shared memory, by the copy engine.
  template <class E>
  __device__ __forceinline__ void store_boxes(const Sum (&acc)[N / 2], int group, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const float s0 = scale_of(out0 + out_of(group, warp, g, 0)), s1 = scale_of(out0 + out_of(group, warp, g, 1));
    const bool leader = warp == 0 && lane == 0;
    const uint32_t results = results_at(group);
#pragma unroll
    for (int pass = 0; pass < N / S::kPass; ++pass) {
      if (leader) wait_for_stores();
      asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
#pragma unroll
      for (int j = 0; j < S::kPass / 8; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int base = (pass * (S::kPass / 8) + j + i) * 4, row = m0 + pass * S::kPass + (j + i) * 8 + 2 * t;
          const float x0 = x_scale_of(row), x1 = x_scale_of(row + 1);
          const float v00 = static_cast<float>(acc[base]) * (x0 * s0), v01 = static_cast<float>(acc[base + 1]) * (x1 * s0);
          const float v10 = static_cast<float>(acc[base + 2]) * (x0 * s1), v11 = static_cast<float>(acc[base + 3]) * (x1 * s1);
          if constexpr (FORM == kDot) {
            words[2 * i] = Pair<E>::pack(v00, v01), words[2 * i + 1] = Pair<E>::pack(v10, v11);
          } else {
            words[2 * i] = Pair<E>::pack(v00, v10), words[2 * i + 1] = Pair<E>::pack(v01, v11);
          }
        }
        if constexpr (FORM == kDot) {
          const int row = (j + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
          store_transposed(results + row * 128 + ((chunk ^ (row & 7)) << 4), words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = (j + i / 2) * 8 + 2 * t + i % 2, chunk = warp * 2 + g / 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(results + row * 128 + ((chunk ^ (row & 7)) << 4) + g % 4 * 4),
                         "r"(words[i])
                         : "memory");
          }
        }
      }
      order_before_bulk_copies();
      asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
      if (leader) store_box(&a.y_map, results, out0 + group * 64, m0 + pass * S::kPass, matrix);
    }
  }
  // Results of any type, one by one.
  __device__ __forceinline__ void store_each(const Sum (&acc)[N / 2], int group, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const int out[2] = {out0 + out_of(group, warp, g, 0), out0 + out_of(group, warp, g, 1)};
    const float s[2] = {scale_of(out[0]), scale_of(out[1])};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int row = m0 + i / 4 * 8 + 2 * t + i % 2, h = i / 2 % 2;
      if (row < a.m && out[h] < a.outs) {
        const int64_t to = (static_cast<int64_t>(matrix) * a.m + row) * a.outs + out[h];
        store_float(a.y, to, a.y_dtype, static_cast<float>(acc[i]) * (x_scale_of(row) * s[h]));
      }
    }
  }

  // Where blocks share a tile: sums go where the stages were, and every block of the cluster takes some rows of x.
  __device__ __forceinline__ void share_sums(const Sum (&acc)[N / 2], int group, int warp, int lane, int split, int splits) {
    asm volatile("bar.sync 1, 256;" ::: "memory");  // nobody reads the stages any more
    uint32_t* sums = reinterpret_cast<uint32_t*>(shared);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int row = i / 4 * 8 + 2 * t + i % 2;
      uint32_t bits;
      if constexpr (KIND == kInt8) bits = static_cast<uint32_t>(acc[i]); else bits = __float_as_uint(acc[i]);
      sums[row * S::kPitch + out_of(group, warp, g, i / 2 % 2)] = bits;
    }
    cluster_sync();
    const int out = threadIdx.x % 32 * 4, width = min(N, a.m - m0);
    float s[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = scale_of(out0 + out + e);
    const uint32_t from = shared_address(shared) + out * 4;
#pragma unroll 2
    for (int row = threadIdx.x / 32 * splits + split; row < width; row += 8 * splits) {
      Sum v[4] = {0, 0, 0, 0};
      for (int other = 0; other < splits; ++other) {
        const float4 part = load_from_block(in_block(from + row * (S::kPitch * 4), other));
        if constexpr (KIND == kInt8) {
          v[0] += __float_as_int(part.x), v[1] += __float_as_int(part.y);
          v[2] += __float_as_int(part.z), v[3] += __float_as_int(part.w);
        } else {
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
      const float x = x_scale_of(m0 + row);
      const int64_t to = (static_cast<int64_t>(matrix) * a.m + m0 + row) * a.outs + out0 + out;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (out0 + out + e < a.outs) store_float(a.y, to + e, a.y_dtype, static_cast<float>(v[e]) * (x * s[e]));
      }
    }
    cluster_sync();  // nobody leaves while others read
  }
};
#endif

template <int KIND, int FORM, int N>
__global__ void __launch_bounds__(384, 1) bytes_kernel(const __grid_constant__ BytesArgs a) {
#if EFORMER_HAS_WGMMA
  using S = BytesShape<KIND, N>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int split = blockIdx.y, splits = gridDim.y;
  BytesBlock<KIND, FORM, N> block{a, shared};
  block.full = reinterpret_cast<uint64_t*>(shared + S::kBarriers), block.empty = block.full + S::kStages;
  block.first_stored = first_matrix(a.stack);
  block.first = split * a.stages_per_split, block.last = min(a.stages, block.first + a.stages_per_split);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) barrier_init(&block.full[i], 1), barrier_init(&block.empty[i], 8);
    barriers_visible_to_cluster();
    order_before_bulk_copies();
  }
  __syncthreads();
  if (warp >= 8) {
    give_registers<S::kSpare>();
    if (warp == 8 && lane == 0) block.load();
    __syncwarp();
    if (splits > 1) cluster_sync(), cluster_sync();
  } else {
    take_registers<S::kRegisters>();
    const int group = warp / 4;
    typename BytesBlock<KIND, FORM, N>::Lanes lanes;
    typename BytesBlock<KIND, FORM, N>::Place place;
    lanes.start(group, warp % 4, lane);
    wait_for_previous_kernel();  // its scales of x are there
    if (BytesBlock<KIND, FORM, N>::kTurns && group == 1) block.give_turn(0);
    SumOf<KIND> acc[N / 2];
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
      block.go_to(tile);
      block.multiply(acc, place, lanes, group, lane);
      if (splits > 1) {  // one tile per cluster
        block.share_sums(acc, group, warp % 4, lane, split, splits);
      } else if (!a.boxed) {
        block.store_each(acc, group, warp % 4, lane);
      } else if (a.y_dtype == kBf16) {
        block.template store_boxes<__nv_bfloat16>(acc, group, warp % 4, lane);
      } else {
        block.template store_boxes<__half>(acc, group, warp % 4, lane);
      }
    }
    if (warp % 4 == 0 && lane == 0) wait_for_stores();
  }
#endif
}

}  // namespace eformer

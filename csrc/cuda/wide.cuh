// y = x @ D.T (dot form) or x @ D (axpy form) for many rows of x, on Hopper: y.T = W x.T, where W is decoded into
// the registers from which `wgmma` takes its left operand, and x lies in shared memory as the right one.
//
// A block owns some outs (rows of y.T) and N rows of x. One warpgroup loads: a warp asks the copy engine for codes and
// the scales of blocks, one for x; two make of the scales what is multiplied with. The other G warpgroups decode one step
// while the matrix unit works on the step before. Each value of D is decoded once per N rows of x. Blocks that share a
// tile (splits of the depth) form a cluster and add their sums through shared memory, always in the same order. With
// D = 2, half of the warpgroups take every second 64 columns instead of other outs. Values of 4 bits are rounded to 16
// bits behind the multiplication with their scale; TERMS = 2 makes them sums of two bf16, where the result is float32.
#pragma once

#include "wide_load.cuh"

namespace eformer {

#if EFORMER_HAS_WGMMA

template <int FMT, class E, int FORM, int N, int G, int D, int TILES, int TERMS>
struct WideBlock : WideLoader<FMT, E, FORM, N, G, D, TILES, TERMS> {
  using Loader = WideLoader<FMT, E, FORM, N, G, D, TILES, TERMS>;
  using typename Loader::S;
  using typename Loader::W;
  using Loader::a, Loader::shared, Loader::full_x, Loader::empty_x, Loader::full_c, Loader::empty_c;
  using Loader::out0, Loader::m0, Loader::matrix, Loader::stored, Loader::first, Loader::last;
  using Loader::x_at, Loader::codes_at, Loader::scales_at;

  __device__ __forceinline__ void multiply(float (&acc)[S::kTiles][N / 2], int group, int lane, int warp) {
    using Decoder = WideDecoder<FMT, E, FORM, S, TERMS>;
    Decoder decoder;
    decoder.start(shared_address(shared), shared_address(shared + W::kConstants), group % W::kSides, warp, lane);
    const int turn = group / W::kSides;
    Ring<W::kCodeStages> codes;
    Ring<W::kXStages> x;
    x.slot = turn;
    int done = -1;  // the slot of x that is free when the groups before the last one are done
    uint32_t frag[2][TERMS][16];
    constexpr int kHere = S::kXStages / D, kCount = kHere * S::kSteps;  // steps in a stage of codes
    static_assert(kCount % 2 == 0, "two steps take turns with the registers");
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, codes.next()) {
      barrier_wait(&full_c[codes.slot], codes.phase);
      const uint32_t codes_here = codes_at(codes.slot), scales_here = scales_at(codes.slot);
      typename Decoder::Words words;
      if constexpr (S::kAhead) decoder.load(words, codes_here, scales_here, turn, 0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int part = i % S::kSteps;
        uint32_t(&mine)[TERMS][16] = frag[i % 2];
        if constexpr (!S::kAhead) decoder.load(words, codes_here, scales_here, i / S::kSteps * D + turn, part);
        decoder.decode(mine, words);
        if (S::kAhead && i + 1 < kCount) {
          decoder.load(words, codes_here, scales_here, (i + 1) / S::kSteps * D + turn, (i + 1) % S::kSteps);
        }
        if (part == 0) barrier_wait(&full_x[x.slot], x.phase);
        const uint64_t b = describe_x(x_at(x.slot));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // four instructions: a tile 64 deep, or two tiles 32 deep
          const int tile = k % S::kTiles, deep = part * 2 + k / S::kTiles;
#pragma unroll
          for (int term = 0; term < TERMS; ++term) wgmma<E, N>(acc[tile], mine[term] + 4 * k, b + deep * 2);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (part == 0) {
          if (done >= 0 && lane == 0) barrier_arrive(&empty_x[done]);
          done = x.slot;
        }
        if (part == S::kSteps - 1) {
#pragma unroll
          for (int n = 0; n < D; ++n) x.next();
        }
      }
      __syncwarp();
      barrier_arrive(&empty_c[codes.slot]);
    }
    wgmma_wait<0>();
  }

  // Leaves the sums of a warpgroup in shared memory, one row of x after the other. In the axpy form a lane's
  // outs are neighbours (with one tile of 4-bit values, two warps take turns), and four of them change places with the row,
  // for lanes not to meet in a bank.
  __device__ __forceinline__ void put_sums(const float (&acc)[S::kTiles][N / 2], int group, int lane, int warp) {
    float* sums = reinterpret_cast<float*>(shared + W::kTable) + group / W::kSides * (N * W::kPitch);
    const int side = group % W::kSides, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const int column = i / 4 * 8 + 2 * t + i % 2, h = i / 2 % 2;
        const int out = FORM == kDot         ? side * 64 + warp * 16 + g + 8 * h
                        : S::kTiles == 2 ? side * 128 + warp * 32 + g * 4 + tile * 2 + h
                        : kInNibbles<FMT> ? side * 64 + warp / 2 * 32 + g * 4 + warp % 2 * 2 + h
                                          : side * 64 + warp * 16 + g * 2 + h;
        sums[column * W::kPitch + (FORM == kDot ? out : out ^ t)] = acc[tile][i];
      }
  }

  // The blocks of a cluster that share a tile take turns with the rows of x. A thread stays with its four outs.
  __device__ __forceinline__ void take_sums(int split, int splits) {
    constexpr int kAcross = W::kOuts / 4;
    static_assert(G * 128 % kAcross == 0, "a thread stays with its outs");
    const int out = threadIdx.x % kAcross * 4, width = min(N, a.m - m0);
    const uint32_t sums = shared_address(shared) + W::kTable + out * 4;
    const uint8_t* scale = a.scale + stored * a.scale_batch;
    float factor[4] = {1.f, 1.f, 1.f, 1.f};
    if (a.out_scale) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (out0 + out + e < a.outs) factor[e] = load_float(scale, a.out_scale == 1 ? out0 + out + e : 0, a.scale_dtype);
      }
    }
#pragma unroll 4
    for (int column = threadIdx.x / kAcross * splits + split; column < width; column += G * 128 / kAcross * splits) {
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      for (int s = 0; s < splits; ++s) {
#pragma unroll
        for (int n = 0; n < D; ++n) {
          const float4 part = load_from_block(in_block(sums + (n * N + column) * (W::kPitch * 4), s));
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
      if constexpr (FORM == kAxpy) {
        const bool one = column & 2, two = column & 4;
        const float p[4] = {one ? v[1] : v[0], one ? v[0] : v[1], one ? v[3] : v[2], one ? v[2] : v[3]};
        v[0] = two ? p[2] : p[0], v[1] = two ? p[3] : p[1], v[2] = two ? p[0] : p[2], v[3] = two ? p[1] : p[3];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] *= factor[e];
      store_four(matrix * a.y_batch + static_cast<int64_t>(m0 + column) * a.outs + out0 + out, out0 + out, v);
    }
  }
  __device__ __forceinline__ void store_four(int64_t to, int out, const float (&v)[4]) const {
    if (a.outs % 4 == 0 && a.y_dtype != kF32) {
      if (out >= a.outs) return;
      const bool bf = a.y_dtype == kBf16;
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.y) + to * 2) =
          make_uint2(bf ? Pair<__nv_bfloat16>::pack(v[0], v[1]) : Pair<__half>::pack(v[0], v[1]),
                     bf ? Pair<__nv_bfloat16>::pack(v[2], v[3]) : Pair<__half>::pack(v[2], v[3]));
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (out + e < a.outs) store_float(a.y, to + e, a.y_dtype, v[e]);
    }
  }
};

// All 256 pairs of NF4 values in float32, one copy per lane, by `count` threads. `mine` is value (thread & 15).
__device__ __forceinline__ void fill_wide_table(uint8_t* table, int thread, int count, float mine) {
  for (int i = thread; i < 256 * 16; i += count) {
    const int code = i >> 4;  // sixteen lanes write one row
    const float first = __shfl_sync(~0u, mine, code >> 4), second = __shfl_sync(~0u, mine, code & 15);
    *reinterpret_cast<float4*>(table + code * 256 + (i & 15) * 16) = make_float4(first, second, first, second);
  }
}
#endif

template <int FMT, class E, int FORM, int N, int G, int D, int TILES, int TERMS>
__global__ void __launch_bounds__(WideShape<FMT, E, FORM, N, G, D, TILES, TERMS>::kThreads, 1)
    wide_kernel(const __grid_constant__ WideArgs a) {
#if EFORMER_HAS_WGMMA
  using W = WideShape<FMT, E, FORM, N, G, D, TILES, TERMS>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int split = blockIdx.y, splits = gridDim.y;
  WideBlock<FMT, E, FORM, N, G, D, TILES, TERMS> block{{a, shared}};
  const int tile = a.first_tile + blockIdx.x;
  block.out0 = tile / a.m_chunks * W::kOuts, block.m0 = tile % a.m_chunks * N;
  block.matrix = blockIdx.z, block.stored = first_matrix(a.stack) + block.matrix;
  block.first = split * a.stages_per_split, block.last = min(a.stages, block.first + a.stages_per_split);
  block.init();
  __syncthreads();
  const bool cluster = splits > 1;
  if (cluster) cluster_sync();
  if (warp >= G * 4) {
    give_registers<W::kSpare>();
    const int role = warp - G * 4;
    if (role == 0 && lane == 0) block.load_codes();
    if (role == 1 && lane == 0) block.load_x();
    if constexpr (kInBlocks<FMT>) {
      if (role >= 2) block.load_scales(threadIdx.x - G * 128 - 64);
    }
    __syncwarp();
    if (cluster) cluster_sync(), cluster_sync();
  } else {
    take_registers<W::kRegisters>();
    if constexpr (kInNibbles<FMT>) {
      if constexpr (kRough<FMT, E, TERMS>) {
        fill_rough_table<G * 128, 128>(shared, threadIdx.x, a.rough_book.v[threadIdx.x & 15]);
      } else if constexpr (kInFloat32<FMT>) {
        fill_wide_table(shared, threadIdx.x, G * 128, a.book.v[threadIdx.x & 15]);
      } else {
        fill_table<E, G * 128, 1, 128>(shared, threadIdx.x, a.book.v[threadIdx.x & 15]);
      }
      asm volatile("bar.sync 1, %0;" ::"n"(G * 128) : "memory");
    }
    float acc[W::S::kTiles][N / 2];
#pragma unroll
    for (int i = 0; i < W::S::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < N / 2; ++j) acc[i][j] = 0.f;
    block.multiply(acc, warp / 4, lane, warp % 4);
    asm volatile("bar.sync 1, %0;" ::"n"(G * 128) : "memory");  // nobody reads the stages any more
    block.put_sums(acc, warp / 4, lane, warp % 4);
    if (cluster) {
      cluster_sync();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(G * 128) : "memory");
    }
    block.take_sums(split, splits);
    if (cluster) cluster_sync();  // nobody leaves while others read
  }
#endif
}

}  // namespace eformer

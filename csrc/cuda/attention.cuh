// Attention of one token over a quantized cache, in one pass (src/eformer/_kernels/attention.py has the definition).
//
// A block takes some of the positions of one head, its warps take 16 of them at a time. Queries that share the head are the
// 16 rows of the matrix instruction, with zeros behind them. A scale of a key is applied to its score, that of a value to its
// weight. Blocks of a cluster share a head and merge what they have found through shared memory.
#pragma once

#include "attention_rows.cuh"

namespace eformer {

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * 32, kTokens = 16, kMostQueries = 16;
constexpr float kLog2e = 1.4426950408889634f;

// All threads of all blocks of the cluster; what they wrote is seen behind it.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float read_of_block(const float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
#else
  return *mine;
#endif
}

__device__ __forceinline__ float rescaled(float from, float to) { return from == -INFINITY ? 0.f : exp2f(from - to); }

// Sums of several parts, each relative to a largest score of its own, become relative to the largest of all.
struct Merged {
  float most, total, sum;
};
template <class Most, class Total, class Sum>
__device__ __forceinline__ Merged merge(int parts, Most most_of, Total total_of, Sum sum_of) {
  Merged m{-INFINITY, 0.f, 0.f};
  for (int i = 0; i < parts; ++i) m.most = fmaxf(m.most, most_of(i));
  for (int i = 0; i < parts; ++i) {
    const float factor = rescaled(most_of(i), m.most);
    m.total += total_of(i) * factor, m.sum += sum_of(i) * factor;
  }
  return m;
}

template <int D, int TERMS>
constexpr int kQueryBytes = D / 16 * TERMS * 32 * 16;

// TERMS bfloat16 make a query or a weight. With HALF at most eight queries share a head.
template <int KBITS, int VBITS, int D, int TERMS, bool HALF>
__global__ void __launch_bounds__(kAttentionThreads, D > 128 || TERMS > 1 ? 2 : 3)
    attention_kernel(const __grid_constant__ CacheAttention a) {
  using K = Keys<KBITS, D>;
  using V = Values<VBITS, D>;
  constexpr int kRows = HALF ? 1 : 2;
  extern __shared__ __align__(16) uint8_t shared[];
  uint4* const queries = reinterpret_cast<uint4*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + kQueryBytes<D, TERMS>);
  float* const mosts = sums + kAttentionWarps * a.group * D;  // one entry for each warp and query, then the block's
  float* const totals = mosts + (kAttentionWarps + 1) * kMostQueries;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = static_cast<int>(blockIdx.x % a.splits), head = static_cast<int>(blockIdx.x / a.splits);
  const int64_t rows = (static_cast<int64_t>(first_matrix(a.stack)) + head) * a.positions;
  const int last = min(__ldg(a.place), a.positions - 1), first = a.window ? max(__ldg(a.place) + 1 - a.window, 0) : 0;
  const int count = max(last + 1 - first, 0);
  const int share = ceil_div(ceil_div(count, a.splits), kTokens) * kTokens;
  const int begin = first + rank * share, end = min(begin + share, last + 1);

  K keys[2];
  V values[4];
  float key_scale[2][2][K::kBlocks], value_scale[2][2][V::kBlocks];
  // Places that do not exist are read as the last one, and masked.
  const auto row = [&](int tile, int token) { return rows + min(tile + token, end - 1); };
  const auto load_keys = [&](int tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      keys[j].load(a.keys + row(tile, 8 * j + g) * K::kBytes, t);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int b = 0; b < K::kBlocks; ++b)
          key_scale[j][e][b] = load_scale<KBITS>(a.key_scale, row(tile, 8 * j + 2 * t + e) * K::kBlocks + b);
      }
    }
  };
  const auto load_values = [&](int tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t r = row(tile, 8 * j + 2 * t + e);
        values[2 * j + e].load(a.values + r * V::kBytes, g);
#pragma unroll
        for (int b = 0; b < V::kBlocks; ++b) value_scale[j][e][b] = load_scale<VBITS>(a.value_scale, r * V::kBlocks + b);
      }
    }
  };
  constexpr int kStride = kTokens * kAttentionWarps;
  int tile = begin + warp * kTokens;
  if (tile < end) load_keys(tile), load_values(tile);

  for (int i = threadIdx.x; i < K::kSteps * 32; i += kAttentionThreads) {
    const int step = i / 32, lg = i % 32 / 4, lt = i % 4;
    uint32_t r[TERMS][4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // rows g and g + 8 of the first columns, then of the others
      const int query = lg + part % 2 * 8;
      float v[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = K::place(step, lt, part / 2, half);
        const bool there = query < a.group && at < a.size;
        v[half] = there ? load_float(a.q, (static_cast<int64_t>(head) * a.group + query) * a.size + at, a.dtype) : 0.f;
      }
      r[0][part] = pack(v[0], v[1]);
      if constexpr (TERMS > 1) r[1][part] = pack(v[0] - first_of(r[0][part]), v[1] - second_of(r[0][part]));
    }
#pragma unroll
    for (int term = 0; term < TERMS; ++term)
      queries[(step * TERMS + term) * 32 + i % 32] = make_uint4(r[term][0], r[term][1], r[term][2], r[term][3]);
  }
  __syncthreads();

  float sum[V::kTiles][4], most[kRows], total[kRows];
#pragma unroll
  for (int i = 0; i < V::kTiles; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
#pragma unroll
  for (int h = 0; h < kRows; ++h) most[h] = -INFINITY, total[h] = 0.f;

  for (; tile < end; tile += kStride) {
    float score[2][4] = {};
#pragma unroll
    for (int b = 0; b < K::kBlocks; ++b) {
      float part[2][4] = {};
#pragma unroll
      for (int s = 0; s < K::kStepsOfBlock; ++s) {
        const int step = b * K::kStepsOfBlock + s;
        const uint2 k0 = keys[0].fragment(step), k1 = keys[1].fragment(step);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
          const uint4 q4 = queries[(step * TERMS + term) * 32 + lane];
          const uint32_t q[4] = {q4.x, q4.y, q4.z, q4.w};
          mma<__nv_bfloat16>(part[0], q, k0.x, k0.y);
          mma<__nv_bfloat16>(part[1], q, k1.x, k1.y);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[j][i] += part[j][i] * key_scale[j][i % 2][b];
      }
    }
    const int next = tile + kStride;
    if (next < end) load_keys(next);

    float weight[2][4] = {};
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      float top = most[h];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float s = score[j][2 * h + e] * a.factor;
          if (a.cap > 0.f) s = tanhf(s / a.cap) * a.cap;
          s = tile + 8 * j + 2 * t + e < end ? s * kLog2e : -INFINITY;
          score[j][2 * h + e] = s;
          top = fmaxf(top, s);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -INFINITY ? 0.f : top, shrunk = rescaled(most[h], base);
      most[h] = top;
      total[h] *= shrunk;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = exp2f(score[j][2 * h + e] - base);
          weight[j][2 * h + e] = p, total[h] += p;
        }
      }
#pragma unroll
      for (int i = 0; i < V::kTiles; ++i) sum[i][2 * h] *= shrunk, sum[i][2 * h + 1] *= shrunk;
    }
#pragma unroll
    for (int b = 0; b < V::kBlocks; ++b) {
      uint32_t p[TERMS][4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // rows g and g + 8 of the first positions, then of the others
        const int j = part / 2, h = part % 2;
        const float v0 = weight[j][2 * h] * value_scale[j][0][b], v1 = weight[j][2 * h + 1] * value_scale[j][1][b];
        p[0][part] = HALF && h ? 0u : pack(v0, v1);
        if constexpr (TERMS > 1) p[1][part] = HALF && h ? 0u : pack(v0 - first_of(p[0][part]), v1 - second_of(p[0][part]));
      }
#pragma unroll
      for (int i = 0; i < V::kTilesOfBlock; ++i) {
        const int at = b * V::kTilesOfBlock + i;
        const uint32_t v0 = V::pair(values[0], values[1], at), v1 = V::pair(values[2], values[3], at);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) mma<__nv_bfloat16>(sum[at], p[term], v0, v1);
      }
    }
    if (next < end) load_values(next);
  }

#pragma unroll
  for (int h = 0; h < kRows; ++h) {
    total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    const int query = g + 8 * h;
    if (query < a.group) {
      float* const mine = sums + (warp * a.group + query) * D;
#pragma unroll
      for (int i = 0; i < V::kTiles; ++i) {
        mine[V::place(i, 2 * t)] = sum[i][2 * h];
        mine[V::place(i, 2 * t + 1)] = sum[i][2 * h + 1];
      }
      if (t == 0) mosts[warp * kMostQueries + query] = most[h], totals[warp * kMostQueries + query] = total[h];
    }
  }
  __syncthreads();

  // Of the warps, into the place of the first; then of the blocks, which take turns with the results.
  const int all = a.group * D, own = kAttentionWarps * kMostQueries;
  const auto store = [&](int i, const Merged& m) {
    const int query = i / D, at = i % D;
    if (at < a.size) store_float(a.y, (static_cast<int64_t>(head) * a.group + query) * a.size + at, a.dtype, m.sum / m.total);
  };
  for (int i = threadIdx.x; i < all; i += kAttentionThreads) {
    const int query = i / D;
    const Merged m = merge(
        kAttentionWarps, [&](int w) { return mosts[w * kMostQueries + query]; },
        [&](int w) { return totals[w * kMostQueries + query]; }, [&](int w) { return sums[w * all + i]; });
    if (a.splits == 1) {
      store(i, m);
    } else {
      sums[i] = m.sum;
      if (i % D == 0) mosts[own + query] = m.most, totals[own + query] = m.total;
    }
  }
  if (a.splits == 1) return;
  sync_cluster();
  for (int i = rank * kAttentionThreads + threadIdx.x; i < all; i += a.splits * kAttentionThreads) {
    const int query = i / D;
    store(i, merge(
                 a.splits, [&](int r) { return read_of_block(mosts + own + query, r); },
                 [&](int r) { return read_of_block(totals + own + query, r); },
                 [&](int r) { return read_of_block(sums + i, r); }));
  }
  sync_cluster();  // nobody leaves while others read
}

}  // namespace eformer

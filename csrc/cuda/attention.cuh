// Attention of one token over a quantized cache, in one pass (src/eformer/_kernels/attention.py has the definition). The
// token's own row is quantized and written first.
//
// A block takes some of the positions of one head, its warps take 16 of them at a time. Positions are the rows of the first
// matrix instruction (keys * q.T), queries that share the head its columns; the second one (values.T * weights.T) has rows
// of values there. Codes are exact in float16. A query is scaled by a power of two, so that it is as good as exact, too; so
// are weights times scales of values, by one that all positions so far share (`limit`). Blocks of a cluster share a head and
// merge what they have found through shared memory.
#pragma once

#include "attention_rows.cuh"

namespace eformer {

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * 32, kTokens = 16, kMostSplits = 8;
constexpr float kLog2e = 1.4426950408889634f, kWeight = 16384.f;  // the largest weight

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
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// Relative to a largest score: what was relative to another.
__device__ __forceinline__ float rescaled(float from, float to) { return from == -INFINITY ? 0.f : exp2f(from - to); }
// The power of two above a magnitude, and its inverse.
__device__ __forceinline__ float limit_of(float v) {
  return __uint_as_float(min((__float_as_uint(v) & 0x7F800000u) + 0x00800000u, 0x7E000000u));
}
__device__ __forceinline__ float inverse_of(float limit) { return __uint_as_float(0x7F000000u - __float_as_uint(limit)); }
// Of the lanes that have other rows of a result than this one.
__device__ __forceinline__ float largest_of_rows(float v) {
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, apart));
  return v;
}

// What the parts of a sum have found, warps of a block or blocks of a cluster: the largest score and the total of every
// query, and a limit each.
template <int QUERIES>
struct Found {
  float most[QUERIES], total[QUERIES], limit;
};

template <int KBITS, int VBITS, int D, int DTYPE, int TILES>
struct AttentionMemory {
  static constexpr int kQueries = 8 * TILES, kRow = D + 4, kSums = TILES * (D / 16) * 4 * 32;
  float q[kQueries][kRow];
  float sums[kAttentionWarps][kSums];
  Found<kQueries> warps[kAttentionWarps], block, blocks[kMostSplits];
  float factors[kMostSplits][kQueries];
  alignas(16) uint8_t codes[2][D];
  alignas(16) uint8_t scales[2][16];
};

// TILES of eight queries. A query or a weight in float32 is a sum of two float16.
template <int KBITS, int VBITS, int D, int DTYPE, int TILES>
__global__ void __launch_bounds__(kAttentionThreads, D > 128 && TILES > 1 ? 1 : D > 128 || TILES > 1 || DTYPE == kF32 ? 2 : 4)
    attention_kernel(const __grid_constant__ CacheAttention a) {
  using K = Keys<KBITS, D>;
  using V = Values<VBITS, D>;
  using Memory = AttentionMemory<KBITS, VBITS, D, DTYPE, TILES>;
  constexpr int kTerms = DTYPE == kF32 ? 2 : 1, kOuts = D / 16, kKeyScale = K::kBlocks * K::kScaleBytes,
                kValueScale = V::kBlocks * V::kScaleBytes;
  extern __shared__ __align__(16) uint8_t shared[];
  Memory& m = *reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = static_cast<int>(blockIdx.x % a.splits), head = static_cast<int>(blockIdx.x / a.splits);
  const int place = __ldg(a.place), last = min(place, a.positions - 1), first = a.window ? max(place + 1 - a.window, 0) : 0;
  const int count = max(last + 1 - first, 0), share = ceil_div(ceil_div(count, a.splits), kTokens) * kTokens;
  const int begin = first + rank * share, end = min(begin + share, last + 1);
  const int64_t rows = (static_cast<int64_t>(first_matrix(a.stack)) + head) * a.positions;
  uint8_t *const keys_at = a.keys + rows * K::kBytes, *const values_at = a.values + rows * V::kBytes;
  uint8_t *const key_scales = a.key_scale + rows * kKeyScale, *const value_scales = a.value_scale + rows * kValueScale;
  // As an index of lax.dynamic_update_slice: from the end where it is negative, then what there is.
  const int written = a.new_keys ? clamp_to(place < 0 ? place + a.positions : place, a.positions - 1) : -1;

  {
    const int of_group = a.group * a.size;
    for (int i = threadIdx.x; i < Memory::kQueries * D; i += kAttentionThreads) {
      const int query = i / D, at = i % D;
      const int from = query * a.size + at;
      m.q[query][at] = at < a.size && from < of_group ? load_one<DTYPE>(a.q, static_cast<int64_t>(head) * of_group + from) : 0.f;
    }
    const bool owner = (begin <= written && written < end) || (count == 0 && rank == 0);
    const int64_t from = static_cast<int64_t>(head) * a.size;
    if (written >= 0 && warp == 0)
      write_row<KBITS, D, DTYPE>(a.new_keys, from, a.size, m.codes[0], m.scales[0], owner,
                                 keys_at + static_cast<int64_t>(written) * K::kBytes, key_scales + static_cast<int64_t>(written) * kKeyScale);
    if (written >= 0 && warp == 1)
      write_row<VBITS, D, DTYPE>(a.new_values, from, a.size, m.codes[1], m.scales[1], owner,
                                 values_at + static_cast<int64_t>(written) * V::kBytes,
                                 value_scales + static_cast<int64_t>(written) * kValueScale);
  }
  __syncthreads();

  K keys[2];
  V values[4];
  float key_scale[2][K::kBlocks], value_scale[2][V::kBlocks];
  // Places that do not exist are read as the last one, and masked.
  const auto load_keys = [&](int tile) {
    const bool cached = written < tile || written >= tile + kTokens;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t at = min(tile + 8 * j + g, end - 1);
      const bool here = cached || at != written;
      keys[j].load(here ? keys_at + at * K::kBytes : m.codes[0], t, cached);
      const uint8_t* const scale = here ? key_scales + at * kKeyScale : m.scales[0];
#pragma unroll
      for (int b = 0; b < K::kBlocks; ++b) key_scale[j][b] = load_scale<KBITS>(scale + b * K::kScaleBytes, cached);
    }
  };
  const auto load_values = [&](int tile) {
    const bool cached = written < tile || written >= tile + kTokens;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = min(tile + 8 * (j / 2) + 2 * t + j % 2, end - 1);
      values[j].load(cached || at != written ? values_at + at * V::kBytes : m.codes[1], g, cached);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t at = min(tile + 8 * j + g, end - 1);
      const uint8_t* const scale = cached || at != written ? value_scales + at * kValueScale : m.scales[1];
#pragma unroll
      for (int b = 0; b < V::kBlocks; ++b) value_scale[j][b] = load_scale<VBITS>(scale + b * V::kScaleBytes, cached);
    }
  };
  constexpr int kStride = kTokens * kAttentionWarps;
  int tile = begin + warp * kTokens;
  if (tile < end) load_keys(tile), load_values(tile);

  uint32_t q[TILES][kTerms][K::kSteps][2];
  float factor[TILES][2];  // of the queries 2t and 2t + 1 of a tile
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float* const row = m.q[8 * n + g];
    float most = 0.f;
    for (int i = t; i < D; i += 4) most = fmaxf(most, fabsf(row[i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    // 2^13 to 2^14 is the largest.
    const uint32_t exponent = min(max(__float_as_uint(most) >> 23, 14u), 253u);
    const float up = __uint_as_float((267u - exponent) << 23), down = __uint_as_float((exponent - 13u) << 23);
#pragma unroll
    for (int step = 0; step < K::kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float v0 = row[K::place(step, t, r, 0)] * up, v1 = row[K::place(step, t, r, 1)] * up;
        q[n][0][step][r] = pack(v0, v1);
        if constexpr (kTerms > 1) q[n][1][step][r] = pack(v0 - first_of(q[n][0][step][r]), v1 - second_of(q[n][0][step][r]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[n][h] = __shfl_sync(~0u, down, 8 * t + 4 * h) * a.factor;
  }

  float sum[TILES][kOuts][4], most[TILES][2], total[TILES][2], limit = 0x1p-126f;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < kOuts; ++i) sum[n][i][0] = sum[n][i][1] = sum[n][i][2] = sum[n][i][3] = 0.f;
    most[n][0] = most[n][1] = -INFINITY, total[n][0] = total[n][1] = 0.f;
  }

  for (; tile < end; tile += kStride) {
    float score[TILES][4] = {};
#pragma unroll
    for (int b = 0; b < K::kBlocks; ++b) {
      float part[TILES][4] = {};
#pragma unroll
      for (int s = 0; s < K::kStepsOfBlock; ++s) {
        const int step = b * K::kStepsOfBlock + s;
        const uint2 k0 = keys[0].fragment(step), k1 = keys[1].fragment(step);
        const uint32_t k[4] = {k0.x, k1.x, k0.y, k1.y};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
          for (int term = 0; term < kTerms; ++term) mma<__half>(part[n], k, q[n][term][step][0], q[n][term][step][1]);
        }
      }
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n][i] += part[n][i] * key_scale[i / 2][b];
      }
    }
    const int next = tile + kStride;
    const bool there[2] = {tile + g < end, tile + 8 + g < end};
    if (next < end) load_keys(next);

    float of_values = 0.f;
#pragma unroll
    for (int b = 0; b < V::kBlocks; ++b) of_values = fmaxf(of_values, fmaxf(fabsf(value_scale[0][b]), fabsf(value_scale[1][b])));
    const float wider = fmaxf(limit, limit_of(largest_of_rows(of_values)));
    bool grown = wider > limit;
    float top[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float s = score[n][i] * factor[n][i % 2];
        if (a.cap > 0.f) s = tanhf(s / a.cap) * a.cap;
        score[n][i] = there[i / 2] ? s * kLog2e : -INFINITY;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[n][h] = fmaxf(most[n][h], largest_of_rows(fmaxf(score[n][h], score[n][2 + h])));
        grown |= top[n][h] > most[n][h];
      }
    }
    if (__any_sync(~0u, grown)) {
      const float narrowed = limit * inverse_of(wider);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float shrunk = rescaled(most[n][h], top[n][h]);
          total[n][h] *= shrunk;
#pragma unroll
          for (int i = 0; i < kOuts; ++i) sum[n][i][h] *= shrunk * narrowed, sum[n][i][2 + h] *= shrunk * narrowed;
          most[n][h] = top[n][h];
        }
      }
      limit = wider;
    }
    const float unit = inverse_of(limit) * kWeight;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float base = most[n][i % 2] == -INFINITY ? 0.f : most[n][i % 2];
        score[n][i] = exp2f(score[n][i] - base);
        total[n][i % 2] += score[n][i];
      }
#pragma unroll
      for (int b = 0; b < V::kBlocks; ++b) {
        uint32_t w[kTerms][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float s = value_scale[j][b] * unit, w0 = score[n][2 * j] * s, w1 = score[n][2 * j + 1] * s;
          const uint32_t pair = pack(w0, w1);
          w[0][j] = transposed(pair);
          if constexpr (kTerms > 1) w[1][j] = transposed(pack(w0 - first_of(pair), w1 - second_of(pair)));
        }
#pragma unroll
        for (int i = 0; i < V::kTilesOfBlock / 2; ++i) {
          const int at = b * V::kTilesOfBlock / 2 + i;
          const uint32_t v[4] = {V::pair(values[0], values[1], 2 * at), V::pair(values[0], values[1], 2 * at + 1),
                                 V::pair(values[2], values[3], 2 * at), V::pair(values[2], values[3], 2 * at + 1)};
#pragma unroll
          for (int term = 0; term < kTerms; ++term) mma<__half>(sum[n][at], v, w[term][0], w[term][1]);
        }
      }
    }
    if (next < end) load_values(next);
  }

  // Sums stay in the order of registers until they are stored.
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < kOuts; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) m.sums[warp][((n * kOuts + i) * 4 + r) * 32 + lane] = sum[n][i][r];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) total[n][h] += __shfl_xor_sync(~0u, total[n][h], apart);
      if (g == 0) m.warps[warp].most[8 * n + 2 * t + h] = most[n][h], m.warps[warp].total[8 * n + 2 * t + h] = total[n][h];
    }
  }
  if (lane == 0) m.warps[warp].limit = limit;
  __syncthreads();

  // Of the warps, into the place of the first; then of the blocks, which take turns with the results.
  const auto query_of = [](int i) { return i / (kOuts * 128) * 8 + 2 * (i % 4) + i / 32 % 2; };
  const auto merged = [&](int parts, const Found<Memory::kQueries>* of, int query) {
    Found<1> all{{-INFINITY}, {0.f}, 0.f};
    for (int p = 0; p < parts; ++p) all.most[0] = fmaxf(all.most[0], of[p].most[query]), all.limit = fmaxf(all.limit, of[p].limit);
    for (int p = 0; p < parts; ++p) all.total[0] += of[p].total[query] * rescaled(of[p].most[query], all.most[0]);
    return all;
  };
  if (threadIdx.x < Memory::kQueries) {
    const int query = threadIdx.x;
    const Found<1> all = merged(kAttentionWarps, m.warps, query);
    m.block.most[query] = all.most[0], m.block.total[query] = all.total[0], m.block.limit = all.limit;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w)
      m.factors[w][query] = rescaled(m.warps[w].most[query], all.most[0]) * (m.warps[w].limit * inverse_of(all.limit));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Memory::kSums; i += kAttentionThreads) {
    const int query = query_of(i);
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) s += m.sums[w][i] * m.factors[w][query];
    m.sums[0][i] = s;
  }
  if (a.splits > 1) {
    sync_cluster();
    for (int i = threadIdx.x; i < a.splits * Memory::kQueries; i += kAttentionThreads) {
      const int from = i / Memory::kQueries, query = i % Memory::kQueries;
      m.blocks[from].most[query] = read_of_block(&m.block.most[query], from);
      m.blocks[from].total[query] = read_of_block(&m.block.total[query], from);
      if (query == 0) m.blocks[from].limit = read_of_block(&m.block.limit, from);
    }
  } else if (threadIdx.x < Memory::kQueries) {
    const int query = threadIdx.x;
    m.blocks[0].most[query] = m.block.most[query], m.blocks[0].total[query] = m.block.total[query];
    m.blocks[0].limit = m.block.limit;
  }
  __syncthreads();
  if (threadIdx.x < Memory::kQueries) {
    const int query = threadIdx.x;
    const Found<1> all = merged(a.splits, m.blocks, query);
    for (int r = 0; r < a.splits; ++r)
      m.factors[r][query] = rescaled(m.blocks[r].most[query], all.most[0]) * m.blocks[r].limit / (kWeight * all.total[0]);
  }
  __syncthreads();
  for (int i = rank * kAttentionThreads + threadIdx.x; i < Memory::kSums; i += a.splits * kAttentionThreads) {
    const int query = query_of(i), at = V::place(i / 128 % kOuts * 2 + i / 64 % 2, i % 32 / 4);
    if (query >= a.group || at >= a.size) continue;
    float s = 0.f;
    if (a.splits == 1) {
      s = m.sums[0][i] * m.factors[0][query];
    } else {
      float parts[kMostSplits];
#pragma unroll
      for (int r = 0; r < kMostSplits; ++r) parts[r] = r < a.splits ? read_of_block(&m.sums[0][i], r) : 0.f;
#pragma unroll
      for (int r = 0; r < kMostSplits; ++r) s += r < a.splits ? parts[r] * m.factors[r][query] : 0.f;
    }
    store_float(a.y, (static_cast<int64_t>(head) * a.group + query) * a.size + at, DTYPE, s);
  }
  if (a.splits > 1) sync_cluster();  // nobody leaves while others read
}

}  // namespace eformer

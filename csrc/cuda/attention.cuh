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

__device__ __forceinline__ float power_of_two(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// Relative to a largest score: what was relative to another.
__device__ __forceinline__ float rescaled(float from, float to) { return from == -INFINITY ? 0.f : power_of_two(from - to); }
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

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// What a part of a sum, a warp or a block, has found of every query: the largest score and the total; and its limit. Queries
// are in the order of the lanes that have them: those with an even number of a tile of eight first.
template <int QUERIES>
struct Found {
  float most[QUERIES], total[QUERIES], limit;
};

template <int D, int TILES>
struct AttentionMemory {
  static constexpr int kQueries = 8 * TILES, kSums = TILES * (D / 16) * 4 * 32;
  alignas(16) float sums[kAttentionWarps][kSums];
  alignas(16) float factors[kMostSplits][kQueries];
  Found<kQueries> warps[kAttentionWarps], block;
  alignas(16) uint8_t codes[2][D];
  alignas(16) uint8_t scales[2][16];
};

// TILES of eight queries. A query or a weight in float32 is a sum of two float16.
template <int KBITS, int VBITS, int D, int DTYPE, int TILES>
__global__ void __launch_bounds__(kAttentionThreads, D > 128 && TILES > 1 ? 1 : D > 128 || TILES > 1 || DTYPE == kF32 ? 2 : 4)
    attention_kernel(const __grid_constant__ CacheAttention a) {
  using K = Keys<KBITS, D>;
  using V = Values<VBITS, D>;
  using Memory = AttentionMemory<D, TILES>;
  constexpr int kTerms = DTYPE == kF32 ? 2 : 1, kOuts = D / 16, kKeyScale = K::kBlocks * K::kScaleBytes,
                kValueScale = V::kBlocks * V::kScaleBytes;
  extern __shared__ __align__(16) uint8_t shared[];
  Memory& m = *reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = static_cast<int>(blockIdx.x % a.splits), head = static_cast<int>(blockIdx.x / a.splits);
  if (a.cosines && threadIdx.x * 32 < a.size) prefetch(a.cosines + threadIdx.x * 32);  // and sines, which are behind them
  // Of all that the token has, queries of all heads come first, then keys, then values.
  const int text = a.row ? head / a.heads_of_row : 0, own = head - text * a.heads_of_row;
  const int64_t first_query = a.row ? text * a.row + static_cast<int64_t>(own) * a.group * a.size : static_cast<int64_t>(head) * a.group * a.size;
  const int64_t own_row = a.row ? text * a.row + static_cast<int64_t>(own) * a.size : static_cast<int64_t>(head) * a.size;
  // What does not need the place is asked for before it: query g of every tile, in pieces as lanes have of keys.
  float given[TILES][D / 4];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int query = 8 * n + g;
    const int64_t from = first_query + static_cast<int64_t>(query) * a.size;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int at = K::piece_at(i * 4 / K::kPiece, t) + i * 4 % K::kPiece;
      if (a.size == D && query < a.group) {
        load_four<DTYPE>(a.q, from + at, given[n], 4 * i);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          given[n][4 * i + j] = query < a.group && at + j < a.size ? load_one<DTYPE>(a.q, from + at + j) : 0.f;
      }
    }
  }
  NewRow<KBITS, D, DTYPE> new_key;
  NewRow<VBITS, D, DTYPE> new_value;
  if (a.new_keys && warp == 0) new_key.load(a.new_keys, own_row, a.size);
  if (a.new_keys && warp == 1) new_value.load(a.new_values, own_row, a.size);

  const int place = __ldg(a.place), last = min(place, a.positions - 1), first = a.window ? max(place + 1 - a.window, 0) : 0;
  const int count = max(last + 1 - first, 0), share = ceil_div(ceil_div(count, a.splits), kTokens) * kTokens;
  const int begin = first + rank * share, end = min(begin + share, last + 1);
  const int64_t rows = (static_cast<int64_t>(first_matrix(a.stack)) + head) * a.positions;
  uint8_t *const keys_at = a.keys + rows * K::kBytes, *const values_at = a.values + rows * V::kBytes;
  uint8_t *const key_scales = a.key_scale + rows * kKeyScale, *const value_scales = a.value_scale + rows * kValueScale;
  // As an index of lax.dynamic_update_slice: from the end where it is negative, then what there is.
  const int written = a.new_keys ? clamp_to(place < 0 ? place + a.positions : place, a.positions - 1) : -1;

  K keys[2];
  V values[4];
  float key_scale[2][K::kBlocks], value_scale[2][V::kBlocks];
  // Places that do not exist are read as the last one, and masked.
  const auto has_new = [&](int tile) { return written >= tile && written < tile + kTokens; };
  const auto load_keys_of = [&](int tile, auto cached) {
    constexpr bool kCached = decltype(cached)::value;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t at = min(tile + 8 * j + g, end - 1);
      const bool here = kCached || at != written;
      keys[j].template load<kCached>(here ? keys_at + at * K::kBytes : m.codes[0], t);
      const uint8_t* const scale = here ? key_scales + at * kKeyScale : m.scales[0];
#pragma unroll
      for (int b = 0; b < K::kBlocks; ++b) key_scale[j][b] = load_scale<KBITS, kCached>(scale + b * K::kScaleBytes);
    }
  };
  const auto load_values_of = [&](int tile, auto cached) {
    constexpr bool kCached = decltype(cached)::value;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = min(tile + 8 * (j / 2) + 2 * t + j % 2, end - 1);
      values[j].template load<kCached>(kCached || at != written ? values_at + at * V::kBytes : m.codes[1], g);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t at = min(tile + 8 * j + g, end - 1);
      const uint8_t* const scale = kCached || at != written ? value_scales + at * kValueScale : m.scales[1];
#pragma unroll
      for (int b = 0; b < V::kBlocks; ++b) value_scale[j][b] = load_scale<VBITS, kCached>(scale + b * V::kScaleBytes);
    }
  };
  const auto load_keys = [&](int tile) { has_new(tile) ? load_keys_of(tile, No{}) : load_keys_of(tile, Yes{}); };
  const auto load_values = [&](int tile) { has_new(tile) ? load_values_of(tile, No{}) : load_values_of(tile, Yes{}); };
  constexpr int kStride = kTokens * kAttentionWarps;
  int tile = begin + warp * kTokens;
  const bool early = tile < end && !has_new(tile);
  if (early) load_keys_of(tile, Yes{}), load_values_of(tile, Yes{});

  const auto turn = [&](auto by_halves) {
    constexpr bool kHalves = decltype(by_halves)::value;
    const Turn by{a.cosines, a.sines, a.size / 2};
    if (a.new_keys && warp == 0) new_key.template turn<kHalves>(by, a.new_keys, own_row);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (8 * n + g >= a.group) continue;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const int at = K::piece_at(i * 4 / K::kPiece, t) + i * 4 % K::kPiece;
        by.apply<DTYPE, kHalves>(a.q, first_query + static_cast<int64_t>(8 * n + g) * a.size, at, given[n], 4 * i);
      }
    }
  };
  if (a.cosines) a.halves ? turn(Yes{}) : turn(No{});
  if (written >= 0 && warp < 2) {
    const bool owner = (begin <= written && written < end) || (count == 0 && rank == 0);
    const auto at = static_cast<int64_t>(written);
    if (warp == 0) new_key.write(m.codes[0], m.scales[0], owner, keys_at + at * K::kBytes, key_scales + at * kKeyScale);
    if (warp == 1) new_value.write(m.codes[1], m.scales[1], owner, values_at + at * V::kBytes, value_scales + at * kValueScale);
  }
  __syncthreads();
  if (tile < end && !early) load_keys_of(tile, No{}), load_values_of(tile, No{});

  uint32_t q[TILES][kTerms][K::kSteps][2];
  float factor[TILES][2];  // of the queries 2t and 2t + 1 of a tile
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) most = fmaxf(most, fabsf(given[n][i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    // 2^13 to 2^14 is the largest.
    const uint32_t exponent = min(max(__float_as_uint(most) >> 23, 14u), 253u);
    const float up = __uint_as_float((267u - exponent) << 23), down = __uint_as_float((exponent - 13u) << 23);
#pragma unroll
    for (int step = 0; step < K::kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float v0 = given[n][K::value_of(step, r, 0)] * up, v1 = given[n][K::value_of(step, r, 1)] * up;
        q[n][0][step][r] = pack(v0, v1);
        if constexpr (kTerms > 1) q[n][1][step][r] = pack(v0 - first_of(q[n][0][step][r]), v1 - second_of(q[n][0][step][r]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[n][h] = __shfl_sync(~0u, down, 8 * t + 4 * h) * a.factor;
  }

  float sum[TILES][kOuts][4], most[TILES][2], total[TILES][2], limit = 0x1p-100f;
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
        score[n][i] = power_of_two(score[n][i] - base);
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
      if (g == 0) m.warps[warp].most[8 * n + 4 * h + t] = most[n][h], m.warps[warp].total[8 * n + 4 * h + t] = total[n][h];
    }
  }
  if (lane == 0) m.warps[warp].limit = limit;
  __syncthreads();

  // Of the warps, into the place of the first. A warp takes a tile of queries, and a lane one of them and of the parts.
  const int slot = 8 * warp + lane % 8, part = lane / 8;
  const auto over_parts = [](float v, auto join) {
#pragma unroll
    for (int apart = 8; apart < 32; apart *= 2) v = join(v, __shfl_xor_sync(~0u, v, apart));
    return v;
  };
  const auto largest = [](float x, float y) { return fmaxf(x, y); };
  const auto plus = [](float x, float y) { return x + y; };
  if (warp < TILES) {
    const Found<Memory::kQueries>& mine = m.warps[part];
    const float top = over_parts(mine.most[slot], largest), wide = over_parts(mine.limit, largest);
    const float factor = rescaled(mine.most[slot], top), all = over_parts(mine.total[slot] * factor, plus);
    m.factors[part][slot] = factor * (mine.limit * inverse_of(wide));
    if (part == 0) m.block.most[slot] = top, m.block.total[slot] = all, m.block.limit = wide;
  }
  __syncthreads();
  for (int i = threadIdx.x * 4; i < Memory::kSums; i += kAttentionThreads * 4) {
    const int first_slot = i / (kOuts * 128) * 8 + i / 32 % 2 * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      const float4 v = *reinterpret_cast<const float4*>(&m.sums[w][i]), f = *reinterpret_cast<const float4*>(&m.factors[w][first_slot]);
      s.x += v.x * f.x, s.y += v.y * f.y, s.z += v.z * f.z, s.w += v.w * f.w;
    }
    *reinterpret_cast<float4*>(&m.sums[0][i]) = s;
  }
  // Of the blocks, which take turns with the results.
  if (a.splits > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  if (warp < TILES) {
    static_assert(kMostSplits == 8);
    float found_most[2], found_total[2], found_limit[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int from = part + 4 * h;
      const bool there = from < a.splits;
      found_most[h] = there ? read_of_block(&m.block.most[slot], from) : -INFINITY;
      found_total[h] = there ? read_of_block(&m.block.total[slot], from) : 0.f;
      found_limit[h] = there ? read_of_block(&m.block.limit, from) : 0.f;
    }
    const float top = over_parts(fmaxf(found_most[0], found_most[1]), largest);
    const float factor[2] = {rescaled(found_most[0], top), rescaled(found_most[1], top)};
    const float all = over_parts(found_total[0] * factor[0] + found_total[1] * factor[1], plus) * kWeight;
#pragma unroll
    for (int h = 0; h < 2; ++h) m.factors[part + 4 * h][slot] = factor[h] * found_limit[h] / all;
  }
  __syncthreads();
  for (int i = rank * kAttentionThreads + threadIdx.x; i < Memory::kSums; i += a.splits * kAttentionThreads) {
    const int query = i / (kOuts * 128) * 8 + 2 * (i % 4) + i / 32 % 2, its_slot = query / 8 * 8 + query % 2 * 4 + query % 8 / 2;
    const int at = V::place(i / 128 % kOuts * 2 + i / 64 % 2, i % 32 / 4);
    if (query >= a.group || at >= a.size) continue;
    float parts[kMostSplits], s = 0.f;
#pragma unroll
    for (int r = 0; r < kMostSplits; ++r) parts[r] = r < a.splits ? read_of_block(&m.sums[0][i], r) : 0.f;
#pragma unroll
    for (int r = 0; r < kMostSplits; ++r) s += r < a.splits ? parts[r] * m.factors[r][its_slot] : 0.f;
    store_float(a.y, (static_cast<int64_t>(head) * a.group + query) * a.size + at, DTYPE, s);
  }
  if (a.splits > 1) sync_cluster();  // nobody leaves while others read
}

}  // namespace eformer

// y = x @ D.T (dot form) or x @ D (axpy form) for matrices of any size, on Hopper: rows of codes, of scales and of x may
// begin at any byte, and no axis has to be a multiple of anything. Made for small matrices: blocks are short, several share
// a multiprocessor.
//
// A block owns 64 outs, N rows of x and some stages of the contracted axis, 128 deep each. Stages are copied in whole 16
// bytes from where memory has them: rows keep their alignment in shared memory, and what reads them shifts. All threads
// decode a stage into a tile of 16-bit floats, laid out as it is stored; `ldmatrix` (axpy form: transposed) brings it into
// the registers from which `wgmma` takes its left operand, while x is the right one, in shared memory. Two warpgroups have
// half of the depth each. They decode the next stage while the matrix unit works. Blocks that share a tile form a
// cluster and add their sums through shared memory, always in the same order.
#pragma once

#include "books.h"
#include "decode.cuh"
#include "parts.h"
#include "tiles_mma.cuh"
#include "wide_mma.cuh"

namespace eformer {

// Rows of bytes, one behind the other, of every matrix.
struct OddRows {
  const uint8_t* base;
  uint32_t pitch, bytes;  // from row to row, of a matrix
};

struct OddArgs {
  OddRows codes, scales, x;  // scales: of blocks
  const uint8_t* scale;      // others
  void* y;
  int32_t m, outs, deep, rows, cols;
  int32_t block, scale_dtype, y_dtype;
  int32_t out_scale;  // 0 none, 1 one per out, 2 one for all
  int32_t x_whole;    // rows of x begin at whole 16 bytes
  int32_t m_chunks, stages, stages_per_split;
  int64_t scale_batch;  // bytes
  Stack stack;
  Book book;
};

template <int FMT, int FORM, int N>
struct OddShape {
  static constexpr int kThreads = 256, kOuts = 64, kDeep = 128;
  static constexpr int kRows = FORM == kDot ? kOuts : kDeep, kCols = FORM == kDot ? kDeep : kOuts;  // of D, in a stage
  static constexpr int kEight = 8 / kPerByte<FMT>;                             // bytes of eight values
  static constexpr int kBytes = kCols / kPerByte<FMT>, kChunks = ceil_div(kBytes, 16) + 1;  // of a row, however it begins
  static constexpr int kScaleBytes = kCols / 32 * 4, kScaleChunks = 2;
  static constexpr int kXBytes = kDeep * 2, kXChunks = kXBytes / 16 + 1;
  static constexpr int kStages = N > 64 ? 2 : N > 16 ? 3 : 4, kAtOnce = N > 16 ? 2 : 3;  // blocks of a multiprocessor
  static constexpr int kX = N * kXBytes, kRawX = N * kXChunks * 16;
  static constexpr int kTile = kOuts * kDeep * 2;
  static constexpr int kCodes = kRows * kChunks * 16, kScales = kInNibbles<FMT> ? kRows * kScaleChunks * 16 : 0;
  // In shared memory: x of some stages, the tile, codes and scales of stages, the values of codes, a factor
  // for every out, x as it is stored.
  static constexpr int kTileAt = kStages * kX, kCodesAt = kTileAt + kTile, kScalesAt = kCodesAt + kStages * kCodes;
  static constexpr int kBookAt = kScalesAt + kStages * kScales, kFactorsAt = kBookAt + 64, kRawAt = kFactorsAt + kOuts * 4;
  static constexpr int shared_bytes(bool x_whole) { return kRawAt + (x_whole ? 0 : kStages * kRawX); }
  static constexpr int kPitch = kOuts + 4;  // of sums
  static_assert(2 * N * kPitch * 4 <= kBookAt, "sums lie where the stages were");
};

#if EFORMER_HAS_WGMMA

// A matrix of such rows, from a whole 16 bytes on that may lie before it.
struct OddMatrix {
  const uint8_t* from;
  uint32_t skew, pitch, end;
  __device__ __forceinline__ OddMatrix(const OddRows& r, int64_t number) : pitch(r.pitch) {
    const uint8_t* at = r.base + number * r.bytes;
    skew = reinterpret_cast<uintptr_t>(at) & 15;
    from = at - skew, end = skew + r.bytes;
  }
  __device__ __forceinline__ uint32_t place(int row, int byte) const { return skew + row * pitch + byte; }

  // `bytes` of up to ROWS rows, as far as there are any, to where rows are CHUNKS * 16 bytes apart.
  template <int ROWS, int CHUNKS, int THREADS>
  __device__ __forceinline__ void copy(uint32_t to, int row0, int rows, int byte0, int bytes) const {
    const int here = min(bytes, static_cast<int>(pitch) - byte0);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      if (row0 + row >= rows) break;
      const uint32_t first = place(row0 + row, byte0), at = (first & ~15u) + chunk * 16;
      if (here > 0 && at < first + here) copy_async16(to + i * 16, from + at, min(16u, end - at));
    }
  }
};

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_scale(uint32_t address, int dtype) {
  if (dtype == kF32) return __uint_as_float(load_shared(address));
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return dtype == kBf16 ? __uint_as_float(static_cast<uint32_t>(v) << 16) : __half2float(__ushort_as_half(v));
}
// COUNT words from any byte on.
template <int COUNT>
__device__ __forceinline__ void load_unaligned(uint32_t (&v)[COUNT], uint32_t address) {
  const uint32_t at = address & ~3u, shift = address % 4 * 8;
  uint32_t low = load_shared(at);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint32_t high = load_shared(at + 4 * i + 4);
    v[i] = __funnelshift_r(low, high, shift), low = high;
  }
}
__device__ __forceinline__ void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_eight(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// The first `valid` of eight values, and zeros.
__device__ __forceinline__ void keep_first(uint32_t (&v)[4], int valid) {
  if (valid >= 8) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = 2 * i >= valid ? 0 : 2 * i + 1 >= valid ? v[i] & 0xFFFF : v[i];
}

// Eight neighbours as 16-bit floats, in order. `w` holds their bytes, the first one lowest.
template <int FMT, class E>
__device__ __forceinline__ void decode_eight(uint32_t (&v)[4], const uint32_t (&w)[2], float scale, uint32_t book) {
  constexpr uint32_t kBoth = 0x00010001u;
  if constexpr (kInNibbles<FMT>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = w[0] >> (8 * i);
      const float high = __uint_as_float(load_shared(book + (two >> 2 & 0x3C))), low = __uint_as_float(load_shared(book + (two << 2 & 0x3C)));
      v[i] = Pair<E>::pack(high * scale, low * scale);
    }
  } else if constexpr (kInBytes<FMT>) {
    const Decoder<FMT, E> decoder{nullptr, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = decoder.pair(w[i / 2], i % 2);
  } else if constexpr (FMT == kTernary) {  // a field and its neighbour, in the same bits of both halves
    const uint32_t fields = w[0] | w[0] << 18;
    constexpr int kShift[4] = {6, 2, 14, 10};
    constexpr uint32_t kBias = (Pair<E>::bits((1 << Pair<E>::kMagicBits) + 1, 0) | Pair<E>::kSign) * kBoth;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = Pair<E>::fma((fields >> kShift[i] & 3 * kBoth) | Pair<E>::kMagic * kBoth, Pair<E>::kOne * kBoth, kBias);
  } else {  // bits become signs
    const uint32_t bits = w[0] | w[0] << 17;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = (bits << (8 + 2 * i) & 0x80008000u) ^ ((Pair<E>::kOne | Pair<E>::kSign) * kBoth);
  }
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address) : "memory");
}

template <int FMT, class E, int FORM, int N>
struct OddBlock {
  using S = OddShape<FMT, FORM, N>;
  const OddArgs& a;
  uint32_t shared;
  int out0, m0, matrix;
  const uint8_t* scale;  // of outs
  OddMatrix codes, scales, x;

  __device__ __forceinline__ int first_row(int stage) const { return FORM == kDot ? out0 : stage * S::kDeep; }
  __device__ __forceinline__ int first_col(int stage) const { return FORM == kDot ? stage * S::kDeep : out0; }
  __device__ __forceinline__ int scale_byte(int col) const { return col / a.block * item_size(a.scale_dtype); }
  __device__ __forceinline__ uint32_t x_at(int slot) const { return shared + slot * S::kX; }
  // Eight columns of a row of x, or of the tile in the dot form: the half of the depth, and chunks that change places.
  template <int ROWS>
  static __device__ __forceinline__ uint32_t half_place(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * 128 + ((chunk ^ row) & 7) * 16;
  }

  __device__ __forceinline__ void load(int stage, int slot) const {
    const int row0 = first_row(stage), col0 = first_col(stage), deep = stage * S::kDeep;
    codes.template copy<S::kRows, S::kChunks, S::kThreads>(shared + S::kCodesAt + slot * S::kCodes, row0, a.rows,
                                                           col0 / kPerByte<FMT>, S::kBytes);
    if constexpr (kInNibbles<FMT>) {
      scales.template copy<S::kRows, S::kScaleChunks, S::kThreads>(shared + S::kScalesAt + slot * S::kScales, row0, a.rows,
                                                                   scale_byte(col0), S::kScaleBytes);
    }
    if (!a.x_whole) {
      x.template copy<N, S::kXChunks, S::kThreads>(shared + S::kRawAt + slot * S::kRawX, m0, a.m, deep * 2, S::kXBytes);
      return;
    }
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const int row = threadIdx.x / 16 + i * 16, chunk = threadIdx.x % 16;
      const int valid = m0 + row < a.m ? clamp_to((a.deep - deep - chunk * 8) * 2, 16) : 0;
      const uint8_t* src = valid ? x.from + x.place(m0 + row, (deep + chunk * 8) * 2) : x.from;
      copy_async16(x_at(slot) + half_place<N>(row, chunk), src, valid);
    }
  }

  __device__ __forceinline__ void decode(int stage, int slot) const {
    constexpr int kAcross = S::kCols / 8, kDown = S::kThreads / kAcross, kCount = S::kRows / kDown;
    const int row0 = first_row(stage), col0 = first_col(stage), chunk = threadIdx.x % kAcross, col = col0 + chunk * 8;
    const uint32_t codes_here = shared + S::kCodesAt + slot * S::kCodes + chunk * S::kEight;
    const uint32_t scales_here = shared + S::kScalesAt + slot * S::kScales, book = shared + S::kBookAt;
    const int first_scale = kInNibbles<FMT> ? scale_byte(col0) : 0, more = kInNibbles<FMT> ? scale_byte(col) - first_scale : 0;
    uint32_t words[kCount][2];
    float scale[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = threadIdx.x / kAcross + i * kDown;
      const uint32_t from = codes_here + row * (S::kChunks * 16) + (codes.place(row0 + row, col0 / kPerByte<FMT>) & 15);
      words[i][0] = words[i][1] = 0, scale[i] = 1.f;
      if constexpr (kInBytes<FMT>) {
        load_unaligned(words[i], from);
      } else if constexpr (kInNibbles<FMT>) {
        uint32_t one[1];
        load_unaligned(one, from);
        words[i][0] = one[0];
        const uint32_t skew = scales.place(row0 + row, first_scale) & 15;
        scale[i] = load_shared_scale(scales_here + row * (S::kScaleChunks * 16) + skew + more, a.scale_dtype);
      } else {
        words[i][0] = load_shared_byte(from);
        if constexpr (FMT == kTernary) words[i][0] |= load_shared_byte(from + 1) << 8;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = threadIdx.x / kAcross + i * kDown;
      uint32_t v[4];
      decode_eight<FMT, E>(v, words[i], scale[i], book);
      keep_first(v, row0 + row < a.rows ? a.cols - col : 0);
      store_eight(shared + S::kTileAt + half_place<S::kRows>(row, chunk), v);
    }
  }

  // x of a stage, from as it is stored to where the matrix unit reads it.
  __device__ __forceinline__ void align_x(int stage, int slot) const {
    const int deep = stage * S::kDeep;
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const int row = threadIdx.x / 16 + i * 16, chunk = threadIdx.x % 16;
      const uint32_t skew = x.place(m0 + row, deep * 2) & 15;
      uint32_t v[4];
      load_unaligned(v, shared + S::kRawAt + slot * S::kRawX + row * (S::kXChunks * 16) + skew + chunk * 16);
      keep_first(v, m0 + row < a.m ? a.deep - deep - chunk * 8 : 0);
      store_eight(x_at(slot) + half_place<N>(row, chunk), v);
    }
  }

  // 64 outs, half of the depth of a stage.
  __device__ __forceinline__ void multiply(float (&acc)[N / 2], int slot, int group, int warp, int lane) const {
    const uint32_t tile = shared + S::kTileAt;
    uint32_t frag[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (FORM == kDot) {
        load_matrices(frag[k], tile + half_place<S::kRows>(warp * 16 + lane % 16, group * 8 + 2 * k + lane / 16));
      } else {
        const int row = group * 64 + k * 16 + lane / 16 * 8 + lane % 8;
        load_matrices_transposed(frag[k], tile + half_place<S::kRows>(row, warp * 2 + lane / 8 % 2));
      }
    }
    const uint64_t b = describe_x(x_at(slot) + group * (N * 128));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<E, N>(acc, frag[k], b + 2 * k);
    wgmma_commit();
  }

  // What sums are multiplied with, long before it is needed.
  __device__ __forceinline__ void fetch_factors() const {
    if (!a.out_scale || threadIdx.x >= S::kOuts) return;
    const int out = out0 + threadIdx.x;
    const float v = out < a.outs ? load_float(scale, a.out_scale == 1 ? out : 0, a.scale_dtype) : 0.f;
    store_shared(shared + S::kFactorsAt + threadIdx.x * 4, v);
  }

  // Makes a stage ready for the matrix unit, which may be busy with the one before.
  __device__ __forceinline__ void prepare(int stage, int slot) const {
    wait_for_all_but<S::kStages - 2>();
    __syncthreads();  // the stage is there, and nobody reads the tile any more
    decode(stage, slot);
    if (!a.x_whole) align_x(stage, slot);
  }

  __device__ __forceinline__ void run(float (&acc)[N / 2], int first, int last, int group, int warp, int lane) const {
#pragma unroll
    for (int s = 0; s < S::kStages - 1; ++s) {
      if (first + s < last) load(first + s, s);
      commit_copies();
    }
    fetch_factors();
    prepare(first, 0);
    int slot = 0;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      order_before_bulk_copies();  // of x: the matrix unit reads it like the copy engine
      __syncthreads();
      const int ahead = stage + S::kStages - 1, next = slot + 1 == S::kStages ? 0 : slot + 1;
      if (ahead < last) load(ahead, slot == 0 ? S::kStages - 1 : slot - 1);
      commit_copies();
      multiply(acc, slot, group, warp, lane);
      if (stage + 1 < last) prepare(stage + 1, next);
      wgmma_wait<0>();
      slot = next;
    }
  }

  __device__ __forceinline__ void put_sums(const float (&acc)[N / 2], int group, int warp, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 4 * 8 + 2 * t + i % 2, out = warp * 16 + g + i / 2 % 2 * 8;
      store_shared(shared + ((group * N + column) * S::kPitch + out) * 4, acc[i]);
    }
  }
  // The blocks of a cluster take turns with the rows of x, a thread has four outs.
  __device__ __forceinline__ void take_sums(int split, int splits) const {
    constexpr int kAcross = S::kOuts / 4, kDown = S::kThreads / kAcross;
    const int out = threadIdx.x % kAcross * 4, width = min(N, a.m - m0);
    float4 factor = make_float4(1.f, 1.f, 1.f, 1.f);
    if (a.out_scale) factor = load_from_block(in_block(shared + S::kFactorsAt + out * 4, split));
    const float f[4] = {factor.x, factor.y, factor.z, factor.w};
#pragma unroll 2
    for (int column = split * kDown + threadIdx.x / kAcross; column < width; column += kDown * splits) {
      float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
      for (int s = 0; s < splits; ++s) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const float4 part = load_from_block(in_block(shared + ((group * N + column) * S::kPitch + out) * 4, s));
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
      const int64_t to = (static_cast<int64_t>(matrix) * a.m + m0 + column) * a.outs + out0 + out;
      if (a.outs % 4 == 0 && out0 + out < a.outs) {
        store_two(a.y, to, a.y_dtype, v[0] * f[0], v[1] * f[1]);
        store_two(a.y, to + 2, a.y_dtype, v[2] * f[2], v[3] * f[3]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (out0 + out + e < a.outs) store_float(a.y, to + e, a.y_dtype, v[e] * f[e]);
      }
    }
  }
};
#endif

template <int FMT, class E, int FORM, int N>
__global__ void __launch_bounds__(256, OddShape<FMT, FORM, N>::kAtOnce) odd_kernel(const __grid_constant__ OddArgs a) {
#if EFORMER_HAS_WGMMA
  using S = OddShape<FMT, FORM, N>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int tile = blockIdx.x, split = blockIdx.y, splits = gridDim.y, matrix = blockIdx.z;
  const int64_t stored = first_matrix(a.stack) + matrix;
  const uint32_t at = shared_address(shared);
  const OddBlock<FMT, E, FORM, N> block{a, at, tile / a.m_chunks * S::kOuts, tile % a.m_chunks * N, matrix, a.scale + stored * a.scale_batch,
                                        {a.codes, stored}, {a.scales, stored}, {a.x, matrix}};
  if (kInNibbles<FMT> && threadIdx.x < 16) reinterpret_cast<float*>(shared + S::kBookAt)[threadIdx.x] = a.book.v[threadIdx.x];
  float acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = 0.f;
  const int first = split * a.stages_per_split, last = min(a.stages, first + a.stages_per_split);
  block.run(acc, first, last, warp / 4, warp % 4, lane);
  __syncthreads();  // nobody reads the stages any more
  block.put_sums(acc, warp / 4, warp % 4, lane);
  if (splits > 1) cluster_sync(); else __syncthreads();
  block.take_sums(split, splits);
  if (splits > 1) cluster_sync();  // nobody leaves while others read
#endif
}

}  // namespace eformer

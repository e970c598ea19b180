// y = x @ D.T for 3 to 16 rows of x and formats of 4 bits: skinny.cuh without whatever these do not need.
//
// All blocks read all of x, which with so many rows is half as many bytes as the codes. So two blocks, a cluster, share rows
// of D: each multiplies half of the columns, with half of x, and has a part of the sums to add up. 256 columns of 16 rows of D
// are a piece; the pieces of a block, one chunk of columns after the other, are dealt out to its warps. A warp copies its
// pieces into a ring of its own, RING ahead, takes the oldest into registers, asks for the next and multiplies. No two
// products are of the same chunk and tile, so each has a place of its own in shared memory and is stored there, not added.
// A cluster has one group of rows: it takes matrices that all clusters together can take at once.
#pragma once

#include <type_traits>

#include "books.h"
#include "decode.cuh"
#include "skinny_ops.cuh"
#include "wide_mma.cuh"

namespace eformer {

struct SplitArgs {
  const uint8_t *codes, *scale, *x;
  void* y;
  int32_t m, rows, cols, row_bytes;
  int32_t tiles, chunks;         // of 16 rows, of 256 columns, per block
  uint32_t tiles_magic;          // 2^31 / tiles, rounded up
  int32_t scale_row, scale_cells;  // bytes of a row of scales, and 16 bytes of it that are a block's
  int32_t scale_dtype, share_log, y_dtype;  // share_log: groups of 64 columns per scale (logarithm)
  int64_t x_batch;
  Stack stack;
  Book book;
  RoughBook rough_book;
};

template <int NT, int RING, int WARPS>
struct SplitShape {
  static constexpr int kThreads = WARPS * 32, kRanks = 2, kColumns = 256, kCells = 8, kPiece = 16 * kCells * 16;
  static constexpr int kScales = kTableBytes + WARPS * RING * kPiece, kInTable = 64;
  static __host__ __device__ int scale_pitch(int cells) { return (cells | 1) * 16; }  // rows start in other banks
  static __host__ __device__ int sums(int tiles, int cells) { return kScales + tiles * 16 * scale_pitch(cells); }
  static __host__ int shared_bytes(int tiles, int chunks, int cells) {
    const int more = tiles * chunks * NT - kInTable;
    return sums(tiles, cells) + (more > 0 ? more * 512 : 0);
  }
  // Where a lane has its part of 16 × 8 sums: the first ones in what the table leaves free, 128 bytes in every 256.
  static __device__ __forceinline__ int place(int sums, int n, int lane) {
    if (n < kInTable) return ((n * 4 + lane / 8) * 2 + 1) * 128 + lane % 8 * 16;
    return sums + ((n - kInTable) * 32 + lane) * 16;
  }
};

#if EFORMER_HAS_WGMMA
template <int FMT, class E, int NT, int RING, int WARPS>
struct SplitBlock {
  using S = SplitShape<NT, RING, WARPS>;
  using Operand = std::conditional_t<FMT == kNf4, __half, E>;  // bf16 holds the codebook badly, see skinny.cuh

  const SplitArgs& a;
  uint8_t* shared;
  int lane, rank, row0;
  int tile, left;                // of the piece that is asked for next, and how many there are
  const uint8_t* from;           // this lane's cell of it
  uint32_t ring, oldest;
  uint32_t b[NT][32];            // x of a chunk
  float back[NT][2];             // undoes what this lane's columns of sums were multiplied by

  __device__ __forceinline__ void fetch_scales(int stored) const {
    const int pitch = S::scale_pitch(a.scale_cells);
    const uint8_t* src = a.scale + (static_cast<int64_t>(stored) * a.rows + row0) * a.scale_row + rank * (a.scale_cells * 16);
    const uint32_t to = shared_address(shared) + S::kScales;
#pragma unroll 1
    for (int u = threadIdx.x; u < a.tiles * 16 * a.scale_cells; u += S::kThreads) {
      const int row = u / a.scale_cells, cell = u - row * a.scale_cells;
      copy_async16(to + row * pitch + cell * 16, src + static_cast<int64_t>(row) * a.scale_row + cell * 16);
    }
    commit_copies();
  }
  // Cells change places with the row, so that eight lanes that read a cell do not meet in a bank.
  static __device__ __forceinline__ int place(int row, int cell) { return row * (S::kCells * 16) + ((cell ^ (row & 7)) * 16); }
  __device__ __forceinline__ void issue() {
    if (left > 0) {
#pragma unroll
      for (int j = 0; j < 16; j += 4) copy_async16(oldest + place(lane / 8 + j, lane % 8), from + j * a.row_bytes);
      const bool last = ++tile == a.tiles;
      tile = last ? 0 : tile, --left;
      from += last ? S::kCells * 16 - static_cast<int64_t>(a.tiles - 1) * 16 * a.row_bytes : static_cast<int64_t>(16) * a.row_bytes;
    }
    commit_copies();
    oldest = oldest + S::kPiece == ring + RING * S::kPiece ? ring : oldest + S::kPiece;
  }
  __device__ __forceinline__ void load_x(int chunk) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int64_t row = min(n * 8 + lane / 4, a.m - 1);
      const int column = (rank * a.chunks + chunk) * S::kColumns + lane % 4 * 8;
      const uint8_t* at = a.x + (blockIdx.y * a.x_batch + row * a.cols + column) * 2;
#pragma unroll
      for (int cell = 0; cell < S::kCells; ++cell) load_x16(&b[n][4 * cell], at + cell * 64);
    }
  }
  __device__ __forceinline__ void load_scales(float (&f)[2][4], int chunk, int i) const {
    const uint32_t row = shared_address(shared) + S::kScales + (i * 16 + lane / 4) * S::scale_pitch(a.scale_cells);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = row + h * 8 * S::scale_pitch(a.scale_cells);
      if (a.scale_dtype == kF32 && a.share_log == 0) {
        load_shared4(f[h][0], f[h][1], f[h][2], f[h][3], at + chunk * 16);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t where = at + ((chunk * 4 + j) >> a.share_log) * item_size(a.scale_dtype), bits = load_shared(where & ~3u);
          f[h][j] = __uint_as_float(a.scale_dtype == kF32 ? bits : where & 2 ? bits & 0xFFFF0000u : bits << 16);
        }
      }
    }
  }
  // The oldest piece, of tile i, times its part of x.
  __device__ __forceinline__ void product(float (&sum)[NT][4], const Weights<FMT, Operand>& weights, int chunk, int i) {
    uint32_t w[S::kCells][2];
#pragma unroll
    for (int cell = 0; cell < S::kCells; cell += 2) {
      uint32_t r[4];
      load_matrices(r, oldest + place(lane & 15, cell + (lane >> 4)));
      w[cell][0] = r[0], w[cell][1] = r[1], w[cell + 1][0] = r[2], w[cell + 1][1] = r[3];
    }
    __syncwarp();
    issue();  // its place is free
    float factor[2][4];
    load_scales(factor, chunk, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float part[NT][4] = {};
#pragma unroll
      for (int step = 4 * j; step < 4 * j + 4; ++step) {
        const uint32_t upper = w[step / 2][0], lower = w[step / 2][1];
        const int p = step % 2 * 2;
        const uint32_t frag[4] = {weights.pair(upper, p), weights.pair(lower, p), weights.pair(upper, p + 1), weights.pair(lower, p + 1)};
#pragma unroll
        for (int n = 0; n < NT; ++n) mma<Operand>(part[n], frag, b[n][2 * step], b[n][2 * step + 1]);
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = j ? fmaf(part[n][e], factor[e >> 1][j], sum[n][e]) : part[n][e] * factor[e >> 1][j];
    }
    if constexpr (FMT == kNf4) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] *= back[n][e & 1];
    }
  }
  // Sums of all chunks, into the place of the first; then of both blocks, of which each stores every other.
  __device__ __forceinline__ void finish(int sums, int warp) const {
    const int units = a.tiles * NT;
#pragma unroll 1
    for (int u = warp; u < units; u += WARPS) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int chunk = 0; chunk < a.chunks; ++chunk) {
        const float4 one = *reinterpret_cast<const float4*>(shared + S::place(sums, chunk * units + u, lane));
        v.x += one.x, v.y += one.y, v.z += one.z, v.w += one.w;
      }
      *reinterpret_cast<float4*>(shared + S::place(sums, u, lane)) = v;
    }
    cluster_sync();
#pragma unroll 1
    for (int u = rank + warp * S::kRanks; u < units; u += WARPS * S::kRanks) {
      const uint32_t at = shared_address(shared) + S::place(sums, u, lane);
      const float4 mine = load_from_block(in_block(at, 0)), other = load_from_block(in_block(at, 1));
      const float v[4] = {mine.x + other.x, mine.y + other.y, mine.z + other.z, mine.w + other.w};
      const int row = row0 + u / NT * 16 + lane / 4, column = u % NT * 8 + lane % 4 * 2;
      constexpr float kFactor = FMT == kNf4 ? 1.f / kRoughFactor : 1.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t to = static_cast<int64_t>(blockIdx.y * a.m + column + (e & 1)) * a.rows + row + (e >> 1) * 8;
        if (column + (e & 1) < a.m) store_float(a.y, to, a.y_dtype, v[e] * kFactor);
      }
    }
    cluster_sync();  // nobody leaves while the other reads
  }
  __device__ __forceinline__ void run(int warp) {
    const int stored = first_matrix(a.stack) + blockIdx.y, pieces = a.chunks * a.tiles, first = pieces * warp / WARPS;
    // The last group moves up where it would reach beyond the end; what two groups have in common is equal.
    row0 = min(static_cast<int>(blockIdx.x) / S::kRanks * a.tiles * 16, a.rows - a.tiles * 16);
    int rest = pieces * (warp + 1) / WARPS - first, chunk = __umulhi(2 * first, a.tiles_magic), i = first - chunk * a.tiles;
    load_x(chunk);  // first: the pieces come in any order, and none is of use without x
    tile = i, left = rest;
    from = a.codes + (static_cast<int64_t>(stored) * a.rows + row0 + i * 16 + lane / 8) * a.row_bytes +
           (rank * a.chunks + chunk) * (S::kCells * 16) + lane % 8 * 16;
    ring = oldest = shared_address(shared) + kTableBytes + warp * (RING * S::kPiece);
    fetch_scales(stored);
#pragma unroll 1
    for (int k = 0; k < RING; ++k) issue();
    if constexpr (FMT == kNf4) {
      fill_rough_table<S::kThreads>(shared, threadIdx.x, a.rough_book.v[threadIdx.x & 15]);
    } else {
      fill_table<Operand, S::kThreads, 1>(shared, threadIdx.x, a.book.v[threadIdx.x & 15]);
    }
    wait_for_all_but<RING>();  // the scales
    __syncthreads();
    const Weights<FMT, Operand> weights{shared, static_cast<uint32_t>(lane * 4), FieldBits{}};
    const int sums = S::sums(a.tiles, a.scale_cells);
#pragma unroll 1
    while (rest > 0) {
      if constexpr (FMT == kNf4) {
#pragma unroll
        for (int n = 0; n < NT; ++n) to_half(b[n], lane % 4, back[n]);
      }
      const int end = min(i + rest, a.tiles);
      rest -= end - i;
#pragma unroll 1
      for (; i < end; ++i) {
        wait_for_all_but<RING - 1>();
        __syncwarp();
        float sum[NT][4];
        product(sum, weights, chunk, i);
#pragma unroll
        for (int n = 0; n < NT; ++n)
          store_shared4(shared_address(shared) + S::place(sums, (chunk * a.tiles + i) * NT + n, lane), sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      }
      i = 0, ++chunk;
      if (rest > 0) load_x(chunk);
    }
    __syncthreads();
    finish(sums, warp);
  }
};
#endif

template <int FMT, class E, int NT, int RING, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1) split_kernel(const __grid_constant__ SplitArgs a) {
#if EFORMER_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  SplitBlock<FMT, E, NT, RING, WARPS> block{a, shared};
  block.lane = threadIdx.x % 32, block.rank = blockIdx.x % SplitShape<NT, RING, WARPS>::kRanks;
  block.run(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0));
#endif
}

}  // namespace eformer

// y = x @ D.T for at most 16 rows of x, where every microsecond that is not spent on reading D counts.
//
// A block owns groups of up to 8 tiles of 16 rows of D. KC columns of a tile are a piece; the pieces of a group, one
// chunk of columns after the other, are dealt out to the warps, and from then on a warp is alone: it copies its pieces
// into a ring of its own, RING pieces ahead, takes the oldest into registers, asks for the next, decodes and multiplies,
// adds the result to sums of its own in shared memory, and waits for nobody until the sums of all warps are added up.
// So memory is asked from the first cycle to the last, and decoding happens meanwhile. One or two pieces ahead are
// enough: more are served in any order, and the first one comes later. x goes from memory into registers in the order in
// which the decoded weights come, before the first piece is asked for, and serves all tiles. The loop over pieces is
// rolled up: a warp passes it only a few times, and instructions have to be fetched, too.
//
// bf16 holds the codebook of NF4 badly, so an x of bf16 is brought to f16, the rows of a chunk times a power of two of
// their own. Where the result is bf16, one f16 per value has to do (TERMS = 1): it is rounded in eight ways, one for
// every place in eight, so that the errors cancel. Elsewhere a value is the sum of two, which costs a second lookup.
#pragma once

#include <type_traits>

#include "books.h"
#include "decode.cuh"
#include "skinny_ops.cuh"

namespace eformer {

struct SkinnyArgs {
  const uint8_t* codes;
  const uint8_t* scale;  // of whole rows
  const uint8_t* offset;  // of blocks
  const uint8_t* x;
  void* y;
  int32_t m, rows, cols, row_bytes;
  int32_t tiles, groups, total, chunks;  // tiles per group, groups per matrix and in all, chunks of columns
  uint32_t tiles_magic, groups_magic;    // 2^31 / tiles and 2^31 / groups, rounded up
  int32_t scale_cells, share_log;        // 16 bytes of scales per row; groups of 64 columns per block (logarithm)
  int32_t scale_dtype, row_scale, y_dtype;
  int32_t offset_row, offset_pitch, offset_unit, offset_dtype;  // bytes of a row: stored, in shared memory, per copy
  float centre;
  int32_t width_log;  // lanes of four that keep sums (logarithm)
  int64_t next_tile, next_chunk;  // bytes from a piece to the next one of its chunk, to the first one of the next chunk
  int64_t codes_batch, scale_batch, offset_batch, x_batch, y_batch;
  Stack stack;
  Book book;
  RoughBook rough_book;
  FieldBits fields;
};

template <int FMT, int NT, int KC, int RING, int WARPS, int TERMS>
struct SkinnyShape {
  static constexpr int kThreads = WARPS * 32, kMostTiles = 8;
  static constexpr int kCells = KC / kPerChunk<FMT>;  // of 16 bytes, per row of a piece
  static constexpr int kSegment = kCells * 16;
  static constexpr int kPiece = 16 * kSegment;
  static constexpr int kRowsPerCopy = kCells == 1 ? 16 : 32 / kCells;
  static constexpr int kSteps = kPerChunk<FMT> / 16;  // matrix instructions per cell
  static constexpr int kX = kCells * kSteps * 2;      // registers of x per eight rows of x
  static constexpr int kGroups = kInBlocks<FMT> ? KC / kGroup<FMT> : 1;  // sums with scales of their own
  static constexpr int kRing = kInNibbles<FMT> ? kTableBytes : 0;
  static constexpr int kScales = kRing + WARPS * RING * kPiece;
  // Behind the scales: offsets of blocks, then the sums. A table of single values leaves 128 bytes free in every 256; those
  // of four warps live there.
  static constexpr int kInTable = kInNibbles<FMT> && TERMS == 1 ? 4 : 0;
  static __host__ __device__ int scale_pitch(int cells) { return (cells | 1) * 16; }  // rows start in other banks
  static __host__ __device__ int offsets(int cells, int tiles) {
    return kScales + (kInBlocks<FMT> ? tiles * 16 * scale_pitch(cells) : 0);
  }
  static __host__ __device__ int sums(int cells, int pitch, int tiles) {
    return offsets(cells, tiles) + (kShifted<FMT> ? tiles * 16 * pitch : 0);
  }
  static __host__ __device__ int sum_bytes(int tiles, int width_log) { return tiles * NT * 128 << width_log; }
  static __host__ __device__ int width_log(int m) { return m <= 2 ? 0 : m <= 4 ? 1 : 2; }
  static __host__ int shared_bytes(int tiles, int cells, int pitch, int m) {
    return sums(cells, pitch, tiles) + (WARPS - kInTable) * sum_bytes(tiles, width_log(m));
  }
  // Where eight lanes' shares of a warp's sums are: unit n of 128 bytes.
  static __device__ __forceinline__ int sum_unit(const SkinnyArgs& a, int warp, int n) {
    if (warp < kInTable) return ((warp * 64 + n) * 2 + 1) * 128;
    return sums(a.scale_cells, a.offset_pitch, a.tiles) + (warp - kInTable) * sum_bytes(a.tiles, a.width_log) + n * 128;
  }
  // Cells change places with the row, so that eight lanes that read a cell do not meet in a bank.
  static __device__ __forceinline__ int place(int row, int cell) {
    constexpr int kShift = kCells == 8 ? 0 : kCells == 4 ? 1 : 2;
    return row * kSegment + ((cell ^ ((row >> kShift) & (kCells - 1))) * 16);
  }
};

// One element of the product without anything added to the weights, for what comes out infinite or NaN. It is slow.
template <int FMT, class E>
__device__ __noinline__ float exact(const SkinnyArgs& a, int first, int matrix, int row, int column) {
  [[maybe_unused]] constexpr int kPerByte = eformer::kPerByte<FMT>;
  const uint8_t* codes = a.codes + (first + matrix) * a.codes_batch + static_cast<int64_t>(row) * a.row_bytes;
  const E* x = reinterpret_cast<const E*>(a.x) + matrix * a.x_batch + static_cast<int64_t>(column) * a.cols;
  float sum = 0.f;
  if constexpr (kShifted<FMT>) {
    const int block = kGroup<FMT> << a.share_log;
    const int64_t stored = first + matrix, at = static_cast<int64_t>(row) * ceil_div(a.cols, block);
    const uint8_t *scale = a.scale + stored * a.scale_batch, *offset = a.offset + stored * a.offset_batch;
#pragma unroll 1
    for (int k = 0; k < a.cols; ++k) {  // bytes have their centre subtracted
      const float s = load_float(scale, at + k / block, a.scale_dtype);
      const float code = static_cast<float>(kPerByte == 1 ? codes[k] ^ 128 : codes[k / 2] >> (k % 2 ? 0 : 4) & 15);
      const float value = a.offset_dtype != kU8 ? fmaf(code, s, load_float(offset, at + k / block, a.offset_dtype))
                                         : (code - static_cast<float>(offset[at + k / block])) * s;
      sum += static_cast<float>(x[k]) * value;
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < a.cols; ++k) {
      const int field = codes[k / kPerByte] >> (8 / kPerByte * (kPerByte - 1 - k % kPerByte)) & (FMT == kTernary ? 3 : 1);
      sum += static_cast<float>(x[k]) * static_cast<float>(FMT == kTernary ? field - 1 : 2 * field - 1);
    }
  }
  return sum;
}

template <int FMT, class E, int NT, int KC, int RING, int WARPS, int TERMS>
struct SkinnyWarp {
  using S = SkinnyShape<FMT, NT, KC, RING, WARPS, TERMS>;
  using Operand = std::conditional_t<FMT == kNf4, __half, E>;
  static constexpr bool kBiased = FMT == kTernary || FMT == kBinary;
  static constexpr bool kConverted = !std::is_same_v<Operand, E>;

  const SkinnyArgs& a;
  Weights<FMT, Operand> weights;
  uint8_t* shared;
  int lane, g, t;
  int first_stored;                    // the number of the first matrix
  int first_chunk, first_tile, count;  // of this warp's pieces in every group
  int group, tile, left;               // the piece that is asked for next
  const uint8_t* from;                 // this lane's cell of it
  uint32_t ring, oldest;               // in shared memory: this warp's ring, the oldest piece in it
  uint32_t sums, sum_pitch;            // this lane's sums of the first tile, and how far those of the next one are
  uint32_t b[NT][S::kX];
  float start[kBiased ? NT : 1][4];  // what sums start from
  float back[kConverted ? NT : 1][2];  // undoes what this lane's two columns of sums were multiplied by
  uint32_t scale_at[S::kGroups];     // in shared memory, of the first tile
  uint32_t offset_at, first_group;   // likewise, of the row; of the chunk
  float x_sums[kShifted<FMT> ? NT : 1][S::kGroups][2];  // over a group, of this lane's two columns

  __device__ __forceinline__ int matrix_of(int index) const { return __umulhi(2 * index, a.groups_magic); }
  // The last group of a matrix moves up where it would reach beyond the end; what two groups have in common is equal.
  __device__ __forceinline__ int row_of(int index) const {
    return min((index - matrix_of(index) * a.groups) * a.tiles * 16, a.rows - a.tiles * 16);
  }

  __device__ __forceinline__ void at_group(int index) {
    group = index, tile = first_tile, left = count;
    if (index < a.total) {
      const int64_t row = row_of(index) + first_tile * 16 + lane / S::kCells;
      from = a.codes + (first_stored + matrix_of(index)) * a.codes_batch + row * a.row_bytes + first_chunk * S::kSegment +
             lane % S::kCells * 16;
    }
  }
  __device__ __forceinline__ void issue() {
    if (group < a.total) {
      if (S::kCells > 1 || lane < 16) {
#pragma unroll
        for (int j = 0; j < 16; j += S::kRowsPerCopy)
          copy_async16(oldest + S::place(lane / S::kCells + j, lane % S::kCells),
                       from + static_cast<uint32_t>(j * a.row_bytes));
      }
      const bool last = ++tile == a.tiles;
      tile = last ? 0 : tile;
      from += last ? a.next_chunk : a.next_tile;
      if (--left == 0) at_group(group + gridDim.x);
    }
    commit_copies();
    oldest = oldest + S::kPiece == ring + RING * S::kPiece ? ring : oldest + S::kPiece;
  }

  // x of one chunk.
  __device__ __forceinline__ void load_x(int c, int matrix) {
    constexpr int kPer = kPerChunk<FMT> / 4;  // columns of a lane per cell
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int64_t row = min(n * 8 + g, a.m - 1);
      const uint8_t* at = a.x + (matrix * a.x_batch + row * a.cols + c * KC + t * kPer) * 2;
#pragma unroll
      for (int cell = 0; cell < S::kCells; ++cell) {
        if constexpr (kPer == 4) {
          load_x8(&b[n][2 * cell], at + cell * (kPerChunk<FMT> * 2));
        } else {
#pragma unroll
          for (int i = 0; i < kPer / 8; ++i)
            load_x16(&b[n][cell * (kPer / 2) + i * 4], at + (cell * kPerChunk<FMT> + i * 8) * 2);
        }
      }
    }
  }
  // What load_x will want, into the cache.
  __device__ __forceinline__ void foresee_x(int c, int matrix) const {
    constexpr int kLines = KC / 64;
    const uint8_t* at = a.x + (matrix * a.x_batch + static_cast<int64_t>(c) * KC) * 2 + lane % kLines * 128;
#pragma unroll
    for (int r = lane / kLines; r < NT * 8; r += 32 / kLines)
      if (r < a.m) prefetch(at + static_cast<int64_t>(r) * a.cols * 2);
  }
  // Puts x into the order of the decoded pairs: fields are decoded where they stand, partners are half a word apart.
  __device__ __forceinline__ void take_x() {
    if constexpr (kConverted) {
#pragma unroll
      for (int n = 0; n < NT; ++n) to_half(b[n], t, back[n]);
    }
    if constexpr (kShifted<FMT>) {
      constexpr int kPer = S::kCells / S::kGroups * S::kSteps;
      constexpr uint32_t kOnes = Pair<Operand>::kOne * 0x00010001u;
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < S::kGroups; ++j) {
          float sum[4] = {};
#pragma unroll
          for (int step = j * kPer; step < (j + 1) * kPer; ++step) mma<Operand>(sum, ones, b[n][2 * step], b[n][2 * step + 1]);
          x_sums[n][j][0] = sum[0], x_sums[n][j][1] = sum[1];
        }
    }
    if constexpr (kBiased) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        constexpr int kWord = S::kSteps * 2;
        float parts[4][4] = {};
#pragma unroll
        for (int i = 0; i < S::kX; i += kWord) {
          uint32_t pair[kWord];
#pragma unroll
          for (int j = 0; j < kWord / 2; ++j) {
            pair[2 * j] = __byte_perm(b[n][i + j], b[n][i + kWord / 2 + j], 0x5410);
            pair[2 * j + 1] = __byte_perm(b[n][i + j], b[n][i + kWord / 2 + j], 0x7632);
          }
#pragma unroll
          for (int j = 0; j < kWord; ++j) b[n][i + j] = pair[j];
        }
#pragma unroll
        for (int i = 0; i < S::kX; i += 2) {
          const uint32_t lo = Weights<FMT, E>::bias(i % kWord), hi = Weights<FMT, E>::bias((i + 1) % kWord);
          const uint32_t frag[4] = {lo, lo, hi, hi};
          mma<E>(parts[i / 2 % 4], frag, b[n][i], b[n][i + 1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) start[n][e] = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
      }
    }
  }

  // Brings the scales of a group into shared memory, with all other warps.
  __device__ __forceinline__ void fetch_scales(int index, int warp) const {
    const int pitch = S::scale_pitch(a.scale_cells), row0 = row_of(index);
    const uint8_t* src = a.scale + (first_stored + matrix_of(index)) * a.scale_batch + static_cast<int64_t>(row0) * (a.scale_cells * 16);
    const uint32_t dst = shared_address(shared) + S::kScales;
#pragma unroll 1
    for (int row = warp; row < a.tiles * 16; row += WARPS)
#pragma unroll 1
      for (int cell = lane; cell < a.scale_cells; cell += 32)
        copy_async16(dst + row * pitch + cell * 16, src + (row * a.scale_cells + cell) * 16);
    if constexpr (kShifted<FMT>) {
      const uint8_t* matrix = a.offset + (first_stored + matrix_of(index)) * a.offset_batch;
      const uint8_t* from = matrix + static_cast<int64_t>(row0) * a.offset_row;
      const uint32_t to = shared_address(shared) + S::offsets(a.scale_cells, a.tiles);
#pragma unroll 1
      for (int row = warp; row < a.tiles * 16; row += WARPS)
#pragma unroll 1
        for (int at = lane * a.offset_unit; at < a.offset_row; at += 32 * a.offset_unit)
          copy_async(to + row * a.offset_pitch + at, from + row * a.offset_row + at, a.offset_unit);
    }
    commit_copies();
  }
  __device__ __forceinline__ void find_scales(int c) {
    if constexpr (kInBlocks<FMT>) {
#pragma unroll
      for (int j = 0; j < S::kGroups; ++j)
        scale_at[j] = shared_address(shared) + S::kScales + g * S::scale_pitch(a.scale_cells) +
                      ((c * S::kGroups + j) >> a.share_log) * item_size(a.scale_dtype);
    }
    if constexpr (kShifted<FMT>) {
      first_group = c * S::kGroups;
      offset_at = shared_address(shared) + S::offsets(a.scale_cells, a.tiles) + g * a.offset_pitch;
    }
  }
  // Of rows g and g + 8 of tile i.
  __device__ __forceinline__ void load_scales(float (&f)[2][S::kGroups], int i) const {
    const bool plain = a.scale_dtype == kF32 && a.share_log == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t offset = (i * 16 + h * 8) * S::scale_pitch(a.scale_cells);
      if (plain && S::kGroups % 4 == 0) {
#pragma unroll
        for (int j = 0; j + 3 < S::kGroups; j += 4)
          load_shared4(f[h][j], f[h][j + 1], f[h][j + 2], f[h][j + 3], scale_at[0] + offset + 4 * j);
      } else {
#pragma unroll
        for (int j = 0; j < S::kGroups; ++j) {
          const uint32_t bits = load_shared((scale_at[j] + offset) & ~3u);
          const uint32_t half = (scale_at[j] & 2) ? bits & 0xFFFF0000u : bits << 16;
          f[h][j] = __uint_as_float(a.scale_dtype == kF32 ? bits : half);
        }
      }
    }
  }

  // What the same rows have beyond (code - centre) * scale. A byte becomes a float as the last bits of 2^23.
  __device__ __forceinline__ void load_offsets(float (&f)[2][S::kGroups], const float (&scale)[2][S::kGroups], int i) const {
    const float top = 8388608.f + a.centre;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t row = offset_at + (i * 16 + h * 8) * a.offset_pitch;
      const bool plain = a.share_log == 0 && S::kGroups % 4 == 0;
      if (a.offset_dtype != kU8) {
        if (plain && a.offset_dtype == kF32) {
#pragma unroll
          for (int j = 0; j + 3 < S::kGroups; j += 4)
            load_shared4(f[h][j], f[h][j + 1], f[h][j + 2], f[h][j + 3], row + (first_group + j) * 4);
        } else {
#pragma unroll
          for (int j = 0; j < S::kGroups; ++j) {
            const uint32_t at = row + ((first_group + j) >> a.share_log) * item_size(a.offset_dtype), bits = load_shared(at & ~3u);
            const uint32_t half = at & 2 ? bits >> 16 : bits & 0xFFFF;
            f[h][j] = __uint_as_float(a.offset_dtype == kF32 ? bits : half << 16);
            if (a.offset_dtype == kF16) f[h][j] = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
          }
        }
#pragma unroll
        for (int j = 0; j < S::kGroups; ++j) f[h][j] = fmaf(a.centre, scale[h][j], f[h][j]);
        continue;
      }
      uint32_t zero[S::kGroups];
      if (plain) {
#pragma unroll
        for (int j = 0; j + 3 < S::kGroups; j += 4) {
          const uint32_t four = load_shared(row + first_group + j);
#pragma unroll
          for (int e = 0; e < 4; ++e) zero[j + e] = __byte_perm(four, 0x4B000000u, 0x7440 + e);
        }
      } else {
#pragma unroll
        for (int j = 0; j < S::kGroups; ++j) {
          const uint32_t at = (first_group + j) >> a.share_log;
          zero[j] = __byte_perm(load_shared(row + (at & ~3u)), 0x4B000000u, 0x7440 + (at & 3));
        }
      }
#pragma unroll
      for (int j = 0; j < S::kGroups; ++j) f[h][j] = (top - __uint_as_float(zero[j])) * scale[h][j];
    }
  }

  // Step `step` of a piece: 16 columns.
  __device__ __forceinline__ void multiply(float (&sum)[NT][4], const uint32_t (&w)[S::kCells][2], int step) const {
    const uint32_t upper = w[step / S::kSteps][0], lower = w[step / S::kSteps][1];
    const int i = step % S::kSteps * 2;
    const uint32_t frag[4] = {weights.pair(upper, i), weights.pair(lower, i), weights.pair(upper, i + 1),
                              weights.pair(lower, i + 1)};
#pragma unroll
    for (int n = 0; n < NT; ++n) mma<Operand>(sum[n], frag, b[n][2 * step], b[n][2 * step + 1]);
    if constexpr (TERMS == 2) {
      const uint32_t rest[4] = {weights.pair(upper, i, 1), weights.pair(lower, i, 1), weights.pair(upper, i + 1, 1),
                                weights.pair(lower, i + 1, 1)};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma<Operand>(sum[n], rest, b[n][2 * step], b[n][2 * step + 1]);
    }
  }
  __device__ __forceinline__ void load_codes(uint32_t (&w)[S::kCells][2]) const {
    const uint32_t base = oldest;
    if constexpr (S::kCells == 1) {
      load_matrix_pair(w[0], base + (lane & 15) * 16);
    } else {
#pragma unroll
      for (int cell = 0; cell < S::kCells; cell += 2) {
        uint32_t r[4];
        load_matrices(r, base + S::place(lane & 15, cell + (lane >> 4)));
        w[cell][0] = r[0], w[cell][1] = r[1], w[cell + 1][0] = r[2], w[cell + 1][1] = r[3];
      }
    }
  }
  // The product of the oldest piece, which is of tile i, with its part of x.
  __device__ __forceinline__ void product(float (&sum)[NT][4], int i) {
    uint32_t w[S::kCells][2];
    load_codes(w);
    __syncwarp();
    issue();  // its place is free
    if constexpr (kInBlocks<FMT>) {
      float factor[2][S::kGroups];
      load_scales(factor, i);
      float more[2][S::kGroups];
      if constexpr (kShifted<FMT>) load_offsets(more, factor, i);
      constexpr int kPer = S::kCells / S::kGroups * S::kSteps;
#pragma unroll
      for (int j = 0; j < S::kGroups; ++j) {
        float part[NT][4] = {};
#pragma unroll
        for (int step = j * kPer; step < (j + 1) * kPer; ++step) multiply(part, w, step);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scaled = part[n][e] * factor[e >> 1][j];
            sum[n][e] = j ? fmaf(part[n][e], factor[e >> 1][j], sum[n][e]) : scaled;
            if constexpr (kShifted<FMT>) sum[n][e] = fmaf(more[e >> 1][j], x_sums[n][j][e & 1], sum[n][e]);
          }
      }
      if constexpr (kConverted) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[n][e] *= back[n][e & 1];
      }
    } else {
      float part[2][NT][4] = {};  // two chains, whose instructions do not wait for each other
#pragma unroll
      for (int n = 0; n < NT && kBiased; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) part[0][n][e] = start[n][e];
#pragma unroll
      for (int step = 0; step < S::kCells * S::kSteps; ++step) multiply(part[step % 2], w, step);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = part[0][n][e] + part[1][n][e];
    }
  }

  __device__ __forceinline__ void add(const float (&sum)[NT][4], int i, bool first) const {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (n * 8 + t * 2 >= a.m) continue;
      const uint32_t at = sums + (i * NT + n) * sum_pitch;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      if (!first) load_shared4(v[0], v[1], v[2], v[3], at);
      store_shared4(at, v[0] + sum[n][0], v[1] + sum[n][1], v[2] + sum[n][2], v[3] + sum[n][3]);
    }
  }

  // One group of rows; x of its first chunk has been asked for.
  __device__ __forceinline__ void run(int index) {
    const int next = index + gridDim.x;
    int c = first_chunk, i = first_tile, rest = count, unseen = count < a.tiles ? 0 : a.tiles;
    if (unseen == 0) {
      const float nothing[NT][4] = {};
      for (int k = 0; k < a.tiles; ++k) add(nothing, k, true);
    }
#pragma unroll 1
    while (rest > 0) {
      take_x();
      find_scales(c);
      const int here = min(rest, a.tiles - i);
      rest -= here;
      if (rest > 0) foresee_x(c + 1, matrix_of(index));
#pragma unroll 1
      for (const int end = i + here; i < end; ++i) {
        wait_for_all_but<RING - 1>();
        __syncwarp();
        float sum[NT][4];
        product(sum, i);
        add(sum, i, unseen > 0);
        --unseen;
      }
      i = 0, ++c;
      if (rest > 0) {
        load_x(c, matrix_of(index));
      } else if (next < a.total) {
        load_x(first_chunk, matrix_of(next));
      }
    }
  }
  // Where the element of y is that a thread stores: four threads per share of a lane.
  struct Element {
    int matrix, row, column;
  };
  __device__ __forceinline__ Element element(int index, int u) const {
    const int part = threadIdx.x % 4, row = u >> a.width_log & 7, quarter = u & ((1 << a.width_log) - 1);
    const int cell = u >> (3 + a.width_log), n = NT == 1 ? 0 : cell % NT;
    return {matrix_of(index), row_of(index) + cell / NT * 16 + row + (part >> 1) * 8, n * 8 + 2 * quarter + (part & 1)};
  }
  __device__ __forceinline__ float factor_of(const Element& e) const {
    if (FMT == kNf4) return 1.f / (TERMS == 1 ? kRoughFactor : kCodebookFactor<__half>);
    if (kInBlocks<FMT>) return 1.f;
    if (!a.row_scale || e.row >= a.rows) return 1.f;
    return load_float(a.scale + (first_stored + e.matrix) * a.scale_batch, a.row_scale == 1 ? e.row : 0, a.scale_dtype);
  }
  // Adds up what all warps have. `factor` is that of the first element.
  __device__ __forceinline__ void finish(int index, float factor) const {
    const int part = threadIdx.x % 4, all = a.tiles * NT * 8 << a.width_log;
#pragma unroll 1
    for (int u = threadIdx.x / 4; u < all; u += S::kThreads / 4) {
      const Element e = element(index, u);
      if (u >= S::kThreads / 4) factor = factor_of(e);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS / 4; ++w) {
        const int from = S::sum_unit(a, part + 4 * w, u >> 3) + (u & 7) * 16;
        const float4 one = *reinterpret_cast<const float4*>(shared + from);
        v.x += one.x, v.y += one.y, v.z += one.z, v.w += one.w;
      }
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
        v.z += __shfl_xor_sync(~0u, v.z, d), v.w += __shfl_xor_sync(~0u, v.w, d);
      }
      float total = part == 0 ? v.x : part == 1 ? v.y : part == 2 ? v.z : v.w;
      if constexpr (kBiased || kShifted<FMT>) {
        if (e.column < a.m && e.row < a.rows && !isfinite(total)) total = exact<FMT, E>(a, first_stored, e.matrix, e.row, e.column);
      }
      const int64_t at = e.matrix * a.y_batch + static_cast<int64_t>(e.column) * a.rows + e.row;
      if (e.column < a.m && e.row < a.rows) store_float(a.y, at, a.y_dtype, total * factor);
    }
  }
};

template <int FMT, class E, int NT, int KC, int RING, int WARPS, int TERMS>
__global__ void __launch_bounds__(WARPS * 32, 1) skinny_kernel(const __grid_constant__ SkinnyArgs a) {
#if __CUDA_ARCH__ >= 900  // on earlier ones it has not been measured, and is not asked
  using S = SkinnyShape<FMT, NT, KC, RING, WARPS, TERMS>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  SkinnyWarp<FMT, E, NT, KC, RING, WARPS, TERMS> w{a, {shared, static_cast<uint32_t>(lane * 4), a.fields}, shared};
  w.lane = lane, w.g = lane / 4, w.t = lane % 4;
  w.first_stored = first_matrix(a.stack);
  const int pieces = a.chunks * a.tiles, first = pieces * warp / WARPS;
  w.count = pieces * (warp + 1) / WARPS - first;
  w.first_chunk = __umulhi(2 * first, a.tiles_magic), w.first_tile = first - w.first_chunk * a.tiles;
  w.ring = w.oldest = shared_address(shared) + S::kRing + warp * (RING * S::kPiece);
  w.load_x(w.first_chunk, w.matrix_of(blockIdx.x));  // first: the pieces come in any order, and none is of use without x
  w.at_group(w.count > 0 ? static_cast<int>(blockIdx.x) : a.total);
  if constexpr (kInBlocks<FMT>) w.fetch_scales(blockIdx.x, warp);
#pragma unroll 1
  for (int i = 0; i < RING; ++i) w.issue();
  const int share = (w.g << a.width_log) + w.t;
  w.sums = shared_address(shared) + S::sum_unit(a, warp, share >> 3) + (share & 7) * 16;
  w.sum_pitch = (warp < S::kInTable ? 256 : 128) << a.width_log;
  if constexpr (kInBlocks<FMT>) {
    if constexpr (FMT == kNf4 && TERMS == 1) {
      fill_rough_table<S::kThreads>(shared, threadIdx.x, a.rough_book.v[threadIdx.x & 15]);
    } else if constexpr (kInNibbles<FMT>) {
      fill_table<typename decltype(w)::Operand, S::kThreads, TERMS>(shared, threadIdx.x, a.book.v[threadIdx.x & 15]);
    }
    wait_for_all_but<RING>();  // the scales
    __syncthreads();
  }
#pragma unroll 1
  for (int index = blockIdx.x; index < a.total; index += gridDim.x) {
    const float factor = w.factor_of(w.element(index, threadIdx.x / 4));  // early: nobody waits for it at the end
    w.run(index);
    __syncthreads();
    const int next = index + gridDim.x;
    if (kInBlocks<FMT> && next < a.total) w.fetch_scales(next, warp);
    w.finish(index, factor);
    if (next < a.total) {
      wait_for_copies();
      __syncthreads();  // the scales are there, and the sums have been read
    }
  }
#endif
}

}  // namespace eformer

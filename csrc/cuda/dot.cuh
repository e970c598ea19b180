// y = x @ D.T for few rows of x: the product every decoding step of a language model consists of.
//
// A block owns some tiles of 16 rows of D and walks along their columns. Codes, the part of x that belongs to them and the scales
// of blocks come into shared memory by asynchronous copies, several stages ahead, as whole 128-byte lines: four warps do
// nothing else. Eight warps split the columns of a stage (WK ways) and its tiles (8 / WK ways, at most T tiles each). Weights are the left operand of the matrix
// instruction, so that up to eight rows of x cost one instruction per 256 weights. A lane keeps the values that are
// neighbours in memory and the order of the summation follows from that; x is read in the same order, so nothing is
// shuffled. The float32 sum over a block is multiplied by its scale, so weights are never rounded twice.
#pragma once

#include "books.h"
#include "decode.cuh"

namespace eformer {

struct DotArgs {
  CUtensorMap codes_map, scale_map, x_map;  // when `boxes`
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* offset;
  const uint8_t* x;
  void* y;
  float* partial;         // (splits, batch, m, rows) when the columns are split over blocks, else null
  const int32_t* groups;  // rows of x per matrix (ragged product), else null
  int32_t m, rows, cols, row_bytes;
  int32_t scale_cols, block, group_count;
  int32_t tiles;   // tiles of 16 rows per block, at most T * 8 / WK
  int32_t x_rows;  // rows of x per stage, at most 8 * NT
  int32_t m_chunks, stages_per_split, stages;
  int32_t boxes;               // the copy engine fetches everything
  int32_t codes_unit, x_unit;  // alignment of the rows in bytes: 16, 4 or 1
  // Scales of blocks: bytes per copy (16, 8 or 4; 0 when a stage holds no whole copies), bytes and copies (logarithm) per
  // row and stage, and how many groups of 64 (or 32) columns share one (logarithm).
  int32_t scale_piece, scale_bytes, scale_copies_log, scale_share_log;
  int32_t scale_dtype, row_scale, y_dtype;  // row_scale: 0 none, 1 one per row, 2 one for all
  int32_t offset_dtype;
  float centre;
  int64_t codes_batch, scale_batch, offset_batch, x_batch, y_batch;
  Stack stack;
  Book book;
};

// The columns of a warp in one stage fall into parts that are decoded and multiplied one after the other.
template <int FMT>
struct Parts {
  static constexpr bool kFine = kInNibbles<FMT> && kGroup<FMT> == 32;
  static constexpr int kCount = FMT == kBinary ? 4 : FMT == kTernary || kFine ? 2 : 1;
  static constexpr int kSteps = kFine || kInBytes<FMT> ? 2 : 4;  // matrix instructions deep
  static constexpr int kTerms = kIsNf4<FMT> ? 2 : 1;             // 16-bit floats whose sum is a value
};

template <int FMT, int NT, int T, int WK, int STAGES>
struct DotShape {
  // No loading warps where the others need all registers: then one thread asks the copy engine (`boxes` only).
  static constexpr bool kSelfLoading = NT > 4;
  static constexpr int kLoaders = kSelfLoading ? 0 : 128;
  static constexpr int kThreads = kWorkers + kLoaders;
  static constexpr int kSegment = WK * 32;  // bytes of a row per stage
  static constexpr int kBoxes = kSegment / 128;
  static constexpr int kChunks = kSegment / 16;
  static constexpr int kCols = kChunks * kPerChunk<FMT>;
  static constexpr int kTilesAcross = kWarps / WK;
  static constexpr int kTiles = T * kTilesAcross;
  static constexpr int kTable = kInNibbles<FMT> ? kTableBytes : 0;
  static constexpr int kXBytes = kCols * 2;  // of a row of x per stage
  // x lies in boxes of so many columns of every row. 64 bytes per row: lanes that read together read neighbours. 128:
  // chunks change places with the line they are in, as in the boxes of codes.
  static constexpr int kXBox = kInNibbles<FMT> ? 32 : 64;
  static __device__ __forceinline__ int x_place(int x_rows, int row, int piece) {
    constexpr int kPieces = kXBox / 8;
    const int line = piece / kPieces * x_rows + row, c = piece % kPieces;
    return line * (kXBox * 2) + (kXBox == 64 ? c ^ (line & 7) : c) * 16;
  }
  // One per group at most; with an offset beside it.
  static constexpr int kScalePitch = kInNibbles<FMT> ? kCols / kGroup<FMT> * (kShifted<FMT> ? 8 : 4) : 0;
  // Codes lie in boxes of 128 bytes of every row; lanes that read the same chunk of eight rows do not meet in a bank.
  static __device__ __forceinline__ int place(int rows, int row, int chunk) {
    return (chunk / 8 * rows + row) * 128 + ((chunk % 8 ^ (row & 7)) * 16);
  }
  static __host__ __device__ int x_bytes(int x_rows) { return x_rows * kXBytes; }
  static __host__ __device__ int stage_bytes(int tiles, int x_rows) {
    return (tiles * 16 * (kSegment + kScalePitch) + x_bytes(x_rows) + 1023) / 1024 * 1024;
  }
  // Of one column of y while warps add up: lanes write eight rows of four columns without meeting in a bank.
  static __host__ __device__ int sum_pitch(int tiles) { return tiles * 16 + 4; }
  static __host__ int shared_bytes(int tiles, int x_rows) {
    int ring = STAGES * stage_bytes(tiles, x_rows), sums = WK * x_rows * sum_pitch(tiles) * 4;
    return kTable + (ring > sums ? ring : sums);
  }
};

// Brings in one stage whatever the alignment; for storage whose rows are not a multiple of 16 bytes, and for edges.
template <int FMT, class S>
__device__ __noinline__ void issue_any(const DotArgs& a, uint8_t* base, const uint8_t* codes, const uint8_t* x, int row0,
                                       int m, int stage) {
  const int loader = threadIdx.x - kWorkers;
  for (int i = loader; i < a.tiles * 16 * S::kChunks; i += S::kLoaders) {
    int row = i / S::kChunks, c = i % S::kChunks, byte = stage * S::kSegment + c * 16;
    int valid = row0 + row < a.rows ? clamp_to(a.row_bytes - byte, 16) : 0;
    const uint8_t* src = valid ? codes + static_cast<int64_t>(row0 + row) * a.row_bytes + byte : codes;
    copy_chunk(base + S::place(a.tiles * 16, row, c), src, valid, a.codes_unit);
  }
  uint8_t* xs = base + a.tiles * 16 * S::kSegment;
  constexpr int kPieces = S::kXBytes / 16;
  const int k0 = stage * S::kCols;
  for (int i = loader; i < m * kPieces; i += S::kLoaders) {
    int row = i / kPieces, piece = i % kPieces;
    int valid = clamp_to((a.cols - k0 - piece * 8) * 2, 16);
    const uint8_t* src = valid ? x + (static_cast<int64_t>(row) * a.cols + k0 + piece * 8) * 2 : x;
    copy_chunk(xs + S::x_place(a.x_rows, row, piece), src, valid, a.x_unit);
  }
}

// The scales of one stage: as they are stored where they can be copied, else one float32 per group of columns, or two:
// scale and offset.
template <int FMT, class S>
__device__ __noinline__ void issue_scales_any(const DotArgs& a, uint8_t* dst, const uint8_t* scale, const uint8_t* offset,
                                              int row0, int stage) {
  const int loader = threadIdx.x - kWorkers;
  const bool raw = a.scale_piece != 0;
  const int step = raw ? a.block : kGroup<FMT>, per_row = S::kCols / step, k0 = stage * S::kCols;
  for (int i = loader; i < a.tiles * 16 * per_row; i += S::kLoaders) {
    int row = i / per_row, j = i % per_row, at = (k0 + j * step) / a.block;
    bool there = row0 + row < a.rows && at < a.scale_cols;
    const int64_t from = static_cast<int64_t>(row0 + row) * a.scale_cols + at;
    float v = there ? load_float(scale, from, a.scale_dtype) : 0.f;
    if constexpr (kShifted<FMT>) {
      const float more = there ? offset_of(offset, from, a.offset_dtype, a.centre, v) : 0.f;
      *reinterpret_cast<float2*>(dst + row * S::kScalePitch + j * 8) = make_float2(v, more);
      continue;
    }
    store_float(dst + row * (raw ? a.scale_bytes : S::kScalePitch), j, raw ? a.scale_dtype : kF32, v);
  }
}

template <int FMT, class E, int NT, int T, int WK, int STAGES>
struct DotBlock {
  using S = DotShape<FMT, NT, T, WK, STAGES>;
  using P = Parts<FMT>;
  static constexpr int kB = 2 * P::kSteps;

  const DotArgs& a;
  uint8_t* ring;
  Decoder<FMT, E> decode;
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* offset;
  const uint8_t* x;
  uint64_t *full, *empty;
  int slot, phase;
  int row0, block_rows, x_bytes, matrix, x_row, m, warp_k, warp_r, lane, g, t, stage_bytes;
  int scale_offset[2];  // where the scales of this warp's columns are, and how they become floats
  uint32_t scale_select[2];
  float acc[T][NT][4];

  __device__ __forceinline__ void find_scales() {
    constexpr int kGroups = 64 / kGroup<FMT>;
#pragma unroll
    for (int u = 0; u < kGroups; ++u) {
      int place = (warp_k * kGroups + u) >> a.scale_share_log;
      scale_select[u] = 0x3210;
      if (a.scale_piece && a.scale_dtype == kBf16) {  // the high half of a float
        scale_select[u] = place & 1 ? 0x3244 : 0x1044;
        place >>= 1;
      }
      scale_offset[u] = place * (kShifted<FMT> ? 8 : 4);
    }
  }

  __device__ __forceinline__ bool has_tile(int i) const { return i * S::kTilesAcross + warp_r < a.tiles; }

  // The tile that is multiplied together with tile i: the next one, or the same again when i is the last.
  __device__ __forceinline__ int partner(int i) const { return has_tile(i + 1) ? i + 1 : i; }

  __device__ __forceinline__ bool whole(int stage) const {
    if (a.boxes) return true;  // zeros come in for what does not exist
    return a.codes_unit == 16 && a.x_unit == 16 && (stage + 1) * S::kSegment <= a.row_bytes && (stage + 1) * S::kCols <= a.cols;
  }

  __device__ __forceinline__ void issue_boxes(int stage, int slot) {
#if __CUDA_ARCH__ >= 900
    uint8_t* base = ring + slot * stage_bytes;
    uint8_t* xs = base + block_rows * S::kSegment;
    uint8_t* scales = xs + x_bytes;
    int bytes = block_rows * S::kSegment + a.x_rows * S::kXBytes;
    if (kInNibbles<FMT>) bytes += block_rows * a.scale_bytes;
    barrier_arrive_expecting(&full[slot], bytes);
#pragma unroll
    for (int i = 0; i < S::kBoxes; ++i) {
      copy_box(shared_address(base) + i * block_rows * 128, &a.codes_map, stage * S::kSegment + i * 128, row0, matrix,
               &full[slot]);
    }
    copy_box(shared_address(xs), &a.x_map, 0, x_row, stage * (S::kCols / S::kXBox), &full[slot]);
    if constexpr (kInNibbles<FMT>) {
      copy_box(shared_address(scales), &a.scale_map, stage * a.scale_bytes, row0, matrix, &full[slot]);
    }
#endif
  }

  // Starts the copies of one stage and the arrival at its barrier; or makes them (at edges and for odd alignments) and
  // returns false.
  __device__ __forceinline__ bool issue(int stage, int slot) {
    uint8_t* base = ring + slot * stage_bytes;
    uint8_t* xs = base + block_rows * S::kSegment;
    uint8_t* scales = xs + x_bytes;
    if (!whole(stage)) {
      issue_any<FMT, S>(a, base, codes, x, row0, m, stage);
      if constexpr (kInNibbles<FMT>) issue_scales_any<FMT, S>(a, scales, scale, offset, row0, stage);
      return false;
    }
    const int loader = threadIdx.x - kWorkers, last_row = a.rows - 1;
    if (a.boxes) {
      if (loader == 0) {
        issue_boxes(stage, slot);
      } else {
        barrier_arrive(&full[slot]);
      }
      return true;
    }
    {
      constexpr int kStep = S::kLoaders / S::kChunks;
      const int c = loader % S::kChunks, row = loader / S::kChunks;
      const uint8_t* src = codes + stage * S::kSegment + c * 16;
#pragma unroll 4
      for (int r = row; r < block_rows; r += kStep) {
        copy_async16(shared_address(base) + S::place(block_rows, r, c),
                     src + static_cast<int64_t>(min(row0 + r, last_row)) * a.row_bytes);
      }
    }
    {
      constexpr int kPieces = S::kXBytes / 16;
      const uint8_t* src = x + static_cast<int64_t>(stage) * S::kXBytes;
#pragma unroll 2
      for (int i = loader; i < m * kPieces; i += S::kLoaders) {
        int r = i / kPieces, piece = i % kPieces;
        copy_async16(shared_address(xs) + S::x_place(a.x_rows, r, piece),
                     src + static_cast<int64_t>(r) * a.cols * 2 + piece * 16);
      }
    }
    if constexpr (kInNibbles<FMT>) {
      if (!a.scale_piece) {
        issue_scales_any<FMT, S>(a, scales, scale, offset, row0, stage);
        return false;
      }
      const uint32_t dst = shared_address(scales), scale_pitch = a.scale_bytes;
      const int64_t pitch = static_cast<int64_t>(a.scale_cols) * item_size(a.scale_dtype);
#pragma unroll 1
      for (int i = loader; i < block_rows << a.scale_copies_log; i += S::kLoaders) {
        int row = i >> a.scale_copies_log, at = (i & ((1 << a.scale_copies_log) - 1)) * a.scale_piece;
        const uint8_t* src = scale + min(row0 + row, last_row) * pitch + stage * a.scale_bytes + at;
        copy_async(dst + row * scale_pitch + at, src, a.scale_piece);
      }
    }
    barrier_arrive_after_copies(&full[slot]);
    return true;
  }

  __device__ __forceinline__ void load_b(uint32_t (&b)[kB], const uint8_t* xs, int nt, int q) const {
    const int row = nt * 8 + g;
#pragma unroll
    for (int i = 0; i < kB; ++i) b[i] = 0;
    if (row >= m) return;
    if constexpr (kInNibbles<FMT>) {
#pragma unroll
      for (int c = 0; c < kB / 4; ++c) {
        int chunk = 2 * warp_k + (P::kFine ? q : c);
        uint4 v = *reinterpret_cast<const uint4*>(xs + S::x_place(a.x_rows, row, chunk * 4 + t));
        b[4 * c] = v.x, b[4 * c + 1] = v.y, b[4 * c + 2] = v.z, b[4 * c + 3] = v.w;
      }
    } else if constexpr (kInBytes<FMT>) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int piece = (2 * warp_k + c) * 2 + (t >> 1);
        uint2 v = *reinterpret_cast<const uint2*>(xs + S::x_place(a.x_rows, row, piece) + (t & 1) * 8);
        b[2 * c] = v.x, b[2 * c + 1] = v.y;
      }
    } else {
      constexpr int kPieces = FMT == kTernary ? 2 : 4;  // of 16 bytes, per lane and chunk
      const int chunk = 2 * warp_k + q / (kPieces / 2);
      const int first = (chunk * 4 + t) * kPieces + q % (kPieces / 2);
      uint4 lo = *reinterpret_cast<const uint4*>(xs + S::x_place(a.x_rows, row, first));
      uint4 hi = *reinterpret_cast<const uint4*>(xs + S::x_place(a.x_rows, row, first + kPieces / 2));
      const uint32_t l[4] = {lo.x, lo.y, lo.z, lo.w}, h[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[2 * i] = __byte_perm(l[i], h[i], 0x5410);
        b[2 * i + 1] = __byte_perm(l[i], h[i], 0x7632);
      }
    }
  }

  // Fragments of part q of one tile of 16 rows. w[0], w[1] are words of rows g and g + 8 from the first chunk of the
  // warp, w[2], w[3] from the second.
  __device__ __forceinline__ void load_a(uint32_t (&frag)[P::kSteps][4], const uint32_t (&w)[4], int q, int term) const {
#pragma unroll
    for (int s = 0; s < P::kSteps; ++s) {
      constexpr int kPerChunkSteps = kPerChunk<FMT> / 16;
      const int step = q * P::kSteps + s, chunk = step / kPerChunkSteps, first = step % kPerChunkSteps * 2;
      frag[s][0] = pair(w[2 * chunk], first, term);
      frag[s][1] = pair(w[2 * chunk + 1], first, term);
      frag[s][2] = pair(w[2 * chunk], first + 1, term);
      frag[s][3] = pair(w[2 * chunk + 1], first + 1, term);
    }
  }
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i, int term) const {
    if constexpr (P::kTerms == 2) return decode.pair(word, i, term);
    return decode.pair(word, i);
  }

  // What two tiles need for one part: two, so that matrix instructions do not wait for each other's sums.
  struct Operands {
    uint32_t frag[2][P::kSteps][4];
    float factor[2][2], more[2][2];
  };
  __device__ __forceinline__ void load_operands(Operands& o, const uint32_t (&w)[2][4], const uint8_t* scales,
                                                int scale_pitch, int tile, int q, int term) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_a(o.frag[h], w[h], q, term);
      load_scales(o.factor[h], o.more[h], scales, scale_pitch, h ? partner(tile) : tile, q);
    }
  }
  // `x_sums` of this lane's two columns over the part.
  __device__ __forceinline__ void multiply(float (&sum0)[4], float (&sum1)[4], const Operands& o,
                                           const uint32_t (&b)[kB], const float (&x_sums)[2]) const {
    if constexpr (kInNibbles<FMT>) {
      float c0[4] = {0.f, 0.f, 0.f, 0.f}, c1[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int s = 0; s < P::kSteps; ++s) {
        mma<E>(c0, o.frag[0][s], b[2 * s], b[2 * s + 1]);
        mma<E>(c1, o.frag[1][s], b[2 * s], b[2 * s + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum0[i] = fmaf(c0[i], o.factor[0][i >> 1], sum0[i]);
        sum1[i] = fmaf(c1[i], o.factor[1][i >> 1], sum1[i]);
        if constexpr (kShifted<FMT>) {
          sum0[i] = fmaf(x_sums[i & 1], o.more[0][i >> 1], sum0[i]);
          sum1[i] = fmaf(x_sums[i & 1], o.more[1][i >> 1], sum1[i]);
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < P::kSteps; ++s) {
        mma<E>(sum0, o.frag[0][s], b[2 * s], b[2 * s + 1]);
        mma<E>(sum1, o.frag[1][s], b[2 * s], b[2 * s + 1]);
      }
    }
  }

  // Scales of rows g and g + 8 of a tile for part q.
  __device__ __forceinline__ void load_scales(float (&f)[2], float (&more)[2], const uint8_t* scales, int scale_pitch, int tile,
                                              int q) const {
    if constexpr (kInNibbles<FMT>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* row = scales + (tile * S::kTilesAcross * 16 + h * 8) * scale_pitch;
        uint32_t bits = *reinterpret_cast<const uint32_t*>(row + scale_offset[q]);
        f[h] = __uint_as_float(__byte_perm(bits, 0, scale_select[q]));
        if constexpr (kShifted<FMT>) more[h] = *reinterpret_cast<const float*>(row + scale_offset[q] + 4);
      }
    }
  }

  __device__ __forceinline__ void compute(int slot) {
    const uint8_t* base = ring + slot * stage_bytes;
    const uint8_t* xs = base + block_rows * S::kSegment;
    const int scale_pitch = a.scale_piece ? a.scale_bytes : S::kScalePitch;
    const uint8_t* scales = xs + x_bytes + (warp_r * 16 + g) * scale_pitch;
    const int tile_row = (lane & 7) + ((lane >> 3) & 1) * 8;
    const uint32_t tiles = shared_address(base) + S::place(block_rows, warp_r * 16 + tile_row, 2 * warp_k + (lane >> 4));
    // x stays in registers for all tiles where they suffice; otherwise every pair of tiles reads it again.
    constexpr bool kKeepX = NT <= 4;
    static_assert(kKeepX || !kShifted<FMT>, "sums of x are made where x stays");
    uint32_t b[kKeepX ? NT : 1][kKeepX ? P::kCount : 1][kB];
    if constexpr (kKeepX) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int q = 0; q < P::kCount; ++q) load_b(b[n][q], xs, n, q);
    }
    float x_sums[kShifted<FMT> ? NT : 1][kShifted<FMT> ? P::kCount : 1][2];
    if constexpr (kShifted<FMT>) {
      constexpr uint32_t kOnes = Pair<E>::kOne * 0x00010001u;
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int q = 0; q < P::kCount; ++q) {
          float sum[4] = {};
#pragma unroll
          for (int s = 0; s < P::kSteps; ++s) mma<E>(sum, ones, b[n][q][2 * s], b[n][q][2 * s + 1]);
          x_sums[n][q][0] = sum[0], x_sums[n][q][1] = sum[1];
        }
    }
    static_assert(T % 2 == 0, "tiles are multiplied in pairs");
    constexpr int kStep = S::kTilesAcross * 16 * 128;
    if (!has_tile(0)) return;
    uint32_t w[2][2][4];
    load_matrices(w[0][0], tiles), load_matrices(w[0][1], tiles + partner(0) * kStep);
#pragma unroll
    for (int i = 0; i < T; i += 2) {
      if (!has_tile(i)) break;
      const int here = i / 2 % 2, there = 1 - here;
      if (i + 2 < T && has_tile(i + 2)) {
        load_matrices(w[there][0], tiles + (i + 2) * kStep);
        load_matrices(w[there][1], tiles + partner(i + 2) * kStep);
      }
#pragma unroll
      for (int q = 0; q < P::kCount; ++q) {
#pragma unroll 1
        for (int term = 0; term < P::kTerms; ++term) {  // not both at once: registers
          Operands o;
          load_operands(o, w[here], scales, scale_pitch, i, q, term);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            if constexpr (kKeepX) {
              multiply(acc[i][n], acc[i + 1][n], o, b[n][q], x_sums[kShifted<FMT> ? n : 0][kShifted<FMT> ? q : 0]);
            } else {
              load_b(b[0][0], xs, n, q);
              multiply(acc[i][n], acc[i + 1][n], o, b[0][0], x_sums[0][0]);
            }
          }
        }
      }
    }
  }

  // The stages [first, last), by the loading warps ...
  __device__ __forceinline__ void load(int first, int last) {
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      barrier_wait(&empty[slot], phase ^ 1);
      if (!issue(stage, slot)) {
        wait_for_copies();
        __threadfence_block();
        barrier_arrive(&full[slot]);
      }
      next_slot();
    }
  }

  // ... and by the others.
  __device__ __forceinline__ void work(int first, int last) {
#pragma unroll
    for (int i = 0; i < T; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][n][e] = 0.f;
    if constexpr (S::kSelfLoading) {
      if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES - 1 && first + s < last; ++s) {
          int ahead = (slot + s) % STAGES;
          barrier_wait(&empty[ahead], slot + s < STAGES ? phase ^ 1 : phase);
          issue_boxes(first + s, ahead);
        }
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      if constexpr (S::kSelfLoading) {
        if (threadIdx.x == 0 && stage + STAGES - 1 < last) {  // into the slot of the stage before this one
          int ahead = slot == 0 ? STAGES - 1 : slot - 1;
          barrier_wait(&empty[ahead], slot == 0 ? phase ^ 1 : phase);
          issue_boxes(stage + STAGES - 1, ahead);
        }
        __syncwarp();
      }
      barrier_wait(&full[slot], phase);
      compute(slot);
      __syncwarp();
      barrier_arrive(&empty[slot]);  // every lane: it has read for itself
      next_slot();
    }
  }

  __device__ __forceinline__ void next_slot() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }

  // Leaves in shared memory what this warp has summed up ...
  __device__ __forceinline__ void put_sums() {
    const int pitch = S::sum_pitch(a.tiles);
    float* sums = reinterpret_cast<float*>(ring) + warp_k * (m * pitch);
#pragma unroll
    for (int i = 0; i < T; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int row = (i * S::kTilesAcross + warp_r) * 16 + g + (e >> 1) * 8, column = n * 8 + 2 * t + (e & 1);
          if (column < m && row < block_rows) sums[column * pitch + row] = acc[i][n][e];
        }
  }
  // ... adds up what the warps along the columns have, and hands every element of y to `store(column, row, value)`.
  template <class Store>
  __device__ __forceinline__ void take_sums(Store store) {
    const int pitch = S::sum_pitch(a.tiles);
    const float* all = reinterpret_cast<const float*>(ring);
    const int quads = a.tiles * 4;
    for (int i = threadIdx.x; i < m * quads; i += S::kThreads) {
      const int column = i / quads, row = i % quads * 4;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WK; ++w) {
        float4 part = *reinterpret_cast<const float4*>(all + (w * m + column) * pitch + row);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      constexpr float kFactor = P::kTerms == 2 ? 1.f / kCodebookFactor<E> : 1.f;
      const float values[4] = {total.x * kFactor, total.y * kFactor, total.z * kFactor, total.w * kFactor};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row0 + row + e < a.rows) store(column, row0 + row + e, values[e]);
      }
    }
  }
};

__device__ __forceinline__ float row_factor(const DotArgs& a, const void* scale, int row) {
  return a.row_scale == 0 ? 1.f : load_float(scale, a.row_scale == 1 ? row : 0, a.scale_dtype);
}

// Rows of x that belong to matrix `index` of a ragged product: [begin, begin + count).
static __device__ __noinline__ int2 ragged_range(const int32_t* groups, int group_count, int m, int index) {
  __shared__ int sums[32];
  int mine = 0;
  for (int i = threadIdx.x; i < index; i += blockDim.x) mine += groups[i];
  for (int d = 16; d; d >>= 1) mine += __shfl_xor_sync(~0u, mine, d);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  int begin = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) begin += sums[w];
  begin = clamp_to(begin, m);
  int count = index < group_count ? clamp_to(groups[index], m - begin) : m - begin;
  return make_int2(begin, begin + count);
}

template <int FMT, class E, int NT, int T, int WK, int STAGES>
__global__ void __launch_bounds__(DotShape<FMT, NT, T, WK, STAGES>::kThreads, 1)
    dot_kernel(const __grid_constant__ DotArgs a) {
  using S = DotShape<FMT, NT, T, WK, STAGES>;
  using P = Parts<FMT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  // The shuffle tells the compiler that a warp never splits, so that it can use its scalar registers.
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), batch = blockIdx.z;
  const bool loads = warp >= kWarps;
  if (threadIdx.x < STAGES) {
    barrier_init(&full[threadIdx.x], S::kSelfLoading ? 1 : S::kLoaders);
    barrier_init(&empty[threadIdx.x], kWorkers);
  }
  let_next_kernel_start();
  __syncthreads();
  int row_block = blockIdx.x, begin = 0, end = a.m;
  int64_t x_offset = 0, y_offset = 0;
  if (a.groups) {
    int2 range = ragged_range(a.groups, a.group_count, a.m, batch);
    begin = range.x, end = range.y;
  } else {
    if (a.m_chunks > 1) {
      row_block = blockIdx.x / a.m_chunks;
      begin = blockIdx.x % a.m_chunks * 8 * NT, end = min(a.m, begin + 8 * NT);
    }
    x_offset = batch * a.x_batch, y_offset = batch * a.y_batch;
  }
  const bool nothing = a.groups && batch == a.group_count;  // rows of x no matrix wants
  if (begin >= end) return;
  DotBlock<FMT, E, NT, T, WK, STAGES> block{a, shared + S::kTable, {shared, static_cast<uint32_t>(lane * 4)}};
  block.full = full, block.empty = empty, block.slot = 0, block.phase = 0;
  block.matrix = nothing ? 0 : first_matrix(a.stack) + batch;
  block.codes = a.codes + block.matrix * a.codes_batch;
  block.scale = a.scale + block.matrix * a.scale_batch;
  block.offset = a.offset + block.matrix * a.offset_batch;
  block.block_rows = a.tiles * 16;
  block.x_bytes = S::x_bytes(a.x_rows);
  block.row0 = row_block * block.block_rows;
  block.warp_k = warp % WK, block.warp_r = warp / WK;
  block.lane = lane, block.g = lane / 4, block.t = lane % 4;
  block.stage_bytes = S::stage_bytes(a.tiles, a.x_rows);
  const int first = blockIdx.y * a.stages_per_split, last = min(a.stages, first + a.stages_per_split);
  for (int m0 = begin; m0 < end; m0 += 8 * NT) {
    block.m = min(8 * NT, end - m0);
    block.x_row = static_cast<int>(a.groups ? m0 : batch * a.m + m0);
    block.x = a.x + (x_offset + static_cast<int64_t>(m0) * a.cols) * 2;
    if (loads) {  // never where threads are all workers
      if constexpr (!S::kSelfLoading) block.load(first, nothing ? first : last);
    } else {
      if constexpr (kInNibbles<FMT>) {
        if (m0 == begin) {
          block.find_scales();
          fill_table<E, kWorkers, P::kTerms>(shared, threadIdx.x, a.book.v[threadIdx.x & 15]);
          workers_sync();
        }
      }
      block.work(first, nothing ? first : last);
      workers_sync();  // nobody reads the stages any more
      block.put_sums();
    }
    __syncthreads();
    block.take_sums([&](int column, int row, float value) {
      int64_t at = y_offset + static_cast<int64_t>(m0 + column) * a.rows + row;
      if (a.partial) {
        a.partial[blockIdx.y * (a.y_batch * (a.groups ? 1 : gridDim.z)) + at] = value;
      } else {
        store_float(a.y, at, a.y_dtype, value * row_factor(a, block.scale, row));
      }
    });
    order_before_bulk_copies();
    __syncthreads();
  }
}

}  // namespace eformer

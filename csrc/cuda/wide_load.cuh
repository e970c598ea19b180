// The loading half of the kernel in wide.cuh: what is where in shared memory, and the warps that fill it.
#pragma once

#include "books.h"
#include "wide_decode.cuh"

namespace eformer {

struct WideArgs {
  CUtensorMap codes_map, x_map, scale_map, offset_map;
  const uint8_t* scale;
  const uint8_t* offset;
  void* y;
  int32_t m, outs;
  int32_t scale_rows, scale_cols, block;   // of formats in blocks
  int32_t scale_dtype, out_scale, y_dtype;  // out_scale: 0 none, 1 one per out, 2 one for all
  int32_t boxed, share_log;                // the copy engine fetches scales; groups of values per block (logarithm)
  int32_t m_chunks, stages, stages_per_split;
  int32_t first_tile;                      // of this launch
  int32_t offset_dtype;
  float centre;
  int64_t scale_batch, offset_batch, y_batch;
  Stack stack;
  Book book;
  RoughBook rough_book;
};

// TILES of 64 outs per warpgroup: one in the dot form.
template <int FMT, class E, int FORM, int N, int G, int D, int TILES, int TERMS>
struct WideShape {
  static constexpr int kSides = G / D;
  using S = WideStage<FMT, FORM, kSides, D, TILES>;
  static constexpr int kThreads = (G + 1) * 128;
  static constexpr int kOuts = S::kAllOuts;
  static constexpr int kTable = kNarrow<FMT, E, TERMS> ? kNarrowTableBytes : kInNibbles<FMT> ? kTableBytes : 0;
  static constexpr int kX = N * 128;
  static constexpr int kCodes = S::kBytes;
  static constexpr int kScales = S::kScaleBytes + S::kShiftBytes, kRaw = S::kRawBytes + S::kRawShiftBytes;
  static constexpr int kStage = kCodes + kScales + kRaw;
  static constexpr int kRing = 222 * 1024 - kTable;
  static constexpr int kCodeStages = kRing >= 4 * kStage + (kShifted<FMT> ? 6 : 4) * kX ? 4 : kRing >= 3 * kStage + 3 * kX ? 3 : 2;
  static constexpr int kXMost = 8;
  static constexpr int kXLeft = (kRing - kCodeStages * kStage) / kX;
  static constexpr int kXStages = kXLeft > kXMost ? kXMost : kXLeft;
  static constexpr int kPitch = kOuts + 4;  // of the sums of one row of x: lanes do not meet in a bank
  static constexpr int kLoad = kXStages * kX + kCodeStages * kStage, kSums = D * N * kPitch * 4;
  static constexpr int kBarriers = kTable + (kLoad > kSums ? kLoad : kSums);
  static constexpr int kConstants = kBarriers + (2 * kXStages + 3 * kCodeStages) * 8;
  static constexpr int kShared = kConstants + 16;
  static_assert(kXStages >= 3 && kShared <= 227 * 1024, "does not fit");
  // What the loading warpgroup can do without goes to the others; a block has no more than it was started with.
  static constexpr int kStart = 65536 / kThreads / 8 * 8, kSpare = 56;
  static constexpr int kMost = (kStart * (G + 1) - kSpare) / G / 8 * 8;
  static constexpr int kRegisters = kMost > 240 ? 240 : kMost;
};

#if EFORMER_HAS_WGMMA

// A place in a ring, and how often it has been passed.
template <int COUNT>
struct Ring {
  int slot = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == COUNT) slot = 0, phase ^= 1;
  }
};

template <int FMT, class E, int FORM, int N, int G, int D, int TILES, int TERMS>
struct WideLoader {
  using W = WideShape<FMT, E, FORM, N, G, D, TILES, TERMS>;
  using S = typename W::S;
  const WideArgs& a;
  uint8_t* shared;
  uint64_t *full_x, *empty_x, *full_c, *empty_c, *full_r;  // full_r: scales as they are stored
  int out0, m0, matrix, stored, first, last;  // matrix of the product, and its number among those that are stored

  __device__ __forceinline__ uint32_t x_at(int slot) const { return shared_address(shared) + W::kTable + slot * W::kX; }
  __device__ __forceinline__ uint32_t codes_at(int slot) const { return x_at(W::kXStages) + slot * W::kCodes; }
  __device__ __forceinline__ uint32_t scales_at(int slot) const { return codes_at(W::kCodeStages) + slot * W::kScales; }
  __device__ __forceinline__ uint32_t raw_at(int slot) const { return scales_at(W::kCodeStages) + slot * W::kRaw; }

  __device__ __forceinline__ void init() {
    full_x = reinterpret_cast<uint64_t*>(shared + W::kBarriers), empty_x = full_x + W::kXStages;
    full_c = empty_x + W::kXStages, empty_c = full_c + W::kCodeStages, full_r = empty_c + W::kCodeStages;
    if (threadIdx.x == 0) {
      for (int i = 0; i < W::kXStages; ++i) barrier_init(&full_x[i], 1), barrier_init(&empty_x[i], W::kSides * 4);
      constexpr int kSources = kInBlocks<FMT> ? 65 : 1;  // the copy engine, and two warps with scales
      for (int i = 0; i < W::kCodeStages; ++i) {
        barrier_init(&full_c[i], kSources), barrier_init(&empty_c[i], G * 128), barrier_init(&full_r[i], 1);
      }
      WideDecoder<FMT, E, FORM, S, TERMS>::put_constants(reinterpret_cast<uint32_t*>(shared + W::kConstants));
      barriers_visible_to_cluster();
    }
  }

  __device__ __forceinline__ int offset_size() const { return item_size(a.offset_dtype); }
  // In a row of scales, of a stage.
  __device__ __forceinline__ int first_scale(int stage) const {
    return (FORM == kDot ? stage * S::kDeep : out0) / kGroup<FMT> >> a.share_log;
  }

  __device__ __forceinline__ void load_codes() {
    Ring<W::kCodeStages> ring;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, ring.next()) {
      barrier_wait(&empty_c[ring.slot], ring.phase ^ 1);
      if constexpr (kInBlocks<FMT>) {
        if (a.boxed) {
          const int at = first_scale(stage) & -(16 / item_size(a.scale_dtype));  // boxes begin at whole 16 bytes
          barrier_arrive_expecting(&full_r[ring.slot], W::kRaw);
          copy_box(raw_at(ring.slot), &a.scale_map, at, FORM == kDot ? out0 : stage * S::kDeep, stored, &full_r[ring.slot]);
          if constexpr (kShifted<FMT>) {
            const int from = first_scale(stage) & -(16 / offset_size());
            copy_box(raw_at(ring.slot) + S::kRawBytes, &a.offset_map, from, FORM == kDot ? out0 : stage * S::kDeep, stored,
                     &full_r[ring.slot]);
          }
        }
      }
      barrier_arrive_expecting(&full_c[ring.slot], W::kCodes);
      constexpr int kBox = W::kCodes / S::kBoxes;
#pragma unroll
      for (int i = 0; i < S::kBoxes; ++i) {
        const int byte = (FORM == kDot ? stage * S::kRowBytes : out0 / S::kPerByte) + i * S::kBoxBytes;
        const int row = FORM == kDot ? out0 : stage * S::kDeep;
        copy_box(codes_at(ring.slot) + i * kBox, &a.codes_map, byte, row, stored, &full_c[ring.slot]);
      }
    }
  }

  __device__ __forceinline__ void load_x() {
    Ring<W::kXStages> ring;
#pragma unroll 1
    for (int stage = first * S::kXStages; stage < last * S::kXStages; ++stage, ring.next()) {
      barrier_wait(&empty_x[ring.slot], ring.phase ^ 1);
      barrier_arrive_expecting(&full_x[ring.slot], W::kX);
      copy_box(x_at(ring.slot), &a.x_map, stage * 64, m0, matrix, &full_x[ring.slot]);
    }
  }

  // Some scales in a row of the stored matrix, one for every group of values. With them, `shift`: zero points in bytes, or
  // float32 that are added behind the multiplication.
  static constexpr int kShiftWords = !kShifted<FMT> ? 1 : kInFloat32<FMT> ? S::kScales : S::kScales / 4;
  struct Scales {
    float v[S::kScales];
    uint32_t shift[kShiftWords];
  };
  __device__ __forceinline__ uint32_t shift_of(uint32_t zero, float scale) const {
    return __float_as_uint((a.centre - static_cast<float>(zero)) * scale);
  }
  __device__ __forceinline__ uint32_t shift_of(float bias, float scale) const { return __float_as_uint(fmaf(a.centre, scale, bias)); }
  // As unpacked().
  template <int LOG>
  __device__ __forceinline__ void unpack_shifts(Scales& s, const uint32_t (&raw)[4]) const {
    if constexpr (kInFloat32<FMT>) {
      static_assert(S::kScales <= 4, "16 bytes");
#pragma unroll
      for (int j = 0; j < S::kScales; ++j) {
        const int at = j >> LOG;
        const uint32_t half = raw[at / 2] >> (at % 2 * 16) & 0xFFFF;
        s.shift[j] = shift_of(raw[0] >> (at * 8) & 0xFF, s.v[j]);
        if (a.offset_dtype == kF32) s.shift[j] = shift_of(__uint_as_float(raw[at]), s.v[j]);
        if (a.offset_dtype == kBf16) s.shift[j] = shift_of(__uint_as_float(half << 16), s.v[j]);
        if (a.offset_dtype == kF16) s.shift[j] = shift_of(__half2float(__ushort_as_half(static_cast<unsigned short>(half))), s.v[j]);
      }
    } else {
      constexpr uint32_t kSelect[4][2] = {{0x3210, 0x7654}, {0x1100, 0x3322}, {0x0000, 0x1111}, {0x0000, 0x0000}};
#pragma unroll
      for (int i = 0; i < kShiftWords; ++i) s.shift[i] = __byte_perm(raw[0], raw[1], kSelect[LOG][i]);
    }
  }
  // `row` is 16 bytes that the copy engine has brought, of which `skipped` belong to other columns.
  __device__ __forceinline__ void raw_shifts(Scales& s, uint32_t row, int skipped) const {
    uint32_t raw[4];
    load_words(raw, row);
    if (skipped & 8) raw[0] = raw[2], raw[1] = raw[3];
    if (skipped & 4) raw[0] = raw[1];
    if (skipped & 2) raw[0] >>= 16;
    if (skipped & 1) raw[0] >>= 8;
    if (a.share_log == 0) return unpack_shifts<0>(s, raw);
    if (a.share_log == 1) return unpack_shifts<1>(s, raw);
    return a.share_log == 2 ? unpack_shifts<2>(s, raw) : unpack_shifts<3>(s, raw);
  }
  // Out of a row that the copy engine has brought; 2^LOG groups share a scale.
  template <int LOG>
  static __device__ __forceinline__ Scales unpacked(const uint32_t (&raw)[S::kRawRow / 4], int dtype) {
    Scales found;
#pragma unroll
    for (int j = 0; j < S::kScales; ++j) {
      const uint32_t two = raw[(j >> LOG) / 2], half = (j >> LOG) % 2 ? two >> 16 : two & 0xFFFF;
      found.v[j] = __uint_as_float(raw[j >> LOG]);
      if (dtype == kBf16) found.v[j] = __uint_as_float(half << 16);
      if (dtype == kF16) found.v[j] = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
    return found;
  }
  // `skipped` bytes of the first 16 belong to other columns; then all that is wanted is behind them.
  __device__ __forceinline__ Scales raw_scales(uint32_t row, int skipped) const {
    uint32_t raw[S::kRawRow / 4];
#pragma unroll
    for (int i = 0; i < S::kRawRow / 16; ++i) load_words(raw + 4 * i, row + 16 * i);
    if (skipped & 8) raw[0] = raw[2], raw[1] = raw[3];
    if (skipped & 4) raw[0] = raw[1];
    if (skipped & 2) raw[0] >>= 16;
    if (a.share_log == 0) return unpacked<0>(raw, a.scale_dtype);
    if (a.share_log == 1) return unpacked<1>(raw, a.scale_dtype);
    return a.share_log == 2 ? unpacked<2>(raw, a.scale_dtype) : unpacked<3>(raw, a.scale_dtype);
  }
  __device__ __forceinline__ Scales scales_of(const uint8_t* scale, int row, int column0) const {
    Scales found{};
    if (row >= a.scale_rows) return found;
    const int64_t at = static_cast<int64_t>(row) * a.scale_cols;
    int column = column0 / a.block, passed = column0 - column * a.block;
#pragma unroll
    for (int j = 0; j < S::kScales; ++j) {
      if (column < a.scale_cols) found.v[j] = load_float(scale, at + column, a.scale_dtype);
      if constexpr (kShifted<FMT>) {
        const uint8_t* offset = a.offset + stored * a.offset_batch;
        if (column >= a.scale_cols) {
        } else if constexpr (!kInFloat32<FMT>) {
          found.shift[j / 4] |= static_cast<uint32_t>(offset[at + column]) << (j % 4 * 8);
        } else {
          found.shift[j] = __float_as_uint(offset_of(offset, at + column, a.offset_dtype, a.centre, found.v[j]));
        }
      }
      passed += kGroup<FMT>;
      if (passed >= a.block) passed = 0, ++column;
    }
    return found;
  }
  // What one thread makes of a stage: dot, the scales of some outs; axpy, of some pairs of neighbours along the depth.
  static constexpr int kPieces = FORM == kDot ? W::kOuts / 64 : S::kDeep / 128, kRows = FORM == kDot ? 1 : 2;
  __device__ __forceinline__ void fetch_scales(Scales (&v)[kPieces * kRows], const uint8_t* scale, int stage, int thread) const {
#pragma unroll
    for (int i = 0; i < kPieces * kRows; ++i) {
      const int piece = thread + 64 * (i / kRows);
      v[i] = FORM == kDot ? scales_of(scale, out0 + piece, stage * S::kDeep)
                          : scales_of(scale, stage * S::kDeep + 2 * piece + i % kRows, out0);
    }
  }
  // The sum of two bf16 that a scale is; the second is zero where the first is infinite.
  static __device__ __forceinline__ float rest_of(float scale) {
    return isfinite(scale) ? scale - Pair<__nv_bfloat16>::cut(scale) : 0.f;
  }
  static __device__ __forceinline__ uint32_t word_of(float scale) {
    if constexpr (kInFloat32<FMT>) {
      return __float_as_uint(kRough<FMT, E, TERMS> ? scale * (1.f / kRoughFactor) : scale);
    } else {
      return Pair<__nv_bfloat16>::pack(Pair<__nv_bfloat16>::cut(scale), rest_of(scale));
    }
  }
  static __device__ __forceinline__ uint2 pair_of(float a, float b) {
    if constexpr (kInFloat32<FMT>) return make_uint2(word_of(a), word_of(b));
    return make_uint2(__byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632),
                      Pair<__nv_bfloat16>::pack(rest_of(a), rest_of(b)));
  }
  static __device__ __forceinline__ void put_four(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
  // Of piece i of a thread: one row of scales, or two neighbours.
  __device__ __forceinline__ void put_piece(int slot, int thread, int i, const Scales& a, const Scales& b) const {
    const uint32_t to = scales_at(slot) + (thread + 64 * i) * (S::kScales * 4 * kRows);
#pragma unroll
    for (int j = 0; j < S::kScales; j += 4 / kRows) {
      if constexpr (FORM == kDot) {
        put_four(to + j * 4, word_of(a.v[j]), word_of(a.v[j + 1]), word_of(a.v[j + 2]), word_of(a.v[j + 3]));
      } else {
        const uint2 first = pair_of(a.v[j], b.v[j]);
        if constexpr (S::kScales == 1) {
          asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(first.x), "r"(first.y) : "memory");
        } else {
          const uint2 second = pair_of(a.v[j + 1], b.v[j + 1]);
          put_four(to + j * 8, first.x, first.y, second.x, second.y);
        }
      }
    }
    if constexpr (kShifted<FMT>) put_shifts(scales_at(slot) + S::kScaleBytes, thread + 64 * i, a.shift, b.shift);
  }
  // What is added to values, the centre minus the zero point. A byte is the last bits of 2^23.
  __device__ __forceinline__ float before(const uint32_t (&zeros)[kShiftWords], int j) const {
    return 8388608.f + a.centre - __uint_as_float(__byte_perm(zeros[j / 4], 0x4B000000u, 0x7440 + j % 4));
  }
  // Floats; or in bf16: dot, those of a row, axpy, pairs of neighbours.
  __device__ __forceinline__ void put_shifts(uint32_t to, int piece, const uint32_t (&one)[kShiftWords],
                                             const uint32_t (&two)[kShiftWords]) const {
    constexpr int kWords = kInFloat32<FMT> ? S::kScales * kRows : S::kScales * kRows / 2;
#pragma unroll
    for (int j = 0; j < kWords; j += 4) {
      uint32_t w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = j + e;
        if constexpr (kInFloat32<FMT>) {
          w[e] = kRows == 1 ? one[n] : n % 2 ? two[n / 2] : one[n / 2];
        } else {
          w[e] = kRows == 1 ? Pair<__nv_bfloat16>::pack(before(one, 2 * n), before(one, 2 * n + 1))
                            : Pair<__nv_bfloat16>::pack(before(one, n), before(two, n));
        }
      }
      put_four(to + (piece * kWords + j) * 4, w[0], w[1], w[2], w[3]);
    }
  }
  // By two warps. Where the copy engine does not bring the scales, they ask for those of a stage before they wait for room
  // for those of the stage before.
  __device__ __forceinline__ void load_scales(int thread) {
    Ring<W::kCodeStages> ring;
    if (a.boxed) {
#pragma unroll 1
      for (int stage = first; stage < last; ++stage, ring.next()) {
        const int skipped = first_scale(stage) * item_size(a.scale_dtype) & 15;
        barrier_wait(&full_r[ring.slot], ring.phase);  // there is room, too: its codes have been asked for
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const uint32_t row = raw_at(ring.slot) + (thread + 64 * i) * kRows * S::kRawRow;
          Scales one = raw_scales(row, skipped), two = kRows == 1 ? one : raw_scales(row + S::kRawRow, skipped);
          if constexpr (kShifted<FMT>) {
            const uint32_t there = raw_at(ring.slot) + S::kRawBytes + (thread + 64 * i) * kRows * 16;
            const int others = first_scale(stage) * offset_size() & 15;
            raw_shifts(one, there, others);
            if constexpr (kRows == 1) {
              two = one;
            } else {
              raw_shifts(two, there + 16, others);
            }
          }
          put_piece(ring.slot, thread, i, one, two);
        }
        barrier_arrive(&full_c[ring.slot]);
      }
      return;
    }
    const uint8_t* scale = a.scale + stored * a.scale_batch;
    Scales now[kPieces * kRows], next[kPieces * kRows];
    fetch_scales(next, scale, first, thread);
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, ring.next()) {
#pragma unroll
      for (int i = 0; i < kPieces * kRows; ++i) now[i] = next[i];
      if (stage + 1 < last) fetch_scales(next, scale, stage + 1, thread);
      barrier_wait(&empty_c[ring.slot], ring.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) put_piece(ring.slot, thread, i, now[kRows * i], now[kRows * i + kRows - 1]);
      barrier_arrive(&full_c[ring.slot]);
    }
  }
};
#endif

}  // namespace eformer

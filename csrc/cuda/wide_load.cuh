// The loading half of the kernel in wide.cuh: what is where in shared memory, and the warps that fill it.
#pragma once

#include "wide_decode.cuh"

namespace eformer {

struct WideArgs {
  CUtensorMap codes_map, x_map;
  const uint8_t* scale;
  void* y;
  int32_t m, outs;
  int32_t scale_rows, scale_cols, block;   // of nf4
  int32_t scale_dtype, out_scale, y_dtype;  // out_scale: 0 none, 1 one per out, 2 one for all
  int32_t scales_in_fours;                 // aligned float32, one per 64 values
  int32_t m_chunks, stages, stages_per_split;
  int64_t scale_batch, y_batch;
};

template <int FMT, int FORM, int N, int G, int D>
struct WideShape {
  static constexpr int kSides = G / D;
  using S = WideStage<FMT, FORM, kSides, D>;
  static constexpr int kThreads = (G + 1) * 128;
  static constexpr int kOuts = S::kAllOuts;
  static constexpr int kTable = FMT == kNf4 ? kTableBytes : 0;
  static constexpr int kX = N * 128;
  static constexpr int kCodes = S::kBytes;
  static constexpr int kScales = S::kScaleBytes;
  static constexpr int kRing = 222 * 1024 - kTable;
  static constexpr int kCodeStages = kRing >= 4 * (kCodes + kScales) + 4 * kX ? 4 : 3;
  static constexpr int kXMost = 8;
  static constexpr int kXLeft = (kRing - kCodeStages * (kCodes + kScales)) / kX;
  static constexpr int kXStages = kXLeft > kXMost ? kXMost : kXLeft;
  static constexpr int kPitch = kOuts + 4;  // of the sums of one row of x: lanes do not meet in a bank
  static constexpr int kLoad = kXStages * kX + kCodeStages * (kCodes + kScales), kSums = D * N * kPitch * 4;
  static constexpr int kBarriers = kTable + (kLoad > kSums ? kLoad : kSums);
  static constexpr int kConstants = kBarriers + 2 * (kXStages + kCodeStages) * 8;
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

template <int FMT, class E, int FORM, int N, int G, int D, int TERMS>
struct WideLoader {
  using W = WideShape<FMT, FORM, N, G, D>;
  using S = typename W::S;
  const WideArgs& a;
  uint8_t* shared;
  uint64_t *full_x, *empty_x, *full_c, *empty_c;
  int out0, m0, matrix, first, last;

  __device__ __forceinline__ uint32_t x_at(int slot) const { return shared_address(shared) + W::kTable + slot * W::kX; }
  __device__ __forceinline__ uint32_t codes_at(int slot) const { return x_at(W::kXStages) + slot * W::kCodes; }
  __device__ __forceinline__ uint32_t scales_at(int slot) const { return codes_at(W::kCodeStages) + slot * W::kScales; }

  __device__ __forceinline__ void init() {
    full_x = reinterpret_cast<uint64_t*>(shared + W::kBarriers), empty_x = full_x + W::kXStages;
    full_c = empty_x + W::kXStages, empty_c = full_c + W::kCodeStages;
    if (threadIdx.x == 0) {
      for (int i = 0; i < W::kXStages; ++i) barrier_init(&full_x[i], 1), barrier_init(&empty_x[i], W::kSides * 4);
      constexpr int kSources = FMT == kNf4 ? 65 : 1;  // the copy engine, and two warps with scales
      for (int i = 0; i < W::kCodeStages; ++i) barrier_init(&full_c[i], kSources), barrier_init(&empty_c[i], G * 128);
      WideDecoder<FMT, E, FORM, S, TERMS>::put_constants(reinterpret_cast<uint32_t*>(shared + W::kConstants));
      barriers_visible_to_cluster();
    }
  }

  __device__ __forceinline__ void load_codes() {
    Ring<W::kCodeStages> ring;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, ring.next()) {
      barrier_wait(&empty_c[ring.slot], ring.phase ^ 1);
      barrier_arrive_expecting(&full_c[ring.slot], W::kCodes);
      constexpr int kBox = W::kCodes / S::kBoxes;
#pragma unroll
      for (int i = 0; i < S::kBoxes; ++i) {
        const int byte = (FORM == kDot ? stage * S::kRowBytes : out0 / S::kPerByte) + i * S::kBoxBytes;
        const int row = FORM == kDot ? out0 : stage * S::kDeep;
        copy_box(codes_at(ring.slot) + i * kBox, &a.codes_map, byte, row, matrix, &full_c[ring.slot]);
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

  // Some scales in a row of the stored matrix, one for every 64 values.
  struct Scales {
    float v[S::kScales];
  };
  __device__ __forceinline__ Scales scales_of(const uint8_t* scale, int row, int column0) const {
    Scales found{};
    if (row >= a.scale_rows) return found;
    const int64_t at = static_cast<int64_t>(row) * a.scale_cols;
    if (a.scales_in_fours) {
      const float* from = reinterpret_cast<const float*>(scale) + at + column0 / 64;
      if constexpr (S::kScales == 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from));
        found.v[0] = four.x, found.v[1] = four.y, found.v[2] = four.z, found.v[3] = four.w;
      } else {
        const float2 two = __ldg(reinterpret_cast<const float2*>(from));
        found.v[0] = two.x, found.v[1] = two.y;
      }
      return found;
    }
#pragma unroll
    for (int j = 0; j < S::kScales; ++j) {
      const int column = (column0 + j * 64) / a.block;
      if (column < a.scale_cols) found.v[j] = load_float(scale, at + column, a.scale_dtype);
    }
    return found;
  }
  // What one thread makes of a stage: dot, the scales of some outs; axpy, of two neighbours along the depth.
  static constexpr int kMine = FORM == kDot ? W::kOuts / 64 : 2;
  __device__ __forceinline__ void fetch_scales(Scales (&v)[kMine], const uint8_t* scale, int stage, int thread) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      v[i] = FORM == kDot ? scales_of(scale, out0 + thread + 64 * i, stage * S::kDeep)
                          : scales_of(scale, stage * S::kDeep + 2 * thread + i, out0);
    }
  }
  static __device__ __forceinline__ void put(uint32_t at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(a), "f"(b) : "memory");
  }
  // By two warps, which ask for the scales of a stage before they wait for room for those of the stage before.
  __device__ __forceinline__ void load_scales(int thread) {
    const uint8_t* scale = a.scale + matrix * a.scale_batch;
    Ring<W::kCodeStages> ring;
    Scales now[kMine], next[kMine];
    fetch_scales(next, scale, first, thread);
#pragma unroll 1
    for (int stage = first; stage < last; ++stage, ring.next()) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) now[i] = next[i];
      if (stage + 1 < last) fetch_scales(next, scale, stage + 1, thread);
      barrier_wait(&empty_c[ring.slot], ring.phase ^ 1);
#pragma unroll
      for (int i = 0; i < (FORM == kDot ? kMine : 1); ++i) {
        const uint32_t to = scales_at(ring.slot) + (thread + 64 * i) * (S::kScales * (FORM == kDot ? 4 : 8));
#pragma unroll
        for (int j = 0; j < S::kScales; ++j) {
          if constexpr (FORM == kAxpy) put(to + j * 8, now[0].v[j], now[1].v[j]);
          if constexpr (FORM == kDot) {
            if (j % 2 == 0) put(to + j * 4, now[i].v[j], now[i].v[j + 1]);
          }
        }
      }
      barrier_arrive(&full_c[ring.slot]);
    }
  }
};
#endif

}  // namespace eformer

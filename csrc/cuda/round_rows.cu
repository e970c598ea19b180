// Rows of x to codes of 8 bits and one scale each (src/eformer/_kernels/activations.py has the definition). A block takes a
// row, finds its largest magnitude, and rounds what it has kept in registers.
#include <cuda_fp8.h>

#include "common.cuh"
#include "kernels.h"

namespace eformer {
namespace {

// Pieces of eight values a thread keeps.
template <int DTYPE>
constexpr int kKept = DTYPE == kF32 ? 2 : 4;

template <int DTYPE>
struct Piece {
  static constexpr int kWords = DTYPE == kF32 ? 8 : 4;
  uint32_t w[kWords];
  __device__ __forceinline__ void load(const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) *reinterpret_cast<uint4*>(w + 4 * i) = *reinterpret_cast<const uint4*>(from + 16 * i);
  }
  // The values in [at, end) of a row.
  __device__ __forceinline__ void load_some(const void* row, int64_t at, int64_t end) {
    uint16_t* halves = reinterpret_cast<uint16_t*>(w);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool there = at + i < end;
      if constexpr (DTYPE == kF32) {
        w[i] = there ? static_cast<const uint32_t*>(row)[at + i] : 0;
      } else {
        halves[i] = there ? static_cast<const uint16_t*>(row)[at + i] : 0;
      }
    }
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (DTYPE == kF32) return __uint_as_float(w[i]);
    const uint32_t half = i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xFFFF;
    if constexpr (DTYPE == kBf16) return __uint_as_float(half << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
  }
  // Magnitudes compare like the integers that they are stored as, and what is not finite is the largest.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(value(i)) & 0x7FFFFFFF);
    return most;
  }
};

// Quotients by one divisor, each rounded correctly: a product with the inverse, and one correction by what is left. That
// is exact where nothing underflows; elsewhere (PLAIN) the division of the hardware's library.
template <bool PLAIN>
struct Divisor {
  float scale, inverse;
  __device__ __forceinline__ explicit Divisor(float s) : scale(s), inverse(1.f / s) {}
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (PLAIN) return __fdiv_rn(x, scale);
    const float q = x * inverse;
    return fmaf(fmaf(-q, scale, x), inverse, q);
  }
};

template <bool FLOATS>
__device__ __forceinline__ uint32_t round_four(float a, float b, float c, float d) {
  if constexpr (FLOATS) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3)) << 16;
  } else {
    // Adding 1.5 * 2^23 rounds to an integer, a tie to even; it is in the lowest bits then.
    const auto whole = [](float v) { return __float_as_uint(fminf(fmaxf(v, -127.f), 127.f) + 12582912.f); };
    return __byte_perm(__byte_perm(whole(a), whole(b), 0x0040), __byte_perm(whole(c), whole(d), 0x0040), 0x5410);
  }
}

template <int DTYPE, bool FLOATS, bool PLAIN>
__device__ __forceinline__ uint2 round_piece(const Piece<DTYPE>& p, const Divisor<PLAIN>& by) {
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = by(p.value(i));
  return make_uint2(round_four<FLOATS>(q[0], q[1], q[2], q[3]), round_four<FLOATS>(q[4], q[5], q[6], q[7]));
}

template <int DTYPE, bool FLOATS>
__global__ void __launch_bounds__(1024) round_rows_kernel(const __grid_constant__ RoundedRows r) {
  let_next_kernel_start();
  __shared__ uint32_t found[32];
  const int64_t row = blockIdx.x, pieces = (r.cols + 7) / 8;
  const uint8_t* x = static_cast<const uint8_t*>(r.x) + row * r.cols * item_size(DTYPE);
  const bool whole = r.cols * item_size(DTYPE) % 16 == 0 && r.cols % 8 == 0 && reinterpret_cast<uintptr_t>(r.x) % 16 == 0;
  const auto load = [&](Piece<DTYPE>& p, int64_t piece) {
    if (whole) {
      p.load(x + piece * 8 * item_size(DTYPE));
    } else {
      p.load_some(x, piece * 8, r.cols);
    }
  };
  const auto at = [](int i) { return threadIdx.x + static_cast<int64_t>(i) * blockDim.x; };
  Piece<DTYPE> kept[kKept<DTYPE>] = {};
  // All are asked for before the first one is looked at.
  if (whole) {
#pragma unroll
    for (int i = 0; i < kKept<DTYPE>; ++i) {
      if (at(i) < pieces) kept[i].load(x + at(i) * 8 * item_size(DTYPE));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kKept<DTYPE>; ++i) kept[i].load_some(x, at(i) * 8, r.cols);
  }
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kKept<DTYPE>; ++i) most = max(most, kept[i].largest());
  for (int64_t piece = at(kKept<DTYPE>); piece < pieces; piece += blockDim.x) {
    Piece<DTYPE> p;
    load(p, piece);
    most = max(most, p.largest());
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
  __syncthreads();
  most = __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? found[threadIdx.x % 32] : 0);
  const bool finite = most < 0x7F800000;
  float scale = fmaxf(__fdiv_rn(__uint_as_float(most), FLOATS ? 448.f : 127.f), 0x1p-126f);
  if (r.given) scale = r.given[row];
  if (!finite) scale = __uint_as_float(0x7FC00000);
  if (threadIdx.x == 0) r.scale[row] = scale;
  uint8_t* codes = r.codes + row * r.pitch;  // a multiple of 16
  const auto put = [&](const Piece<DTYPE>& p, int64_t piece, const auto& by) {
    *reinterpret_cast<uint2*>(codes + piece * 8) = round_piece<DTYPE, FLOATS>(p, by);
  };
  // The kind of division is chosen for the row, not for every value.
  const auto put_all = [&](const auto& by) {
#pragma unroll
    for (int i = 0; i < kKept<DTYPE>; ++i) {
      if (at(i) < pieces) put(kept[i], at(i), by);
    }
    for (int64_t piece = at(kKept<DTYPE>); piece < pieces; piece += blockDim.x) {
      Piece<DTYPE> p;
      load(p, piece);
      put(p, piece, by);
    }
  };
  if (scale > 0x1p-60f && scale < 0x1p60f) {
    put_all(Divisor<false>(scale));
  } else {
    put_all(Divisor<true>(scale));
  }
}

template <int DTYPE>
cudaError_t launch(cudaStream_t stream, const RoundedRows& r) {
  if (r.rows >= int64_t{1} << 31) return cudaErrorNotSupported;
  const int64_t pieces = (r.cols + 7) / 8;
  int threads = 128;
  while (threads < 1024 && threads * kKept<DTYPE> < pieces) threads *= 2;
  if (r.floats) {
    round_rows_kernel<DTYPE, true><<<static_cast<unsigned>(r.rows), threads, 0, stream>>>(r);
  } else {
    round_rows_kernel<DTYPE, false><<<static_cast<unsigned>(r.rows), threads, 0, stream>>>(r);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t round_rows(cudaStream_t stream, const RoundedRows& r) {
  if (r.x_dtype == kF32) return launch<kF32>(stream, r);
  return r.x_dtype == kBf16 ? launch<kBf16>(stream, r) : launch<kF16>(stream, r);
}

}  // namespace eformer

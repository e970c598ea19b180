// Whole rows of D, decoded: all of them (for products with many rows of x, which cuBLAS then computes) or those asked
// for (embeddings). A thread decodes eight neighbours and writes them in one piece.
#include "common.cuh"
#include "decode.cuh"
#include "kernels.h"

namespace eformer {
namespace {

template <int FMT>
__device__ __forceinline__ void decode_eight(float (&v)[8], const uint8_t* row, int64_t c, int valid, const float* book) {
  constexpr int kBytes = FMT == kNf4 ? 4 : FMT == kInt8 ? 8 : FMT == kTernary ? 2 : 1;
  const uint8_t* src = row + c / 8 * kBytes;
  uint8_t bytes[kBytes];
  const bool whole = valid == 8 || FMT != kInt8;  // packed bytes exist to the end
  if (whole && reinterpret_cast<uintptr_t>(src) % kBytes == 0 && (FMT != kNf4 || valid == 8)) {
    if constexpr (kBytes == 8) *reinterpret_cast<uint2*>(bytes) = *reinterpret_cast<const uint2*>(src);
    if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(bytes) = *reinterpret_cast<const uint32_t*>(src);
    if constexpr (kBytes == 1) bytes[0] = src[0];
    if constexpr (kBytes == 2) {  // the last byte may be missing
      bytes[0] = src[0];
      bytes[1] = valid > 4 ? src[1] : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) bytes[i] = i * 8 < valid * kBytes ? src[i] : 0;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (FMT == kNf4) v[i] = book[i % 2 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4];
    if constexpr (FMT == kInt8) v[i] = static_cast<int8_t>(bytes[i]);
    if constexpr (FMT == kTernary) v[i] = static_cast<float>((bytes[i / 4] >> (6 - 2 * (i % 4))) & 3) - 1.f;
    if constexpr (FMT == kBinary) v[i] = (bytes[0] >> (7 - i)) & 1 ? 1.f : -1.f;
  }
}

__device__ __forceinline__ uint32_t pack16(float a, float b, int dtype) {
  return dtype == kBf16 ? Pair<__nv_bfloat16>::pack(a, b) : Pair<__half>::pack(a, b);
}

template <int FMT>
__global__ void rows_kernel(const __grid_constant__ Rows r) {
  __shared__ float book[16];
  if (threadIdx.x < 16 && threadIdx.y == 0) book[threadIdx.x] = kCodebook[threadIdx.x];
  __syncthreads();
  const Matrices& d = r.d;
  const int64_t pieces = (d.cols + 7) / 8, piece = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (piece >= pieces) return;
  const int64_t c = piece * 8;
  const int valid = static_cast<int>(d.cols - c < 8 ? d.cols - c : 8);
  const bool wide = d.cols % 8 == 0 && r.y_dtype != kF32;
  for (int64_t i = blockIdx.y * static_cast<int64_t>(blockDim.y) + threadIdx.y; i < r.n;
       i += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t row = r.indices ? min(max(static_cast<int64_t>(r.indices[i]), int64_t{0}), d.rows - 1) : i;
    float v[8];
    decode_eight<FMT>(v, d.codes + row * d.row_bytes, c, valid, book);
    if (d.scale) {
      // All matrices lie one behind the other: rows count through.
      const int64_t at = (d.scale_rows == 1 ? row / d.rows : row) * d.scale_cols;
      if (FMT == kNf4 || d.scale_cols == 1) {
        const float s = load_float(d.scale, FMT == kNf4 ? row * d.scale_cols + c / d.block : at, d.scale_dtype);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= s;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < valid) v[e] *= load_float(d.scale, at + (d.scale_cols == 1 ? 0 : c + e), d.scale_dtype);
        }
      }
    }
    if (wide) {
      const uint4 out = make_uint4(pack16(v[0], v[1], r.y_dtype), pack16(v[2], v[3], r.y_dtype),
                                   pack16(v[4], v[5], r.y_dtype), pack16(v[6], v[7], r.y_dtype));
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(r.y) + (i * d.cols + c) * 2) = out;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < valid) store_float(r.y, i * d.cols + c + e, r.y_dtype, v[e]);
      }
    }
  }
}

template <int FMT>
cudaError_t launch(cudaStream_t stream, const Rows& r) {
  const int64_t pieces = (r.d.cols + 7) / 8;
  int across = 32;
  while (across < 256 && across < pieces) across *= 2;
  const dim3 block(across, 256 / across);
  const int64_t down = (r.n + block.y - 1) / block.y;
  const dim3 grid(static_cast<unsigned>((pieces + across - 1) / across), static_cast<unsigned>(down < 65535 ? down : 65535));
  rows_kernel<FMT><<<grid, block, 0, stream>>>(r);
  return cudaGetLastError();
}

}  // namespace

cudaError_t decode_rows(cudaStream_t stream, const Rows& r) {
  switch (r.d.fmt) {
    case 0:
      return r.d.block % 8 ? cudaErrorNotSupported : launch<kNf4>(stream, r);
    case 1:
      return launch<kInt8>(stream, r);
    case 2:
      return launch<kTernary>(stream, r);
    case 3:
      return launch<kBinary>(stream, r);
  }
  return cudaErrorNotSupported;
}

}  // namespace eformer

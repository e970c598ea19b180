// Whole rows of D, decoded: all of them (for products with many rows of x, which cuBLAS then computes) or those asked
// for (embeddings). A thread decodes eight neighbours and writes them in one piece.
#include "books.h"
#include "common.cuh"
#include "decode.cuh"
#include "device.h"
#include "kernels.h"

namespace eformer {
namespace {

template <int FMT>
__device__ __forceinline__ float half_of(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, FMT == kE4m3 ? __NV_E4M3 : __NV_E5M2)));
}

// Stored bytes of eight values.
template <int FMT>
constexpr int kEight = kIntegerBits<FMT> ? kIntegerBits<FMT> : 8 / kPerByte<FMT>;

// Value i of eight, of the first four bytes (`low`) and the others.
template <int FMT>
__device__ __forceinline__ float value_of(uint32_t low, uint32_t high, int i, const float* book) {
  constexpr int kBits = kIntegerBits<FMT>;
  if constexpr (kBits > 0) {
    // As one number, whose first byte is the highest.
    const uint64_t all = static_cast<uint64_t>(__byte_perm(low, 0, 0x0123)) << 32 | __byte_perm(high, 0, 0x0123);
    return static_cast<float>(static_cast<int>(all >> (64 - kBits * (i + 1)) & ((1 << kBits) - 1)) - (1 << (kBits - 1)));
  }
  const uint32_t word = kPerByte<FMT> == 1 && i >= 4 ? high : low;
  if constexpr (FMT == kInt8) return static_cast<int8_t>(word >> (i % 4 * 8));
  if constexpr (FMT == kE4m3 || FMT == kE5m2) return half_of<FMT>(static_cast<uint8_t>(word >> (i % 4 * 8)));
  if constexpr (FMT == kTernary) return static_cast<float>(word >> (i / 4 * 8 + 6 - 2 * (i % 4)) & 3) - 1.f;
  if constexpr (FMT == kBinary) return word >> (7 - i) & 1 ? 1.f : -1.f;
  return book[word >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15];
}

// Eight values' bytes, in as few loads as their size allows; `from` is a multiple of it.
template <int FMT>
__device__ __forceinline__ uint2 load_eight(const uint8_t* from) {
  constexpr int kBytes = kEight<FMT>;
  uint2 v = make_uint2(0, 0);
  if constexpr (kBytes == 8) {
    v = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kBytes == 4) {
    v.x = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kBytes % 2 == 0) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    v.x = __ldg(halves);
    if constexpr (kBytes == 6) v.x |= static_cast<uint32_t>(__ldg(halves + 1)) << 16, v.y = __ldg(halves + 2);
  } else {
    v.x = __ldg(from);
    if constexpr (kBytes > 1) v.x |= static_cast<uint32_t>(__ldg(from + 1)) << 8 | static_cast<uint32_t>(__ldg(from + 2)) << 16;
    if constexpr (kBytes == 5) v.x |= static_cast<uint32_t>(__ldg(from + 3)) << 24, v.y = __ldg(from + 4);
  }
  return v;
}

// The last ones of a row may be fewer. Of formats in blocks all bytes exist.
template <int FMT>
__device__ __forceinline__ void decode_eight(float (&v)[8], const uint8_t* row, int64_t c, int bytes, const float* book) {
  constexpr int kBytes = kEight<FMT>;
  const uint8_t* src = row + c / 8 * kBytes;
  uint2 words = make_uint2(0, 0);
  if (bytes == kBytes && reinterpret_cast<uintptr_t>(src) % (kBytes & -kBytes) == 0) {
    words = load_eight<FMT>(src);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      const uint32_t byte = i < bytes ? src[i] : 0;
      (i < 4 ? words.x : words.y) |= byte << (i % 4 * 8);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = value_of<FMT>(words.x, words.y, i, book);
}

__device__ __forceinline__ uint32_t pack16(float a, float b, int dtype) {
  return dtype == kBf16 ? Pair<__nv_bfloat16>::pack(a, b) : Pair<__half>::pack(a, b);
}

// Says that nobody writes there meanwhile, so that the next rows are asked for before this one is stored.
__device__ __forceinline__ float load_scale(const void* p, int64_t i, int dtype) {
  if (dtype == kF32) return __ldg(static_cast<const float*>(p) + i);
  if (dtype == kBf16) return __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(p) + i));
  return __half2float(__ldg(static_cast<const __half*>(p) + i));
}

// Of a block, beside its scale: what is added to values before they are multiplied with it, or a bias. Products of codes
// and scales are rounded before a bias is added, as in JAX.
__device__ __forceinline__ float load_offset(const Matrices& d, const uint8_t* offset, int64_t at) {
  if (d.offset_dtype != kU8) return load_scale(offset, at, d.offset_dtype);
  return d.centre - static_cast<float>(__ldg(offset + at));
}
__device__ __forceinline__ float shifted(const Matrices& d, float v, float scale, float offset) {
  return d.offset_dtype != kU8 ? __fadd_rn(__fmul_rn(v + d.centre, scale), offset) : (v + offset) * scale;
}

template <int FMT>
__global__ void rows_kernel(const __grid_constant__ Rows r, const __grid_constant__ Book values) {
  __shared__ float book[16];
  if (threadIdx.x < 16 && threadIdx.y == 0) book[threadIdx.x] = values.v[threadIdx.x];
  __syncthreads();
  const Matrices& d = r.d;
  const int64_t skipped = first_matrix(d.stack);
  const uint8_t* codes = d.codes + skipped * d.rows * d.row_bytes;
  const uint8_t* scale = d.scale + skipped * d.scale_rows * d.scale_cols * item_size(d.scale_dtype);
  const uint8_t* offset = d.offset + skipped * d.scale_rows * d.scale_cols * item_size(d.offset_dtype);
  const int64_t pieces = (d.cols + 7) / 8, piece = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (piece >= pieces) return;
  const int64_t c = piece * 8;
  const int valid = static_cast<int>(d.cols - c < 8 ? d.cols - c : 8);
  const bool wide = d.cols % 8 == 0 && r.y_dtype != kF32;
  const bool blocked = d.block > 0;
  const int64_t block = blocked ? c / d.block : 0;
  const int bytes = blocked ? kEight<FMT> : (valid * kEight<FMT> + 7) / 8;
  for (int64_t i = blockIdx.y * static_cast<int64_t>(blockDim.y) + threadIdx.y; i < r.n;
       i += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t row = r.indices ? min(max(static_cast<int64_t>(r.indices[i]), int64_t{0}), d.rows - 1) : i;
    float v[8];
    decode_eight<FMT>(v, codes + row * d.row_bytes, c, bytes, book);
    if (d.scale) {
      // All matrices lie one behind the other: rows count through.
      const int64_t at = (d.scale_rows > 1 ? row : d.count > 1 ? row / d.rows : 0) * d.scale_cols;
      if (d.offset) {
        const int64_t here = row * d.scale_cols + block;
        const float s = load_scale(scale, here, d.scale_dtype), more = load_offset(d, offset, here);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = shifted(d, v[e], s, more);
      } else if (blocked || d.scale_cols == 1) {
        const float s = load_scale(scale, blocked ? row * d.scale_cols + block : at, d.scale_dtype);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= s;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < valid) v[e] *= load_scale(scale, at + (d.scale_cols == 1 ? 0 : c + e), d.scale_dtype);
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

// All rows in order, into 16 bits, columns in whole eights: codes and scales of some rows are asked for before the first of
// them is decoded.
template <int FMT, class E>
__global__ void __launch_bounds__(256) matrix_kernel(const __grid_constant__ Rows r, const __grid_constant__ Book values) {
  __shared__ float book[16];
  if (threadIdx.x < 16 && threadIdx.y == 0) book[threadIdx.x] = values.v[threadIdx.x];
  __syncthreads();
  constexpr int kAhead = 4;
  const Matrices& d = r.d;
  const int c = (blockIdx.x * blockDim.x + threadIdx.x) * 8, step = gridDim.y * blockDim.y;
  if (c >= d.cols) return;
  const int64_t skipped = first_matrix(d.stack);
  const uint8_t* codes = d.codes + skipped * d.rows * d.row_bytes + c / 8 * kEight<FMT>;
  const uint8_t* scales = d.scale + skipped * d.scale_rows * d.scale_cols * item_size(d.scale_dtype);
  const uint8_t* offsets = d.offset + skipped * d.scale_rows * d.scale_cols * item_size(d.offset_dtype);
  const int64_t scale_column = d.block ? c / d.block : 0, scale_pitch = d.scale_rows == 1 && !d.block ? 0 : d.scale_cols;
#pragma unroll 1
  for (int64_t first = blockIdx.y * blockDim.y + threadIdx.y; first < r.n; first += kAhead * step) {
    uint2 words[kAhead];
    float scale[kAhead], offset[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t row = min(first + u * step, r.n - 1);
      words[u] = load_eight<FMT>(codes + row * d.row_bytes);
      scale[u] = d.scale ? load_scale(scales, row * scale_pitch + scale_column, d.scale_dtype) : 1.f;
      if (d.offset) offset[u] = load_offset(d, offsets, row * scale_pitch + scale_column);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t row = first + u * step;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = value_of<FMT>(words[u].x, words[u].y, i, book);
        v[i] = d.offset ? shifted(d, v[i], scale[u], offset[u]) : v[i] * scale[u];
      }
      const uint4 out = make_uint4(Pair<E>::pack(v[0], v[1]), Pair<E>::pack(v[2], v[3]), Pair<E>::pack(v[4], v[5]), Pair<E>::pack(v[6], v[7]));
      if (row < r.n) *reinterpret_cast<uint4*>(static_cast<uint8_t*>(r.y) + (row * d.cols + c) * 2) = out;
    }
  }
}

template <int FMT>
cudaError_t launch(cudaStream_t stream, const Rows& r) {
  const int64_t pieces = (r.d.cols + 7) / 8;
  int across = 32;
  while (across < 256 && across < pieces) across *= 2;
  const dim3 block(across, 256 / across);
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  const int64_t wide = (pieces + across - 1) / across, down = (r.n + block.y - 1) / block.y;
  const int64_t enough = 16 * device.multiprocessors / wide + 1;  // a thread decodes several rows
  const dim3 grid(static_cast<unsigned>(wide), static_cast<unsigned>(down < enough ? down : enough));
  const uint64_t aligned = reinterpret_cast<uintptr_t>(r.d.codes) | r.d.row_bytes;
  const bool plain = !r.indices && r.d.cols % 8 == 0 && r.y_dtype != kF32 && aligned % (kEight<FMT> & -kEight<FMT>) == 0 && r.d.cols < 1 << 30 &&
                     (r.d.block || (r.d.scale_cols == 1 && (r.d.scale_rows > 1 || r.d.count == 1)));
  if (plain && r.y_dtype == kBf16) {
    matrix_kernel<FMT, __nv_bfloat16><<<grid, block, 0, stream>>>(r, book_of(r.d.fmt));
  } else if (plain) {
    matrix_kernel<FMT, __half><<<grid, block, 0, stream>>>(r, book_of(r.d.fmt));
  } else {
    rows_kernel<FMT><<<grid, block, 0, stream>>>(r, book_of(r.d.fmt));
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t decode_rows(cudaStream_t stream, const Rows& r) {
  if (r.d.block % 8) return cudaErrorNotSupported;
  switch (r.d.fmt) {
    case 0:
    case 4:
    case 5:
    case 6:
      return launch<kNf4>(stream, r);
    case 1:
    case 7:
      return launch<kInt8>(stream, r);
    case 2:
      return launch<kTernary>(stream, r);
    case 3:
      return launch<kBinary>(stream, r);
    case 8:
    case 10:
      return launch<kE4m3>(stream, r);
    case 9:
    case 11:
      return launch<kE5m2>(stream, r);
    case 12:
      return launch<kInt2>(stream, r);
    case 13:
      return launch<kInt3>(stream, r);
    case 14:
      return launch<kInt5>(stream, r);
    case 15:
      return launch<kInt6>(stream, r);
  }
  return cudaErrorNotSupported;
}

}  // namespace eformer

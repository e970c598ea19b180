// Puts one product on a stream for the kernel of wide.cuh.
#pragma once

#include <atomic>

#include "device.h"
#include "kernels.h"
#include "parts.h"
#include "tensor_map.h"
#include "wide.cuh"

namespace eformer {

template <int FMT, class E, int FORM, int N, int G, int D, int TILES, int TERMS = 1>
cudaError_t launch_wide(cudaStream_t stream, const WideProduct& w) {
  const Product& p = w.p;
  using W = WideShape<FMT, E, FORM, N, G, D, TILES, TERMS>;
  using S = typename W::S;
  const Matrices& d = p.d;
  const int64_t outs = FORM == kDot ? d.rows : d.cols, deep = FORM == kDot ? d.cols : d.rows;
  WideArgs a{};
  a.scale = d.scale, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.outs = static_cast<int32_t>(outs);
  a.scale_rows = static_cast<int32_t>(d.scale_rows), a.scale_cols = static_cast<int32_t>(d.scale_cols), a.block = d.block;
  a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.out_scale = kInBlocks<FMT> || !d.scale ? 0 : d.scale_rows * d.scale_cols == 1 ? 2 : 1;
  a.scale_batch = d.scale ? d.scale_rows * d.scale_cols * item_size(d.scale_dtype) : 0;
  a.y_batch = p.m * outs, a.stack = d.stack;
  if constexpr (kInNibbles<FMT>) a.book = book_of(d.fmt), a.rough_book = rough_book();
  a.m_chunks = static_cast<int32_t>(ceil_div<int64_t>(p.m, N));
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(deep, S::kDeep));
  const uint64_t bytes = d.row_bytes, rows = d.rows, count = d.count, width = deep, m = p.m;
  constexpr uint32_t kBox = S::kBoxBytes, kRows = S::kBoxRows;
  const Boxes codes{d.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, {bytes, rows, stored_in(d)}, {bytes, bytes * rows}, {kBox, kRows, 1},
                    kBox == 16 ? 0 : static_cast<int>(kBox)};
  const Boxes x{p.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, {width, m, count}, {width * 2, width * 2 * m}, {64, N, 1}, 128};
  if constexpr (kInBlocks<FMT>) {
    while (kGroup<FMT> << a.share_log < d.block) ++a.share_log;
    const uint32_t item = item_size(d.scale_dtype);
    const uint64_t columns = d.scale_cols;
    const Boxes scale{d.scale, item == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                      {columns, rows, stored_in(d)}, {columns * item, columns * item * rows}, {S::kRawRow / item, S::kScaleRows, 1}, 0};
    a.boxed = kGroup<FMT> << a.share_log == d.block && make_tensor_map(&a.scale_map, scale);
    if constexpr (kShifted<FMT>) {
      const uint64_t size = item_size(d.offset_dtype);
      a.offset = d.offset, a.offset_dtype = d.offset_dtype, a.centre = d.centre;
      a.offset_batch = d.scale_rows * d.scale_cols * size;
      const auto kind = size == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                        : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                    : CU_TENSOR_MAP_DATA_TYPE_UINT8;
      const Boxes offset{d.offset, kind, {columns, rows, stored_in(d)},
                         {columns * size, columns * size * rows}, {static_cast<uint32_t>(16 / size), S::kScaleRows, 1}, 0};
      a.boxed = a.boxed && make_tensor_map(&a.offset_map, offset);
    }
  }
  if (!make_tensor_map(&a.codes_map, codes) || !make_tensor_map(&a.x_map, x)) return cudaErrorNotSupported;
  auto* kernel = &wide_kernel<FMT, E, FORM, N, G, D, TILES, TERMS>;
  static std::atomic<uint64_t> allowed{0};
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (cudaError_t e = allow_shared(kernel, device, W::kShared, &allowed)) return e;
  const int64_t tiles = ceil_div<int64_t>(outs, W::kOuts) * a.m_chunks;
  // Most tiles in whole waves, then the rest, cut up in more splits so that all multiprocessors have a part of it.
  const int64_t rest = w.rest < tiles ? w.rest : 0;
  for (int launch = 0; launch < (rest ? 2 : 1); ++launch) {
    const int asked = clamp_to((launch ? w.rest_splits : p.splits) - 1, 7) + 1;
    a.stages_per_split = ceil_div(a.stages, asked < a.stages ? asked : a.stages);
    a.first_tile = static_cast<int32_t>(launch ? tiles - rest : 0);
    const int splits = ceil_div(a.stages, a.stages_per_split);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(launch ? rest : tiles - rest), splits, static_cast<unsigned>(d.count));
    config.blockDim = dim3(W::kThreads);
    config.dynamicSmemBytes = W::kShared;
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = splits, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster, config.numAttrs = splits > 1 ? 1 : 0;
    if (cudaError_t e = cudaLaunchKernelEx(&config, kernel, a)) return e;
  }
  return cudaSuccess;
}

// The shapes that are there: 64 or 128 outs per block in the dot form, 64 (from 65 rows of x on), 128 or 256 in the axpy
// form. More than 64 rows of x (axpy form: 32) leave registers for two warpgroups only, and formats without scales of
// blocks are quicker with two.
template <int FMT, class E, int FORM, int N>
cudaError_t launch_few(cudaStream_t stream, const WideProduct& w) {
  const bool few = w.outs <= (FORM == kDot ? 64 : 128);
  if constexpr (FORM == kDot) {
    return few ? launch_wide<FMT, E, FORM, N, 2, 2, 1>(stream, w) : launch_wide<FMT, E, FORM, N, 4, 2, 1>(stream, w);
  } else if constexpr (N <= 32 && kInNibbles<FMT>) {
    return few ? launch_wide<FMT, E, FORM, N, 4, 4, 2>(stream, w) : launch_wide<FMT, E, FORM, N, 4, 2, 2>(stream, w);
  } else {
    return few ? launch_wide<FMT, E, FORM, N, 2, 2, 2>(stream, w) : launch_wide<FMT, E, FORM, N, 2, 1, 2>(stream, w);
  }
}
// NF4 as sums of two bf16: registers for two warpgroups.
template <int FMT, class E, int FORM, int N>
cudaError_t launch_terms(cudaStream_t stream, const WideProduct& w) {
  constexpr int kTiles = FORM == kDot ? 1 : 2;
  return w.outs <= 64 * kTiles ? launch_wide<FMT, E, FORM, N, 2, 2, kTiles, 2>(stream, w)
                               : launch_wide<FMT, E, FORM, N, 2, 1, kTiles, 2>(stream, w);
}
template <int FMT, class E, int FORM>
cudaError_t choose_terms(cudaStream_t stream, const WideProduct& w) {
  if (w.width <= 16) return launch_terms<FMT, E, FORM, 16>(stream, w);
  if (w.width <= 32) return launch_terms<FMT, E, FORM, 32>(stream, w);
  return w.width <= 64 ? launch_terms<FMT, E, FORM, 64>(stream, w) : launch_terms<FMT, E, FORM, 128>(stream, w);
}

// More than 64 rows of x. In the axpy form 64 outs of a stored row have to have 16 bytes, and no offsets, which come in
// pieces of 16 bytes; bytes and 256 rows of x are quicker with one tile per warpgroup where they have 128 outs.
template <int FMT, class E, int FORM, int N>
cudaError_t launch_many(cudaStream_t stream, const WideProduct& w) {
  constexpr bool kSmall = N == 128 && (FORM == kDot || (FMT != kBinary && !kShifted<FMT>));
  if constexpr (kSmall) {
    if (w.outs <= 64) return launch_wide<FMT, E, FORM, N, 2, 2, 1>(stream, w);
  }
  if constexpr (FORM == kDot || N == 256) {
    return launch_wide<FMT, E, FORM, N, 2, 1, 1>(stream, w);
  } else {
    if (w.outs > 128) return launch_wide<FMT, E, FORM, N, 2, 1, 2>(stream, w);
    return launch_wide<FMT, E, FORM, N, 2, kInBytes<FMT> ? 1 : 2, kInBytes<FMT> ? 1 : 2>(stream, w);
  }
}

template <int FMT, class E, int FORM, int TERMS>
cudaError_t multiply_wide(cudaStream_t stream, const WideProduct& w) {
  if constexpr (TERMS == 2) return choose_terms<FMT, E, FORM>(stream, w);
  if (w.width <= 16) return launch_few<FMT, E, FORM, 16>(stream, w);
  if (w.width <= 32) return launch_few<FMT, E, FORM, 32>(stream, w);
  if (w.width <= 64) return launch_few<FMT, E, FORM, 64>(stream, w);
  if constexpr (FORM == kDot || kInNibbles<FMT> || kInBytes<FMT>) {
    if (w.width > 128) return launch_many<FMT, E, FORM, 256>(stream, w);
  }
  return launch_many<FMT, E, FORM, 128>(stream, w);
}

}  // namespace eformer

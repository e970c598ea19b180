// Puts one product on a stream for the kernel of wide.cuh.
#pragma once

#include <atomic>
#include <type_traits>

#include "device.h"
#include "kernels.h"
#include "tensor_map.h"
#include "wide.cuh"

namespace eformer {

template <int FMT, class E, int FORM, int N, int G, int D, int TERMS = 1>
cudaError_t launch_wide(cudaStream_t stream, const Product& p) {
  using W = WideShape<FMT, FORM, N, G, D>;
  using S = typename W::S;
  const Matrices& d = p.d;
  const int64_t outs = FORM == kDot ? d.rows : d.cols, deep = FORM == kDot ? d.cols : d.rows;
  WideArgs a{};
  a.scale = d.scale, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.outs = static_cast<int32_t>(outs);
  a.scale_rows = static_cast<int32_t>(d.scale_rows), a.scale_cols = static_cast<int32_t>(d.scale_cols), a.block = d.block;
  a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.out_scale = FMT == kNf4 || !d.scale ? 0 : d.scale_rows * d.scale_cols == 1 ? 2 : 1;
  a.scale_batch = d.scale ? d.scale_rows * d.scale_cols * item_size(d.scale_dtype) : 0;
  a.y_batch = p.m * outs;
  a.scales_in_fours = d.block == 64 && d.scale_dtype == kF32 && d.scale_cols % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(d.scale) % 16 == 0;
  a.m_chunks = static_cast<int32_t>(ceil_div<int64_t>(p.m, N));
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(deep, S::kDeep));
  const int asked = clamp_to(p.splits - 1, 7) + 1;
  a.stages_per_split = ceil_div(a.stages, asked < a.stages ? asked : a.stages);
  const int splits = ceil_div(a.stages, a.stages_per_split);
  const uint64_t bytes = d.row_bytes, rows = d.rows, count = d.count, width = deep, m = p.m;
  constexpr uint32_t kBox = S::kBoxBytes, kRows = S::kBoxRows;
  const Boxes codes{d.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, {bytes, rows, count}, {bytes, bytes * rows}, {kBox, kRows, 1},
                    kBox == 16 ? 0 : static_cast<int>(kBox)};
  const Boxes x{p.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, {width, m, count}, {width * 2, width * 2 * m}, {64, N, 1}, 128};
  if (!make_tensor_map(&a.codes_map, codes) || !make_tensor_map(&a.x_map, x)) return cudaErrorNotSupported;
  auto* kernel = &wide_kernel<FMT, E, FORM, N, G, D, TERMS>;
  static std::atomic<uint64_t> allowed{0};
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (cudaError_t e = allow_shared(kernel, device, W::kShared, &allowed)) return e;
  const int64_t tiles = ceil_div<int64_t>(outs, W::kOuts);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * a.m_chunks), splits, static_cast<unsigned>(d.count));
  config.blockDim = dim3(W::kThreads);
  config.dynamicSmemBytes = W::kShared;
  config.stream = stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = splits, cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster, config.numAttrs = splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

// The shapes that are there: 64 or 128 outs per block in the dot form, 128 or 256 in the axpy form. More than 64 rows of x
// leave registers for two warpgroups only.
template <int FMT, class E, int FORM>
cudaError_t choose_wide(cudaStream_t stream, const WideProduct& w) {
  const bool few = w.outs <= (FORM == kDot ? 64 : 128);
  constexpr int kMore = FORM == kDot ? 4 : 2, kShare = FORM == kDot ? 2 : 1;
  if (w.width <= 16) {
    return few ? launch_wide<FMT, E, FORM, 16, 2, 2>(stream, w.p) : launch_wide<FMT, E, FORM, 16, kMore, kShare>(stream, w.p);
  }
  if (w.width <= 32) {
    return few ? launch_wide<FMT, E, FORM, 32, 2, 2>(stream, w.p) : launch_wide<FMT, E, FORM, 32, kMore, kShare>(stream, w.p);
  }
  if (w.width <= 64) {
    return few ? launch_wide<FMT, E, FORM, 64, 2, 2>(stream, w.p) : launch_wide<FMT, E, FORM, 64, kMore, kShare>(stream, w.p);
  }
  if constexpr (FORM == kDot) {
    if (w.width > 128) return launch_wide<FMT, E, FORM, 256, 2, 1>(stream, w.p);
  }
  return few ? launch_wide<FMT, E, FORM, 128, 2, 2>(stream, w.p) : launch_wide<FMT, E, FORM, 128, 2, 1>(stream, w.p);
}

// NF4 as sums of two bf16: registers for two warpgroups.
template <class E, int FORM, int N>
cudaError_t launch_terms(cudaStream_t stream, const WideProduct& w) {
  return w.outs <= (FORM == kDot ? 64 : 128) ? launch_wide<kNf4, E, FORM, N, 2, 2, 2>(stream, w.p)
                                             : launch_wide<kNf4, E, FORM, N, 2, 1, 2>(stream, w.p);
}
template <class E, int FORM>
cudaError_t choose_terms(cudaStream_t stream, const WideProduct& w) {
  if (w.width <= 16) return launch_terms<E, FORM, 16>(stream, w);
  if (w.width <= 32) return launch_terms<E, FORM, 32>(stream, w);
  return w.width <= 64 ? launch_terms<E, FORM, 64>(stream, w) : launch_terms<E, FORM, 128>(stream, w);
}

template <class E, int FORM>
cudaError_t choose_wide_format(cudaStream_t stream, const WideProduct& w) {
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major != 9) return cudaErrorNotSupported;  // no other generation has the instruction
  switch (w.p.d.fmt) {
    case 0:
      if (w.p.d.block % 64) return cudaErrorNotSupported;
      if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        if (w.p.y_dtype == kF32) return choose_terms<E, FORM>(stream, w);
      }
      return choose_wide<kNf4, E, FORM>(stream, w);
    case 1:
      return choose_wide<kInt8, E, FORM>(stream, w);
    case 2:
      return choose_wide<kTernary, E, FORM>(stream, w);
    case 3:
      return choose_wide<kBinary, E, FORM>(stream, w);
  }
  return cudaErrorNotSupported;
}

}  // namespace eformer

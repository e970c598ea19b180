// Puts one product on a stream for the kernel of odd.cuh.
#pragma once

#include <atomic>

#include "device.h"
#include "kernels.h"
#include "odd.cuh"
#include "parts.h"

namespace eformer {

template <int FMT, class E, int FORM, int N>
cudaError_t launch_odd(cudaStream_t stream, const WideProduct& w, const Device& device) {
  using S = OddShape<FMT, FORM, N>;
  const Product& p = w.p;
  const Matrices& d = p.d;
  const int64_t outs = FORM == kDot ? d.rows : d.cols, deep = FORM == kDot ? d.cols : d.rows;
  const int64_t scale_bytes = d.scale ? d.scale_rows * d.scale_cols * item_size(d.scale_dtype) : 0;
  constexpr int64_t kMost = int64_t{1} << 31;  // bytes of one matrix
  if (d.rows * d.row_bytes + 16 >= kMost || scale_bytes + 16 >= kMost || p.m * deep * 2 + 16 >= kMost || d.count >= 1 << 16)
    return cudaErrorNotSupported;
  OddArgs a{};
  a.codes = {d.codes, static_cast<uint32_t>(d.row_bytes), static_cast<uint32_t>(d.rows * d.row_bytes)};
  a.scales = {d.scale, static_cast<uint32_t>(d.scale_cols * item_size(d.scale_dtype)), static_cast<uint32_t>(scale_bytes)};
  a.x = {p.x, static_cast<uint32_t>(deep * 2), static_cast<uint32_t>(p.m * deep * 2)};
  a.scale = d.scale, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.outs = static_cast<int32_t>(outs), a.deep = static_cast<int32_t>(deep);
  a.rows = static_cast<int32_t>(d.rows), a.cols = static_cast<int32_t>(d.cols);
  a.block = d.block, a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.out_scale = kInBlocks<FMT> || !d.scale ? 0 : d.scale_rows * d.scale_cols == 1 ? 2 : 1;
  a.x_whole = deep % 8 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  a.scale_batch = scale_bytes, a.stack = d.stack;
  if constexpr (kInNibbles<FMT>) a.book = book_of(d.fmt);
  a.m_chunks = static_cast<int32_t>(ceil_div<int64_t>(p.m, N));
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(deep, S::kDeep));
  const int64_t tiles = ceil_div<int64_t>(outs, S::kOuts) * a.m_chunks;
  if (tiles >= kMost) return cudaErrorNotSupported;
  const int asked = clamp_to(p.splits - 1, 7) + 1;
  a.stages_per_split = ceil_div(a.stages, asked < a.stages ? asked : a.stages);
  const int splits = ceil_div(a.stages, a.stages_per_split), bytes = S::shared_bytes(a.x_whole);
  auto* kernel = &odd_kernel<FMT, E, FORM, N>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, S::shared_bytes(false), &allowed)) return e;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(splits), static_cast<unsigned>(d.count));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = static_cast<unsigned>(splits), cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster, config.numAttrs = splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int FMT, class E, int FORM>
cudaError_t multiply_odd(cudaStream_t stream, const WideProduct& w, const Device& device) {
  if (w.width <= 16) return launch_odd<FMT, E, FORM, 16>(stream, w, device);
  if (w.width <= 64) return launch_odd<FMT, E, FORM, 64>(stream, w, device);
  return launch_odd<FMT, E, FORM, 128>(stream, w, device);
}

}  // namespace eformer

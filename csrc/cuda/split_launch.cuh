// Puts one product on a stream for the kernel of split.cuh, or says that it does not take it.
#pragma once

#include <atomic>

#include "device.h"
#include "kernels.h"
#include "parts.h"
#include "split.cuh"

namespace eformer {

template <int FMT, class E, int NT, int RING, int WARPS>
cudaError_t launch_split(cudaStream_t stream, const Product& p, const Device& device) {
  using S = SplitShape<NT, RING, WARPS>;
  const Matrices& d = p.d;
  const int64_t scale_row = d.scale_cols * item_size(d.scale_dtype), part = d.cols / S::kRanks;
  const uint64_t aligned = reinterpret_cast<uintptr_t>(d.codes) | d.row_bytes | reinterpret_cast<uintptr_t>(p.x) |
                           reinterpret_cast<uintptr_t>(d.scale) | (scale_row / S::kRanks);
  if (d.cols % (S::kRanks * S::kColumns) || part % d.block || scale_row % S::kRanks || aligned % 16) return cudaErrorNotSupported;
  SplitArgs a{};
  while (64 << a.share_log < d.block) ++a.share_log;
  if (64 << a.share_log != d.block) return cudaErrorNotSupported;
  const int clusters = device.multiprocessors / S::kRanks;
  a.tiles = static_cast<int32_t>(ceil_div<int64_t>(d.rows, 16 * clusters));
  a.chunks = static_cast<int32_t>(part / S::kColumns), a.scale_cells = static_cast<int32_t>(scale_row / S::kRanks / 16);
  const int bytes = S::shared_bytes(a.tiles, a.chunks, a.scale_cells);
  if (d.count * ceil_div<int64_t>(d.rows, 16 * a.tiles) > clusters || a.tiles * 16 > d.rows || bytes > device.shared_bytes)
    return cudaErrorNotSupported;
  a.codes = d.codes, a.scale = d.scale, a.x = p.x, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.rows = static_cast<int32_t>(d.rows), a.cols = static_cast<int32_t>(d.cols);
  a.row_bytes = static_cast<int32_t>(d.row_bytes), a.scale_row = static_cast<int32_t>(scale_row);
  a.tiles_magic = magic_of(a.tiles), a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.x_batch = p.m * d.cols, a.stack = d.stack, a.book = book_of(d.fmt), a.rough_book = rough_book();
  auto* kernel = &split_kernel<FMT, E, NT, RING, WARPS>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, device.shared_bytes, &allowed)) return e;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = S::kRanks, cluster[0].val.clusterDim.y = 1, cluster[0].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  const auto groups = static_cast<unsigned>(ceil_div<int64_t>(d.rows, 16 * a.tiles));
  config.gridDim = dim3(groups * S::kRanks, static_cast<unsigned>(d.count)), config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = bytes, config.stream = stream, config.attrs = cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int FMT, class E>
cudaError_t multiply_split(cudaStream_t stream, const Product& p, const Device& device) {
  return p.m > 8 ? launch_split<FMT, E, 2, 2, 8>(stream, p, device) : launch_split<FMT, E, 1, 1, 16>(stream, p, device);
}

}  // namespace eformer

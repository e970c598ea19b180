// Puts one product of codes of 8 bits on a stream for the kernel of tiles.cuh, behind the kernel that rounds x.
#pragma once

#include <atomic>

#include "device.h"
#include "kernels.h"
#include "parts.h"
#include "tiles.cuh"

namespace eformer {

template <int KIND, int FORM, int N>
cudaError_t launch_tiles(cudaStream_t stream, const BytesProduct& p, const Device& device) {
  using S = TilesShape<N>;
  const Matrices& d = p.d;
  const int64_t outs = FORM == kDot ? d.rows : d.cols, deep = FORM == kDot ? d.cols : d.rows;
  if (d.cols % 16 || reinterpret_cast<uintptr_t>(d.codes) % 16 || S::kShared > device.shared_bytes) return cudaErrorNotSupported;
  TilesArgs a{};
  a.w = d.codes, a.x = p.x, a.scale = d.scale, a.x_scale = p.x_scale, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.outs = static_cast<int32_t>(outs), a.deep = static_cast<int32_t>(deep);
  a.y_dtype = p.y_dtype, a.scale_dtype = d.scale_dtype, a.scale_step = d.scale_rows * d.scale_cols > 1;
  a.w_pitch = d.cols, a.w_matrix = d.cols * d.rows, a.x_pitch = p.x_pitch;
  a.scale_matrix = d.scale_rows * d.scale_cols * item_size(d.scale_dtype), a.stack = d.stack;
  a.results = d.count * p.m * outs;
  a.m_tiles = static_cast<int32_t>(ceil_div<int64_t>(p.m, N));
  const int64_t per_matrix = ceil_div<int64_t>(outs, S::kOuts) * a.m_tiles, tiles = per_matrix * d.count;
  const int64_t sum_blocks = ceil_div<int64_t>(outs, 256) * p.m * d.count;
  if (tiles >= int64_t{1} << 31 || sum_blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  a.per_matrix = static_cast<int32_t>(per_matrix);
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(deep, S::kDeep));
  const int asked = p.sums && p.splits > 1 ? p.splits : 1;
  a.stages_per_split = ceil_div(a.stages, asked < a.stages ? asked : a.stages);
  const int splits = ceil_div(a.stages, a.stages_per_split);
  a.sums = splits > 1 ? p.sums : nullptr;
  auto* kernel = &tiles_kernel<KIND, FORM, N>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, S::kShared, &allowed)) return e;
  kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(splits)), kWorkers, S::kShared, stream>>>(a);
  if (splits > 1) tiles_sum_kernel<KIND><<<static_cast<unsigned>(sum_blocks), 256, 0, stream>>>(a, splits);
  return cudaGetLastError();
}

template <int KIND, int FORM>
cudaError_t multiply_tiles(cudaStream_t stream, const BytesProduct& p, const Device& device) {
  if (p.width <= 16) return launch_tiles<KIND, FORM, 16>(stream, p, device);
  if (p.width <= 64) return launch_tiles<KIND, FORM, 64>(stream, p, device);
  return launch_tiles<KIND, FORM, 128>(stream, p, device);
}

}  // namespace eformer

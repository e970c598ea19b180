// Puts one product of codes of 8 bits on a stream, behind the kernel that rounds x.
#pragma once

#include <atomic>

#include "bytes.cuh"
#include "device.h"
#include "kernels.h"
#include "parts.h"
#include "tensor_map.h"

namespace eformer {

template <int KIND, int FORM, int N>
cudaError_t launch_bytes(cudaStream_t stream, const BytesProduct& p, const Device& device) {
  using S = BytesShape<KIND, N>;
  const Matrices& d = p.d;
  const int64_t outs = FORM == kDot ? d.rows : d.cols, deep = FORM == kDot ? d.cols : d.rows;
  BytesArgs a{};
  a.x_scale = p.x_scale, a.scale = d.scale, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.outs = static_cast<int32_t>(outs);
  a.y_dtype = p.y_dtype, a.scale_dtype = d.scale_dtype;
  a.scale_step = d.scale_rows * d.scale_cols > 1;
  a.scale_batch = d.scale_rows * d.scale_cols * item_size(d.scale_dtype), a.stack = d.stack;
  a.m_tiles = static_cast<int32_t>(ceil_div<int64_t>(p.m, N));
  const int64_t per_matrix = ceil_div<int64_t>(outs, S::kOuts) * a.m_tiles;
  if (per_matrix * d.count >= int64_t{1} << 31) return cudaErrorNotSupported;
  a.per_matrix = static_cast<int32_t>(per_matrix), a.tiles = static_cast<int32_t>(per_matrix * d.count);
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(deep, 2 * S::kDeep)) * 2;
  const uint64_t cols = d.cols, rows = d.rows, count = d.count, width = deep, m = p.m, pitch = p.x_pitch, across = outs;
  const Boxes w{d.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, {cols, rows, stored_in(d)}, {cols, cols * rows}, {128, 128, 1}, 128};
  const Boxes x{p.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, {width, m, count}, {pitch, pitch * m}, {128, N, 1}, 128};
  const Boxes y{p.y, CU_TENSOR_MAP_DATA_TYPE_UINT16, {across, m, count}, {across * 2, across * 2 * m}, {64, S::kPass, 1}, 128};
  if (!make_tensor_map(&a.w_map, w) || !make_tensor_map(&a.x_map, x)) return cudaErrorNotSupported;
  a.boxed = p.y_dtype != kF32 && make_tensor_map(&a.y_map, y);
  auto* kernel = &bytes_kernel<KIND, FORM, N>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, S::kShared, &allowed)) return e;
  const int asked = clamp_to(p.splits - 1, 7) + 1;
  a.stages_per_split = ceil_div(a.stages / 2, asked < a.stages / 2 ? asked : a.stages / 2) * 2;
  const int splits = ceil_div(a.stages, a.stages_per_split);
  const int blocks = splits > 1 || a.tiles < device.multiprocessors ? a.tiles : device.multiprocessors;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(splits));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kShared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  // Weights are asked for while x is still being rounded.
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 1, attributes[1].val.clusterDim.y = static_cast<unsigned>(splits);
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes, config.numAttrs = splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int KIND, int FORM>
cudaError_t multiply_bytes(cudaStream_t stream, const BytesProduct& p, const Device& device) {
  if (p.width <= 16) return launch_bytes<KIND, FORM, 16>(stream, p, device);
  if (p.width <= 64) return launch_bytes<KIND, FORM, 64>(stream, p, device);
  if (p.width <= 128) return launch_bytes<KIND, FORM, 128>(stream, p, device);
  return launch_bytes<KIND, FORM, 256>(stream, p, device);
}

}  // namespace eformer

// Puts one product on a stream for the kernel of axpy.cuh, or says that it does not take it.
#pragma once

#include <algorithm>
#include <atomic>

#include "axpy.cuh"
#include "device.h"
#include "kernels.h"
#include "parts.h"

namespace eformer {

template <int NT>
struct AxpyLaunch {
  using S = AxpyShape<NT>;
  static constexpr auto* kKernel = &axpy_kernel<NT>;

  static cudaLaunchConfig_t config_of(cudaStream_t stream, const Product& p, int splits, cudaLaunchAttribute* cluster) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(strips(p)), splits, static_cast<unsigned>(p.d.count));
    config.blockDim = dim3(S::kThreads), config.dynamicSmemBytes = S::kShared, config.stream = stream;
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = cluster->val.clusterDim.z = 1, cluster->val.clusterDim.y = splits;
    config.attrs = cluster, config.numAttrs = splits > 1 ? 1 : 0;
    return config;
  }
  static int64_t strips(const Product& p) { return ceil_div<int64_t>(p.d.cols, 64 * S::kBlocks); }
  static int stages(const Product& p) { return static_cast<int>(ceil_div<int64_t>(p.d.rows, S::kDeep)); }

  // The best number of blocks that share a strip. How many clusters run at once depends on how multiprocessors are
  // grouped, and is asked once per device. A multiprocessor gets 32 bytes per nanosecond.
  static cudaError_t plan(const Product& p, const Device& device, int* splits) {
    static std::atomic<int> at_once[64][kAxpySplits + 1];
    double least = 0;
    for (int s = 1; s <= kAxpySplits && s <= stages(p); ++s) {
      std::atomic<int>& known = at_once[device.id % 64][s];
      int most = s == 1 ? device.multiprocessors : known.load();
      if (most == 0) {
        cudaLaunchAttribute cluster[1];
        const cudaLaunchConfig_t config = config_of(nullptr, p, s, cluster);
        if (cudaError_t e = cudaOccupancyMaxActiveClusters(&most, kKernel, &config)) return e;
        known.store(most = std::max(most, 1));
      }
      const auto waves = static_cast<double>(ceil_div<int64_t>(strips(p) * p.d.count, most));
      const double cost = waves * ((s > 1 ? 3.0 : 2.0) + ceil_div(stages(p), s) * (S::kDeep * S::kBlocks * 36 / 32e3));
      if (s == 1 || cost < least) least = cost, *splits = s;
    }
    return cudaSuccess;
  }

  static cudaError_t launch(cudaStream_t stream, const Product& p, int splits) {
    const Matrices& d = p.d;
    AxpyArgs a{};
    a.codes = d.codes, a.scale = d.scale, a.x = p.x, a.y = static_cast<__nv_bfloat16*>(p.y);
    a.m = static_cast<int32_t>(p.m), a.deep = static_cast<int32_t>(d.rows), a.outs = static_cast<int32_t>(d.cols);
    a.row_bytes = static_cast<int32_t>(d.row_bytes), a.block = d.block;
    a.scale_cols = static_cast<int32_t>(d.scale_cols), a.scale_dtype = d.scale_dtype;
    a.stages = stages(p), a.stages_per_split = ceil_div(a.stages, clamp_to(splits - 1, kAxpySplits - 1) + 1);
    a.factor = d.fmt == 0 ? 1.f / kFineFactor : 1.f, a.book = fine_book_of(d.fmt);
    a.codes_batch = d.row_bytes * d.rows, a.scale_batch = d.scale_rows * d.scale_cols * item_size(d.scale_dtype);
    a.x_batch = p.m * d.rows * 2, a.y_batch = p.m * d.cols, a.stack = d.stack;
    cudaLaunchAttribute cluster[1];
    const cudaLaunchConfig_t config = config_of(stream, p, ceil_div(a.stages, a.stages_per_split), cluster);
    return cudaLaunchKernelEx(&config, kKernel, a);
  }
};

template <int NT>
cudaError_t multiply_axpy(cudaStream_t stream, const Product& p, const Device& device) {
  const uint64_t aligned = reinterpret_cast<uintptr_t>(p.d.codes) | p.d.row_bytes | reinterpret_cast<uintptr_t>(p.x) | p.d.rows * 2;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (aligned % 16 || reinterpret_cast<uintptr_t>(p.y) % 8 || p.d.block % 64 || p.d.offset) return cudaErrorNotSupported;
  if (p.m > NT * 8 || p.d.rows >= kMost || p.d.cols >= kMost || p.d.count > 65535) return cudaErrorNotSupported;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(AxpyLaunch<NT>::kKernel, device, AxpyShape<NT>::kShared, &allowed)) return e;
  int splits = p.splits;
  if (splits < 1) {  // as a rule; tests say how many
    if (cudaError_t e = AxpyLaunch<NT>::plan(p, device, &splits)) return e;
  }
  return AxpyLaunch<NT>::launch(stream, p, splits);
}

}  // namespace eformer

// Which attention kernel takes a cache, and how many blocks share a head.
#include <atomic>

#include "attention.cuh"
#include "device.h"
#include "kernels.h"

namespace eformer {
namespace {

template <int KBITS, int VBITS, int D, int DTYPE, int TILES>
cudaError_t launch(cudaStream_t stream, CacheAttention a, const Device& device) {
  constexpr int kBytes = sizeof(AttentionMemory<KBITS, VBITS, D, DTYPE, TILES>), kFill = 4;
  auto* kernel = &attention_kernel<KBITS, VBITS, D, DTYPE, TILES>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, kBytes, &allowed)) return e;
  // As many blocks as fill the device, of some tiles for every warp.
  a.splits = 1;
  while (device.major >= 9 && a.splits < kMostSplits && 2 * int64_t{a.stack.count} * a.splits <= kFill * device.multiprocessors &&
         a.positions > a.splits * kTokens * kAttentionWarps)
    a.splits *= 2;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.stack.count * a.splits)), config.blockDim = dim3(kAttentionThreads);
  config.dynamicSmemBytes = kBytes, config.stream = stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = static_cast<unsigned>(a.splits), cluster[0].val.clusterDim.y = 1, cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster, config.numAttrs = a.splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int KBITS, int VBITS, int D, int DTYPE>
cudaError_t launch_of_type(cudaStream_t stream, const CacheAttention& a, const Device& device) {
  return a.group <= 8 ? launch<KBITS, VBITS, D, DTYPE, 1>(stream, a, device) : launch<KBITS, VBITS, D, DTYPE, 2>(stream, a, device);
}

template <int KBITS, int VBITS, int D>
cudaError_t launch_of_size(cudaStream_t stream, const CacheAttention& a, const Device& device) {
  if (a.dtype == kF32) return launch_of_type<KBITS, VBITS, D, kF32>(stream, a, device);
  return a.dtype == kBf16 ? launch_of_type<KBITS, VBITS, D, kBf16>(stream, a, device)
                          : launch_of_type<KBITS, VBITS, D, kF16>(stream, a, device);
}

template <int D>
cudaError_t launch_of_kind(cudaStream_t stream, const CacheAttention& a, const Device& device) {
  if (a.value_bits == 8) return a.key_bits == 8 ? launch_of_size<8, 8, D>(stream, a, device) : cudaErrorNotSupported;
  return a.key_bits == 8 ? launch_of_size<8, 4, D>(stream, a, device) : launch_of_size<4, 4, D>(stream, a, device);
}

}  // namespace

cudaError_t attend(cudaStream_t stream, const CacheAttention& a) {
  if (static_cast<int64_t>(a.stack.count) * kMostSplits >= int64_t{1} << 31) return cudaErrorNotSupported;
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  switch (a.padded) {
    case 64:
      return launch_of_kind<64>(stream, a, device);
    case 80:
      return a.key_bits == 8 && a.value_bits == 8 ? launch_of_size<8, 8, 80>(stream, a, device) : cudaErrorNotSupported;
    case 128:
      return launch_of_kind<128>(stream, a, device);
    case 256:
      return launch_of_kind<256>(stream, a, device);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace eformer

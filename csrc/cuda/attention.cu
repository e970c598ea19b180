// Which attention kernel takes a cache, and how many blocks share a head.
#include <algorithm>
#include <array>
#include <atomic>

#include "attention.cuh"
#include "device.h"
#include "kernels.h"

namespace eformer {
namespace {

template <int KBITS, int VBITS, int D, int DTYPE, int TILES>
cudaError_t launch(cudaStream_t stream, CacheAttention a, const Device& device) {
  constexpr int kBytes = sizeof(AttentionMemory<D, TILES>);
  auto* kernel = &attention_kernel<KBITS, VBITS, D, DTYPE, TILES>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, kBytes, &allowed)) return e;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kAttentionThreads), config.dynamicSmemBytes = kBytes, config.stream = stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster;
  const auto cut = [&](int splits) {
    a.splits = splits, cluster[0].val.clusterDim.x = static_cast<unsigned>(splits), config.numAttrs = splits > 1 ? 1 : 0;
    config.gridDim = dim3(static_cast<unsigned>(a.stack.count * splits));
  };
  // Blocks that share a head: as many as run at once, of some tiles for every warp. How many clusters run at once depends on
  // how multiprocessors are grouped, and is asked once.
  static std::array<std::atomic<int>, kMostSplits + 1> at_once{};
  const int enough = ceil_div(a.positions, kTokens * kAttentionWarps);
  int splits = device.major >= 9 ? std::min(kMostSplits, enough) : 1;
  for (; splits > 1; --splits) {
    cut(splits);
    int most = at_once[splits].load();
    if (most == 0) {
      if (cudaError_t e = cudaOccupancyMaxActiveClusters(&most, kernel, &config)) return e;
      at_once[splits].store(most = std::max(most, 1));
    }
    if (a.stack.count <= most) break;
  }
  cut(splits);
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

// What the launching side knows of a device, asked once: a product is launched in microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace eformer {

struct Device {
  int id, shared_bytes, major, multiprocessors;
};
inline cudaError_t current_device(Device* device) {
  static std::mutex mutex;
  static std::vector<Device> known;
  int id = 0;
  if (cudaError_t e = cudaGetDevice(&id)) return e;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Device& d : known) {
    if (d.id == id) return *device = d, cudaSuccess;
  }
  device->id = id;
  if (cudaError_t e = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id)) return e;
  known.push_back(*device);
  return cudaSuccess;
}

// Lets a kernel use so much shared memory, once per device. Setting it again does no harm.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, const Device& device, int bytes, std::atomic<uint64_t>* done) {
  const uint64_t bit = uint64_t{1} << (device.id % 64);
  if (device.id < 64 && (done->load() & bit)) return cudaSuccess;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  done->fetch_or(bit);
  return cudaSuccess;
}

}  // namespace eformer

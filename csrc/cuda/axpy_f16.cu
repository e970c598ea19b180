#include "wide_launch.cuh"

namespace eformer {
cudaError_t multiply_axpy_f16(cudaStream_t stream, const WideProduct& w) {
  return choose_wide_format<__half, kAxpy>(stream, w);
}
}  // namespace eformer

#include "wide_launch.cuh"

namespace eformer {
cudaError_t multiply_axpy_f16(cudaStream_t stream, const WideProduct& w);
cudaError_t multiply_wide_f16(cudaStream_t stream, const WideProduct& w) {
  return w.axpy ? multiply_axpy_f16(stream, w) : choose_wide_format<__half, kDot>(stream, w);
}
}  // namespace eformer

#include "wide_launch.cuh"

namespace eformer {
cudaError_t multiply_axpy_bf16(cudaStream_t stream, const WideProduct& w);
cudaError_t multiply_wide_bf16(cudaStream_t stream, const WideProduct& w) {
  return w.axpy ? multiply_axpy_bf16(stream, w) : choose_wide_format<__nv_bfloat16, kDot>(stream, w);
}
}  // namespace eformer

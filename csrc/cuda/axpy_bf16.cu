#include "wide_launch.cuh"

namespace eformer {
cudaError_t multiply_axpy_bf16(cudaStream_t stream, const WideProduct& w) {
  return choose_wide_format<__nv_bfloat16, kAxpy>(stream, w);
}
}  // namespace eformer

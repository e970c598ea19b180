#include "launch.cuh"

namespace eformer {
cudaError_t multiply_bf16(cudaStream_t stream, const Product& p) { return launch_all<__nv_bfloat16>(stream, p); }
}  // namespace eformer

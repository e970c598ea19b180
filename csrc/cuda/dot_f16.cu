#include "launch.cuh"

namespace eformer {
cudaError_t multiply_f16(cudaStream_t stream, const Product& p) { return launch_all<__half>(stream, p); }
}  // namespace eformer

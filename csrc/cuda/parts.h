// The kernels' launching functions, which are compiled a few formats at a time: they take minutes. See parts.cmake.
#pragma once

#include "device.h"
#include "kernels.h"

namespace eformer {

// How the weights and x meet: y = x @ D.T, or x @ D.
enum Form : int { kDot = 0, kAxpy = 1 };

template <int FMT, class E, int TERMS>
cudaError_t multiply_skinny(cudaStream_t stream, const Product& p, const Device& device);
template <int FMT, class E>
cudaError_t multiply_split(cudaStream_t stream, const Product& p, const Device& device);
template <int FMT, class E>
cudaError_t multiply_dot(cudaStream_t stream, const Product& p, const Device& device);
template <int FMT, class E, int FORM, int TERMS>
cudaError_t multiply_wide(cudaStream_t stream, const WideProduct& w);
template <int FMT, class E, int FORM>
cudaError_t multiply_odd(cudaStream_t stream, const WideProduct& w, const Device& device);
template <int NT>
cudaError_t multiply_axpy(cudaStream_t stream, const Product& p, const Device& device);
template <int KIND, int FORM>
cudaError_t multiply_bytes(cudaStream_t stream, const BytesProduct& p, const Device& device);
template <int KIND, int FORM>
cudaError_t multiply_tiles(cudaStream_t stream, const BytesProduct& p, const Device& device);

}  // namespace eformer

// Descriptions of matrices for the copy engine of Hopper and later. The driver's encoder is looked up at run time, so
// that the library loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace eformer {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 13000
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found)) return nullptr;
#else
  if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found)) return nullptr;
#endif
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

struct Boxes {
  const void* base;
  CUtensorMapDataType type;
  uint64_t sizes[3], pitches[2];  // in elements; in bytes, of the second and third axis
  uint32_t box[3];
  int swizzle;  // 16-byte chunks of rows of 128 (or, said so, 64 or 32) bytes change places with the row number
};

inline CUtensorMapSwizzle swizzle_of(int swizzle) {
  return swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
       : swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// What lies outside is read as zeros. Returns false where the engine cannot take the array.
inline bool make_tensor_map(CUtensorMap* map, const Boxes& b) {
  static const EncodeTiled encode = find_encoder();
  if (!encode || b.pitches[0] % 16 || b.pitches[1] % 16 || reinterpret_cast<uintptr_t>(b.base) % 16) return false;
  const cuuint64_t sizes[3] = {b.sizes[0], b.sizes[1], b.sizes[2]}, pitches[2] = {b.pitches[0], b.pitches[1]};
  const cuuint32_t box[3] = {b.box[0], b.box[1], b.box[2]}, steps[3] = {1, 1, 1};
  return encode(map, b.type, 3, const_cast<void*>(b.base), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle_of(b.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace eformer

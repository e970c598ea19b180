// Matrix instructions for operands of 8 bits that are not Hopper's alone: 16 outs of W times 8 rows of x, 32 columns deep.
// All GPUs from 8.0 on multiply integers so, 8.9 and 12.0 also e4m3. On 9.0, where tests run them, and on 10.x the compiler
// makes products of e4m3 of conversions to f16, which holds them, and of products of that; before 8.9 tiles.cuh does so.
#pragma once

#include "common.cuh"

namespace eformer {

// Compilers know products of e4m3 from CUDA 12.4 on.
#if __CUDA_ARCH__ >= 890 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 4))
#define EFORMER_HAS_FLOAT8_MMA 1
#else
#define EFORMER_HAS_FLOAT8_MMA 0
#endif

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups of copies of this thread but the last COUNT are complete.
template <int COUNT>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

__device__ __forceinline__ void mma_int8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#if EFORMER_HAS_FLOAT8_MMA
__device__ __forceinline__ void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

}  // namespace eformer

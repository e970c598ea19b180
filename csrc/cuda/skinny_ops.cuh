// Instructions that skinny.cuh needs by name.
#pragma once

#include "common.cuh"

namespace eformer {

// x: volatile, so that it is asked for where the source says so, before the block waits for anything.
__device__ __forceinline__ void load_x16(uint32_t* r, const uint8_t* p) {
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void load_x8(uint32_t* r, const uint8_t* p) {
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void prefetch(const uint8_t* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

__device__ __forceinline__ void load_matrix_pair(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_shared4(float& a, float& b, float& c, float& d, uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(address));
}
__device__ __forceinline__ void store_shared4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// The one with the larger magnitude, with any sign; NaN if one is.
__device__ __forceinline__ uint32_t larger_bf16(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// For COUNT threads of a block, which know each other by a number from 1 to 15.
template <int COUNT>
__device__ __forceinline__ void some_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}

// Copies started since the last call are complete, one after the other, before those started later.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace eformer

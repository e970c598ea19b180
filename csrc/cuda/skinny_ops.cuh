// Instructions that skinny.cuh needs by name.
#pragma once

#include "decode.cuh"

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

// A row of a chunk of x, of which four lanes have a part each, from bf16 to f16: times a power of two that brings its largest
// value to 2^14. `back` undoes that for columns 2t and 2t + 1 of sums, lane t being one of the four.
template <int COUNT>
__device__ __forceinline__ void to_half(uint32_t (&x)[COUNT], int t, float (&back)[2]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) most = larger_bf16(most, x[i]);
  most = max(most & 0x7FFFu, most >> 16 & 0x7FFFu);
#pragma unroll
  for (int d = 1; d < 4; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
  const int power = min(141 - static_cast<int>(most >> 7), 126);
  const uint32_t factor = (127 + power) * 0x00800080u;  // in bf16, twice
  const float inverse = __int_as_float((127 - power) << 23);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint32_t v = Pair<__nv_bfloat16>::mul(x[i], factor);
    x[i] = Pair<__half>::pack(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) back[e] = __shfl_sync(~0u, inverse, (2 * t + e) * 4);
}

// Copies started since the last call are complete, one after the other, before those started later.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace eformer

// What every kernel shares: formats and element types, asynchronous copies, fragment loads, matrix instructions.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels.h"

namespace eformer {

// Ways to decode. Formats of 4 bits differ in their 16 values; those of kCode4 (int4, iq4_nl, fp4) are exact in 16-bit
// floats. The fine ones are for blocks that are a multiple of 32, but not of 64. kShift4 and kShift8 are integers whose
// blocks have an offset, kBias4 those of 4 bits with values and scales multiplied in float32 (wide.cuh).
enum Fmt : int {
  kNf4, kInt8, kTernary, kBinary, kCode4, kE4m3, kE5m2, kNf4Fine, kCode4Fine, kInt8Block, kE4m3Block, kInt2, kInt3, kInt5, kInt6,
  kShift4, kShift4Fine, kBias4, kShift8
};
enum Dtype : int { kF32 = 0, kBf16 = 1, kF16 = 2, kU8 = 3 };

// Warps of a block that multiply; the others bring data in.
constexpr int kWarps = 8;
constexpr int kWorkers = kWarps * 32;

template <int FMT>
constexpr bool kIsNf4 = FMT == kNf4 || FMT == kNf4Fine;
template <int FMT>
constexpr bool kShifted = FMT == kShift4 || FMT == kShift4Fine || FMT == kBias4 || FMT == kShift8;  // every block has an offset
template <int FMT>
constexpr bool kInNibbles = kIsNf4<FMT> || FMT == kCode4 || FMT == kCode4Fine || (kShifted<FMT> && FMT != kShift8);
template <int FMT>
constexpr bool kInFloat32 = FMT == kNf4 || FMT == kBias4;  // values times scales, in wide.cuh
template <int FMT>
constexpr bool kInByteBlocks = FMT == kInt8Block || FMT == kE4m3Block || FMT == kShift8;
template <int FMT>
constexpr int kPlain = FMT == kInt8Block || FMT == kShift8 ? kInt8 : FMT == kE4m3Block ? kE4m3 : FMT;  // how a value alone is decoded
template <int FMT>
constexpr bool kInBytes = FMT == kInt8 || FMT == kE4m3 || FMT == kE5m2 || kInByteBlocks<FMT>;
// Has every block of columns a scale?
template <int FMT>
constexpr bool kInBlocks = kInNibbles<FMT> || kInByteBlocks<FMT>;
// Columns that share a scale, at least.
template <int FMT>
constexpr int kGroup = FMT == kNf4 || FMT == kCode4 || FMT == kShift4 || FMT == kBias4 ? 64 : 32;
// Bits of a value of the integers that are decoded alone (rows.cu): a row of bits, the first value first, its high bit first.
template <int FMT>
constexpr int kIntegerBits = FMT == kInt2 ? 2 : FMT == kInt3 ? 3 : FMT == kInt5 ? 5 : FMT == kInt6 ? 6 : 0;
// Values in a stored byte, and in 16 of them.
template <int FMT>
constexpr int kPerByte = kInNibbles<FMT> ? 2 : kInBytes<FMT> ? 1 : FMT == kTernary ? 4 : 8;
template <int FMT>
constexpr int kPerChunk = 16 * kPerByte<FMT>;

__host__ __device__ constexpr int item_size(int dtype) { return dtype == kF32 ? 4 : dtype == kU8 ? 1 : 2; }
__host__ __device__ constexpr int clamp_to(int value, int top) { return value < 0 ? 0 : value > top ? top : value; }
template <class A>
__host__ __device__ constexpr A ceil_div(A a, A b) {
  return (a + b - 1) / b;
}

// 2^31 / divisor, rounded up: __umulhi(2 * n, magic_of(divisor)) is n / divisor while n * divisor is below 2^31.
inline uint32_t magic_of(int64_t divisor) { return static_cast<uint32_t>(((int64_t{1} << 31) + divisor - 1) / divisor); }

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies that zero what lies behind `valid` bytes.
__device__ __forceinline__ void copy_async16(uint32_t dst, const void* src, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid) : "memory");
}
__device__ __forceinline__ void copy_async16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_async4(uint32_t dst, const void* src, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid) : "memory");
}
// 16, 8 or 4 bytes.
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src, int bytes) {
  if (bytes == 16) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
  } else if (bytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
  }
}
#if __CUDA_ARCH__ >= 900
// A box of an array, copied by an engine of its own, which costs the load/store unit nothing. `barrier` counts bytes.
__device__ __forceinline__ void copy_box(uint32_t dst, const CUtensorMap* map, int byte, int row, int matrix,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          dst),
      "l"(map), "r"(byte), "r"(row), "r"(matrix), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(bytes)
               : "memory");
}
#endif
// What this thread has done in shared memory comes before bulk copies into it that are started behind the next barrier.
__device__ __forceinline__ void order_before_bulk_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Barriers in shared memory, through which loading and multiplying warps hand stages to each other.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives when the asynchronous copies this thread has started are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
  }
}
// For the multiplying warps alone.
__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// 16 bytes into shared memory, of which `valid` exist at `src`, in steps of the alignment `unit` (16, 4, 2 or 1).
__device__ __forceinline__ void copy_chunk(uint8_t* dst, const uint8_t* src, int valid, int unit) {
  if (unit == 16) {
    copy_async16(shared_address(dst), src, valid);
  } else if (unit == 4) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) copy_async4(shared_address(dst) + i, src + (valid > i ? i : 0), clamp_to(valid - i, 4));
  } else {
    for (int i = 0; i < 16; ++i) dst[i] = i < valid ? src[i] : 0;
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c += a * b for a 16x16 tile of weights and a 16x8 tile of activations.
template <class E>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float load_float(const void* p, int64_t i, int dtype) {
  if (dtype == kF32) return static_cast<const float*>(p)[i];
  if (dtype == kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}
// A line of 128 bytes into the cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// What values have beyond (code - centre) * scale.
__device__ __forceinline__ float offset_of(const void* p, int64_t i, int dtype, float centre, float scale) {
  if (dtype == kU8) return (centre - static_cast<float>(static_cast<const uint8_t*>(p)[i])) * scale;
  return fmaf(centre, scale, load_float(p, i, dtype));
}
__device__ __forceinline__ void store_float(void* p, int64_t i, int dtype, float v) {
  if (dtype == kF32) {
    static_cast<float*>(p)[i] = v;
  } else if (dtype == kBf16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(v);
  } else {
    static_cast<__half*>(p)[i] = __float2half(v);
  }
}

// Two neighbours, the first at an even place.
__device__ __forceinline__ void store_two(void* p, int64_t i, int dtype, float v0, float v1) {
  if (dtype == kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p) + i) = make_float2(v0, v1);
  } else if (dtype == kBf16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p) + i) = __floats2bfloat162_rn(v0, v1);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(p) + i) = __floats2half2_rn(v0, v1);
  }
}

// A kernel that may start before the one in front of it has ended calls this before it reads anything.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The number of the first matrix. Ask early: whatever is fetched of the matrices waits for it.
__device__ __forceinline__ int first_matrix(const Stack& stack) {
  return stack.index ? min(max(__ldg(stack.index), 0), stack.groups - 1) * stack.count : 0;
}

}  // namespace eformer

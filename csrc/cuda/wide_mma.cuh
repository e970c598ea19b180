// Hopper's matrix instruction of a warpgroup, and what blocks of a cluster say to each other. Needs sm_90a.
#pragma once

#include "common.cuh"

namespace eformer {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EFORMER_HAS_WGMMA 1
#else
#define EFORMER_HAS_WGMMA 0
#endif

template <class E>
constexpr int item_kind = kBf16;
template <>
constexpr int item_kind<__half> = kF16;

#if EFORMER_HAS_WGMMA

#define EFORMER_F4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EFORMER_F16(c, i) EFORMER_F4(c, i), EFORMER_F4(c, i + 4), EFORMER_F4(c, i + 8), EFORMER_F4(c, i + 12)
#define EFORMER_F32(c, i) EFORMER_F16(c, i), EFORMER_F16(c, i + 16)
#define EFORMER_F64(c, i) EFORMER_F32(c, i), EFORMER_F32(c, i + 32)
#define EFORMER_F128(c, i) EFORMER_F64(c, i), EFORMER_F64(c, i + 64)
#define EFORMER_WGMMA_16(TYPE) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" \
               "%0,%1,%2,%3,%4,%5,%6,%7" \
               "}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }" \
               : EFORMER_F4(c, 0), EFORMER_F4(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define EFORMER_WGMMA_32(TYPE) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
               "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }" \
               : EFORMER_F16(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define EFORMER_WGMMA_64(TYPE) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
               "%26,%27,%28,%29,%30,%31" \
               "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }" \
               : EFORMER_F32(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define EFORMER_WGMMA_128(TYPE) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
               "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" \
               "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0; }" \
               : EFORMER_F64(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define EFORMER_WGMMA_256(TYPE) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
               "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73," \
               "%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97," \
               "%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
               "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127" \
               "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0; }" \
               : EFORMER_F128(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c += a * b: 64 rows of weights in registers times a tile of N rows of x in shared memory, 16 columns deep.
template <class E, int N>
__device__ __forceinline__ void wgmma(float (&c)[N / 2], const uint32_t* a, uint64_t b) {
  constexpr bool kBf = item_kind<E> == kBf16;
  if constexpr (N == 16) {
    if constexpr (kBf) EFORMER_WGMMA_16("bf16"); else EFORMER_WGMMA_16("f16");
  } else if constexpr (N == 32) {
    if constexpr (kBf) EFORMER_WGMMA_32("bf16"); else EFORMER_WGMMA_32("f16");
  } else if constexpr (N == 64) {
    if constexpr (kBf) EFORMER_WGMMA_64("bf16"); else EFORMER_WGMMA_64("f16");
  } else if constexpr (N == 128) {
    if constexpr (kBf) EFORMER_WGMMA_128("bf16"); else EFORMER_WGMMA_128("f16");
  } else {
    static_assert(N == 256, "no such tile");
    if constexpr (kBf) EFORMER_WGMMA_256("bf16"); else EFORMER_WGMMA_256("f16");
  }
}
// Registers written before this are seen by matrix instructions behind it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last `LEFT` groups are done.
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// x in boxes of 64 columns (128 bytes), whose 16-byte chunks change places with the row: 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t describe_x(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// All threads of all blocks of the cluster; what they wrote is seen behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float4 load_from_block(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void barriers_visible_to_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
#endif

}  // namespace eformer

// Hopper's matrix instruction for operands of 8 bits: 64 outs of W times N rows of x, 32 columns deep. Needs sm_90a.
#pragma once

#include <type_traits>

#include "bytes_lanes.cuh"
#include "wide_mma.cuh"

namespace eformer {

#if EFORMER_HAS_WGMMA

// Lists of registers, each the one before and more.
#define EFORMER_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define EFORMER_R16 EFORMER_R8 "," \
  "%8,%9,%10,%11,%12,%13,%14,%15"
#define EFORMER_R32 EFORMER_R16 "," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define EFORMER_R64 EFORMER_R32 "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define EFORMER_R128 EFORMER_R64 "," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
  "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define EFORMER_S4(T, c, i) T(c[i]), T(c[i + 1]), T(c[i + 2]), T(c[i + 3])
#define EFORMER_S8(T, c, i) EFORMER_S4(T, c, i), EFORMER_S4(T, c, i + 4)
#define EFORMER_S16(T, c, i) EFORMER_S8(T, c, i), EFORMER_S8(T, c, i + 8)
#define EFORMER_S32(T, c, i) EFORMER_S16(T, c, i), EFORMER_S16(T, c, i + 16)
#define EFORMER_S64(T, c, i) EFORMER_S32(T, c, i), EFORMER_S32(T, c, i + 32)
#define EFORMER_S128(T, c, i) EFORMER_S64(T, c, i), EFORMER_S64(T, c, i + 64)

// `keep` is 0 where the sums begin. TYPES and END differ between integers and floats; what is behind the COUNT sums in
// the list of operands is numbered by hand.
#define EFORMER_BYTES_RA(N, COUNT, TYPES, END, T, A0, A1, A2, A3, B, KEEP) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" KEEP ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" \
               EFORMER_R##COUNT "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p" END "; }" \
               : EFORMER_S##COUNT(T, c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))
#define EFORMER_BYTES_SA(N, COUNT, TYPES, END, T, A, B, KEEP) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" KEEP ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" \
               EFORMER_R##COUNT "}, %" A ", %" B ", p" END "; }" \
               : EFORMER_S##COUNT(T, c, 0) : "l"(a), "l"(b), "r"(keep))
template <int KIND>
using SumOf = std::conditional_t<KIND == kInt8, int, float>;

#define EFORMER_BYTES_BOTH(SIZE, WHAT, COUNT, ...) \
  if constexpr (N == SIZE) { \
    if constexpr (KIND == kInt8) { \
      WHAT(SIZE, COUNT, "s32.s8.s8", "", "+r", __VA_ARGS__); \
    } else { \
      WHAT(SIZE, COUNT, "f32.e4m3.e4m3", ", 1, 1", "+f", __VA_ARGS__); \
    } \
  }

// c = a * b, or c += a * b with `keep`: a in registers, or in shared memory as b is.
template <int KIND, int N>
__device__ __forceinline__ void wgmma_bytes(SumOf<KIND> (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, int keep) {
  EFORMER_BYTES_BOTH(16, EFORMER_BYTES_RA, 8, "8", "9", "10", "11", "12", "13")
  EFORMER_BYTES_BOTH(64, EFORMER_BYTES_RA, 32, "32", "33", "34", "35", "36", "37")
  EFORMER_BYTES_BOTH(128, EFORMER_BYTES_RA, 64, "64", "65", "66", "67", "68", "69")
  EFORMER_BYTES_BOTH(256, EFORMER_BYTES_RA, 128, "128", "129", "130", "131", "132", "133")
}
template <int KIND, int N>
__device__ __forceinline__ void wgmma_bytes(SumOf<KIND> (&c)[N / 2], uint64_t a, uint64_t b, int keep) {
  EFORMER_BYTES_BOTH(16, EFORMER_BYTES_SA, 8, "8", "9", "10")
  EFORMER_BYTES_BOTH(64, EFORMER_BYTES_SA, 32, "32", "33", "34")
  EFORMER_BYTES_BOTH(128, EFORMER_BYTES_SA, 64, "64", "65", "66")
  EFORMER_BYTES_BOTH(256, EFORMER_BYTES_SA, 128, "128", "129", "130")
}

__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// A box of shared memory into an array; what lies outside of it is not written.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t src, int column, int row, int matrix) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
               "r"(column), "r"(row), "r"(matrix)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// The boxes this thread has stored have been read.
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#endif

}  // namespace eformer

// Weights of 8 bits whose outs are neighbours (axpy form), on their way from shared memory to the matrix unit.
#pragma once

#include "common.cuh"

namespace eformer {

// Four 8x8 matrices of pairs of bytes, transposed on the way: a thread gets pairs out of neighbouring rows.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The left operand of an instruction, 16 outs x 32 columns, out of rows (columns of W) of 128 outs, whose chunks of 16 bytes
// have changed places with the row number. A thread gets two neighbouring outs and, per register, four neighbours along the
// depth. Eight rows that are loaded together lie in different banks.
struct AcrossLanes {
  uint32_t row, select_even, select_odd;
  __device__ __forceinline__ void start(int lane) {
    const int matrix = lane / 8, r = lane % 8, t = r / 2;  // matrix: halves of 16 rows, and which two rows of four
    const bool swapped = t == 1 || t == 2;
    const int upper = (matrix % 2) != static_cast<int>(swapped);
    row = matrix / 2 * 16 + t * 4 + upper * 2 + r % 2;
    const bool mine = lane % 4 == 1 || lane % 4 == 2;  // whose two words come the other way round
    select_even = mine ? 0x2064 : 0x6420, select_odd = mine ? 0x3175 : 0x7531;
  }
  // Outs 16 * chunk and on, from column 32 * k of those at w on.
  __device__ __forceinline__ void load(uint32_t (&frag)[4], uint32_t w, int k, int chunk) const {
    uint32_t r[4];
    load_transposed(r, w + (k * 32 + row) * 128 + ((chunk ^ (row & 7)) << 4));
    frag[0] = __byte_perm(r[0], r[1], select_even), frag[1] = __byte_perm(r[0], r[1], select_odd);
    frag[2] = __byte_perm(r[2], r[3], select_even), frag[3] = __byte_perm(r[2], r[3], select_odd);
  }
};

}  // namespace eformer

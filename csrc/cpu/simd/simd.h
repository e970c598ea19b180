// The vectors of the instruction set this file is compiled for. The three headers define the same names:
// F and I, vectors of `lanes` floats and of as many 32-bit words; Table16 and Table4, lookups by bits of a word.
#pragma once

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "generic.h"
#endif

namespace eformer::EFORMER_ISA {

// Computes v at this place of the program: left alone, GCC moves lookups far ahead and runs out of registers.
template <class V>
INLINE void keep_here([[maybe_unused]] V& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#endif
}

}  // namespace eformer::EFORMER_ISA

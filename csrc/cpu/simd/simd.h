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

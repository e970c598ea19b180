// The kernels of one instruction set, and which of them this machine can run.
#pragma once

#include <cstdint>

#include "problem.h"
#include "runtime.h"

namespace eformer {

enum Isa : int64_t { isa_none = 0, isa_avx2 = 1, isa_avx512 = 2, isa_avx512_bf16 = 3, isa_amx = 4, isa_neon = 10 };

struct Kernels {
  void (*matmul)(const Product&, Runtime&);
  void (*gather)(const Gather&, Runtime&);
  void (*encode)(const Encode&, Runtime&);
  void (*byte_matmul)(const ByteProduct&, Runtime&);
};

// The best instruction set of this machine that was compiled in.
int64_t best_isa();
// The kernels of `isa`, or null when this machine cannot run them; -1 stands for the best.
const Kernels* kernels_of(int64_t isa);

}  // namespace eformer

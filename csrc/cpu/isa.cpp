#include "kernels.h"

#if defined(EFORMER_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Each is defined by kernels.cpp compiled with the flags of its instruction set (see CMakeLists.txt).
namespace eformer {
#if defined(EFORMER_X86)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
#if defined(EFORMER_AMX)
namespace amx { extern const Kernels kernels; }
#endif
#elif defined(EFORMER_ARM64)
namespace neon { extern const Kernels kernels; }
#endif

namespace {

#if defined(EFORMER_AMX)
// The tiles are 8 KiB of registers per thread; Linux hands them out to processes that ask.
bool amx_granted() {
  unsigned a, b, c, d;
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25, all = amx_bf16 | amx_tile | amx_int8;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

int64_t detect() {
#if defined(EFORMER_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return isa_none;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return isa_avx2;
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni") ||
      !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("gfni"))
    return isa_avx512;
#if defined(EFORMER_AMX)
  if (amx_granted()) return isa_amx;
#endif
  return isa_avx512_bf16;
#elif defined(EFORMER_ARM64)
  return isa_neon;
#else
  return isa_none;
#endif
}

}  // namespace

int64_t best_isa() {
  static const int64_t best = detect();
  return best;
}

const Kernels* kernels_of(int64_t isa) {
  const int64_t best = best_isa();
  if (isa == -1) isa = best;
  if (isa > best || isa == isa_none) return nullptr;
  switch (isa) {
#if defined(EFORMER_X86)
    case isa_avx2: return &avx2::kernels;
    case isa_avx512: return &avx512::kernels;
    case isa_avx512_bf16: return &avx512_bf16::kernels;
#if defined(EFORMER_AMX)
    case isa_amx: return &amx::kernels;
#endif
#elif defined(EFORMER_ARM64)
    case isa_neon: return &neon::kernels;
#endif
    default: return nullptr;
  }
}

}  // namespace eformer

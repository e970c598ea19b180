// Products whose x is rounded to 8 bits. Compiled once per instruction set, like kernels.cpp.
#if defined(__AMX_INT8__)
#include "byte_engine_amx.h"
#include "byte_tiles_amx.h"
#endif
#include "byte_gemm.h"
#include "byte_small_axpy.h"
#include "byte_small_dot.h"
#include "kernels.h"

namespace eformer::EFORMER_ISA {
namespace {

// Rows of x taken at once: on tiles few enough for x to stay in the second cache.
#if defined(__AMX_INT8__)
constexpr int64_t rows_at_once = 256;
#else
constexpr int64_t rows_at_once = gemm_rows;
#endif

template <Format format, Form form, int parts = 1>
void panels(const ByteProduct& p, Runtime& runtime) {
#if defined(__AMX_INT8__)
  if constexpr (form == Form::dot) return ByteTileDot<format, parts>::run(p, runtime);
  if constexpr (form == Form::axpy) return ByteGemm<ByteTileEngine, format, form, parts>::run(p, runtime);
#endif
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
  if constexpr (form == Form::dot) return ByteGemm<ByteCodeEngine, format, form, parts>::run(p, runtime);
#endif
  ByteGemm<BytePanelEngine, format, form, parts>::run(p, runtime);
}

template <Format format, int parts = 1>
void dot(const ByteProduct& p, Runtime& runtime) {
  using Small = ByteSmallDot<format, parts>;
  if (Small::takes(p)) return Small::run(p, runtime);
  panels<format, Form::dot, parts>(p, runtime);
}

void axpy(const ByteProduct& p, Runtime& runtime) {
  if (ByteSmallAxpy::takes(p)) return ByteSmallAxpy::run(p, runtime);
  panels<Format::int8, Form::axpy>(p, runtime);
}

void some_rows(const ByteProduct& p, Runtime& runtime) {
  if (p.form == Form::axpy) return axpy(p, runtime);
  switch (p.d.format) {
    case Format::nf4: return p.d.table ? dot<Format::nf4>(p, runtime) : dot<Format::nf4, 2>(p, runtime);
    case Format::int8: return dot<Format::int8>(p, runtime);
    case Format::ternary: return dot<Format::ternary>(p, runtime);
    case Format::binary: return dot<Format::binary>(p, runtime);
    case Format::int8_block: return dot<Format::int8_block>(p, runtime);
    default: return;  // see has_byte_product
  }
}

}  // namespace

void byte_matmul(const ByteProduct& p, Runtime& runtime) {
  if (p.k() == 0) std::memset(p.y, 0, p.m * p.n() * size_of(p.y_type));
  if (p.m == 0 || p.n() == 0 || p.k() == 0) return;
  for (int64_t m0 = 0; m0 < p.m; m0 += rows_at_once) {
    ByteProduct part = p;
    part.m = min(rows_at_once, p.m - m0);
    part.x = static_cast<const std::byte*>(p.x) + m0 * p.k() * size_of(p.x_type);
    part.y = static_cast<std::byte*>(p.y) + m0 * p.n() * size_of(p.y_type);
    if (p.x_scale) part.x_scale += m0;
    some_rows(part, runtime);
  }
}

}  // namespace eformer::EFORMER_ISA

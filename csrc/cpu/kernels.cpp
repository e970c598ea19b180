// Compiled once per instruction set, with EFORMER_ISA naming its namespace.
#include "kernels.h"

#if defined(__AMX_BF16__)
#include "engine_amx.h"
#include "tile_dot.h"
#endif
#include "engine_fma.h"
#include "encode.h"
#include "fp8.h"
#include "gather.h"
#include "gemm.h"
#include "plain.h"
#include "scalar.h"
#include "small_axpy.h"
#include "small_dot.h"
#include "table.h"
#include "wide_nf4.h"

namespace eformer::EFORMER_ISA {

void byte_matmul(const ByteProduct& p, Runtime& runtime);  // see byte_kernels.cpp

namespace {

template <class Engine, Format format>
void panels(const Product& p, Runtime& runtime) {
  p.form == Form::dot ? Gemm<Engine, format, Form::dot>::run(p, runtime) : Gemm<Engine, format, Form::axpy>::run(p, runtime);
}

// Whether x enters the product as the bf16 values it holds, without a scale folded into it.
[[maybe_unused]] bool exact_bf16(const Product& p) {
  const bool folded = !blocked(p.d.format) && (p.form == Form::dot ? p.d.scale.col_stride : p.d.scale.row_stride);
  return p.x_type == Type::bf16 && !folded;
}

#if defined(__AMX_BF16__)
// Three parts of a few rows of x fit one tile side by side.
template <Format format, class Row>
bool by_tiles(const Product& p, Runtime& runtime) {
  constexpr int64_t few = 5;
  const bool exact = exact_bf16(p);
  if (!TileDot<format, Row, 1>::takes(p)) return false;
  exact || p.m <= few ? TileDot<format, Row, 1>::run(p, runtime, exact) : TileDot<format, Row, 3>::run(p, runtime, exact);
  return true;
}

// Products of parts per value: 1, 3 where x is float32, twice that for NF4. Beyond the rows of one tile, panels of whole rows
// of D are as quick, and quicker where x is bf16.
constexpr int64_t tile_rows = 16;
template <Format format>
bool on_amx(const Product& p, Runtime& runtime) {
  if constexpr (format == Format::nf4) {
    if (p.d.table) return by_tiles<format, NibbleRow<1>>(p, runtime);
    constexpr int64_t rows_that_pay = 8, rows_of_axpy = 20;
    if (exact_bf16(p) && p.m > (p.form == Form::dot ? tile_rows : rows_of_axpy) && moderate(p, true))
      return panels<AmxEngine<1, 3>, format>(p, runtime), true;
    return (exact_bf16(p) || p.m >= rows_that_pay) && by_tiles<format, NibbleRow<3>>(p, runtime);
  } else if constexpr (blocked(format)) {
    return by_tiles<format, TileRow<format>>(p, runtime);
  } else {
    if constexpr (per_byte(format) == 1) {
      if (p.m <= tile_rows && by_tiles<format, TileRow<format>>(p, runtime)) return true;
    }
    exact_bf16(p) ? panels<AmxEngine<1, 1>, format>(p, runtime) : panels<AmxEngine<3, 1>, format>(p, runtime);
    return true;
  }
}
#endif

template <Format format>
void product(const Product& p, Runtime& runtime) {
  if constexpr (Table<format, Form::dot>::possible) {
    if (Table<format, Form::dot>::takes(p)) return Table<format, Form::dot>::run(p, runtime);
  }
  if constexpr (Table<format, Form::axpy>::possible) {
    if (Table<format, Form::axpy>::takes(p)) return Table<format, Form::axpy>::run(p, runtime);
  }
  if constexpr (format == Format::nf4) {
    using Wide = SmallDot<WideNf4, 4>;
    if (Wide::takes(p)) return Wide::run(p, runtime);
  }
  if constexpr (format == Format::int8_block) {
    using Whole = SmallDot<WholeInt8, 4>;
    if (Whole::takes(p)) return Whole::run(p, runtime);
  }
  using Narrow = SmallDot<Decoder<format>, 4>;
  if (Narrow::takes(p)) return Narrow::run(p, runtime);
  if (SmallAxpy<format>::takes(p)) return SmallAxpy<format>::run(p, runtime);
#if defined(__AMX_BF16__)
  if (on_amx<format>(p, runtime)) return;
#endif
  panels<FmaEngine, format>(p, runtime);
}

// At most gemm_rows rows of x.
void some_rows(const Product& p, Runtime& runtime) {
  if (!blocked(p.d.format) && p.d.scale.row_stride && p.d.scale.col_stride) return plain(p, runtime);
  switch (p.d.format) {
    case Format::nf4: return product<Format::nf4>(p, runtime);
    case Format::int8: return product<Format::int8>(p, runtime);
    case Format::ternary: return product<Format::ternary>(p, runtime);
    case Format::binary: return product<Format::binary>(p, runtime);
    case Format::int8_block: return product<Format::int8_block>(p, runtime);
    case Format::fp8_e4m3: return product<Format::fp8_e4m3>(p, runtime);
    case Format::fp8_e5m2: return product<Format::fp8_e5m2>(p, runtime);
    case Format::fp8_e4m3_block: return product<Format::fp8_e4m3_block>(p, runtime);
    case Format::fp8_e5m2_block: return product<Format::fp8_e5m2_block>(p, runtime);
    default: return;  // stands for one of these: see check_codes
  }
}

void matmul(const Product& p, Runtime& runtime) {
  if (p.k() == 0) std::memset(p.y, 0, p.m * p.n() * size_of(p.y_type));
  if (p.m == 0 || p.n() == 0 || p.k() == 0) return;
  for (int64_t m0 = 0; m0 < p.m; m0 += gemm_rows) {
    Product part = p;
    part.m = min(gemm_rows, p.m - m0);
    part.x = static_cast<const std::byte*>(p.x) + m0 * p.k() * size_of(p.x_type);
    part.y = static_cast<std::byte*>(p.y) + m0 * p.n() * size_of(p.y_type);
    some_rows(part, runtime);
  }
}

void gather(const Gather& g, Runtime& runtime) {
  switch (g.d.format) {
    case Format::nf4: return RowGather<Format::nf4>::run(g, runtime);
    case Format::int8: return RowGather<Format::int8>::run(g, runtime);
    case Format::ternary: return RowGather<Format::ternary>::run(g, runtime);
    case Format::binary: return RowGather<Format::binary>::run(g, runtime);
    case Format::int8_block: return RowGather<Format::int8_block>::run(g, runtime);
    case Format::fp8_e4m3: return RowGather<Format::fp8_e4m3>::run(g, runtime);
    case Format::fp8_e5m2: return RowGather<Format::fp8_e5m2>::run(g, runtime);
    case Format::fp8_e4m3_block: return RowGather<Format::fp8_e4m3_block>::run(g, runtime);
    case Format::fp8_e5m2_block: return RowGather<Format::fp8_e5m2_block>::run(g, runtime);
    default: return;
  }
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {matmul, gather, Nf4Encoder::run, byte_matmul};

}  // namespace eformer::EFORMER_ISA

// Rows of floats in any of the three types: to f32, from f32.
#pragma once

#include "problem.h"
#include "scalar.h"
#include "simd/simd.h"

namespace eformer::EFORMER_ISA {

// to[i] = from[first + i] for `count` values, times factor[i] unless that is null.
[[gnu::noinline]] inline void read_row(const void* from, Type type, int64_t first, int64_t count, const float* factor, float* to) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    F v;
    switch (type) {
      case Type::f32: v = load(static_cast<const float*>(from) + first + i); break;
      case Type::bf16: v = load_bf16(static_cast<const uint16_t*>(from) + first + i); break;
      case Type::f16: v = load_f16(static_cast<const uint16_t*>(from) + first + i); break;
      default: __builtin_unreachable();
    }
    store(to + i, factor ? mul(v, load(factor + i)) : v);
  }
  for (; i < count; ++i) to[i] = load_as_f32(from, type, first + i) * (factor ? factor[i] : 1);
}

// to[first + i] = from[i] * (factor ? factor[i] : 1) * everywhere for `count` values.
[[gnu::noinline]] inline void write_row(const float* from, int64_t count, const float* factor, float everywhere, void* to, Type type,
                      int64_t first) {
  const F all = broadcast(everywhere);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const F v = mul(load(from + i), factor ? mul(load(factor + i), all) : all);
    switch (type) {
      case Type::f32: store(static_cast<float*>(to) + first + i, v); break;
      case Type::bf16: store_bf16(static_cast<uint16_t*>(to) + first + i, v); break;
      case Type::f16: store_f16(static_cast<uint16_t*>(to) + first + i, v); break;
      default: __builtin_unreachable();
    }
  }
  for (; i < count; ++i) store_from_f32(to, type, first + i, from[i] * ((factor ? factor[i] : 1) * everywhere));
}

}  // namespace eformer::EFORMER_ISA

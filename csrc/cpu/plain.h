// Any product, one value at a time: for a scale per element, which leaves nothing to share between columns or rows.
#pragma once

#include "memory.h"
#include "problem.h"
#include "scalar.h"

namespace eformer::EFORMER_ISA {

inline void plain(const Product& p, Runtime& runtime) {
  const int64_t k = p.k(), n = p.n();
  Layout layout;
  const auto column = layout.add<float>(k, runtime.workers());
  std::byte* base = runtime.scratch(layout.bytes);
  for_each(runtime, n, [&](int64_t j, int64_t worker) {
    float* w = column.in(base, worker);
    for (int64_t i = 0; i < k; ++i) w[i] = p.form == Form::dot ? decoded(p.d, j, i) : decoded(p.d, i, j);
    for (int64_t m = 0; m < p.m; ++m) {
      float parts[16] = {};
      for (int64_t i = 0; i < k; ++i) parts[i % 16] += w[i] * load_as_f32(p.x, p.x_type, m * k + i);
      float total = 0;
      for (float part : parts) total += part;
      store_from_f32(p.y, p.y_type, m * n + j, total);
    }
  });
}

}  // namespace eformer::EFORMER_ISA

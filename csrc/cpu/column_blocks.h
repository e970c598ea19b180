// The blocks that groups of `columns` columns begin with, one group after the other and without a division.
#pragma once

#include "scalar.h"

namespace eformer::EFORMER_ISA {

template <int columns, bool in_blocks>
struct ColumnBlocks {
  explicit ColumnBlocks(int64_t block)
      : per_group(in_blocks ? max(1, columns / block) : 1), groups(in_blocks ? max(1, block / columns) : 1), left(groups) {}
  inline __attribute__((always_inline)) void next() {
    if (--left == 0) first += per_group, left = groups;
  }

  const int64_t per_group, groups;
  int64_t first = 0, left;
};

}  // namespace eformer::EFORMER_ISA

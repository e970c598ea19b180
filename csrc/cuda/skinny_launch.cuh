// Puts one product on a stream for the kernel of skinny.cuh, or says that it does not take it.
#pragma once

#include <atomic>

#include "kernels.h"
#include "skinny.cuh"

namespace eformer {

// The tiles a block takes at a time, so that the multiprocessors end together; 0 where shared memory is too small.
template <class S>
int skinny_tiles(const Product& p, int cells, int multiprocessors, int shared_bytes) {
  int best = 0;
  double least = 0;
  for (int tiles = 1; tiles <= S::kMostTiles && tiles * 16 <= p.d.rows; ++tiles) {
    if (S::shared_bytes(tiles, cells, static_cast<int>(p.m)) > shared_bytes) break;
    const int64_t groups = ceil_div<int64_t>(p.d.rows, tiles * 16) * p.d.count;
    const double cost = static_cast<double>(ceil_div<int64_t>(groups, multiprocessors)) * (tiles + 0.5);
    if (best == 0 || cost < least) best = tiles, least = cost;
  }
  return best;
}

inline uint32_t magic_of(int64_t divisor) {
  return static_cast<uint32_t>(((int64_t{1} << 31) + divisor - 1) / divisor);
}

template <int FMT, class E, int NT, int KC, int RING>
cudaError_t launch_skinny(cudaStream_t stream, const Product& p, int multiprocessors, int shared_bytes) {
  constexpr int kWarps = 16;
  using S = SkinnyShape<FMT, NT, KC, RING, kWarps>;
  const Matrices& d = p.d;
  const uint64_t aligned = reinterpret_cast<uintptr_t>(d.codes) | d.row_bytes | reinterpret_cast<uintptr_t>(p.x);
  if (d.cols % KC || aligned % 16 || d.rows < 16 || p.groups) return cudaErrorNotSupported;
  const int64_t scale_row = d.scale ? d.scale_cols * item_size(d.scale_dtype) : 0;
  int share_log = 0;
  if (FMT == kNf4) {
    while ((64 << share_log) < d.block) ++share_log;
    const uint64_t there = static_cast<uint64_t>(scale_row) | reinterpret_cast<uintptr_t>(d.scale);
    if ((64 << share_log) != d.block || there % 16) return cudaErrorNotSupported;
  }
  SkinnyArgs a{};
  a.scale_cells = FMT == kNf4 ? static_cast<int32_t>(scale_row / 16) : 0, a.share_log = share_log;
  a.tiles = skinny_tiles<S>(p, a.scale_cells, multiprocessors, shared_bytes);
  if (a.tiles == 0) return cudaErrorNotSupported;
  const int64_t groups = ceil_div<int64_t>(d.rows, a.tiles * 16);
  constexpr int64_t kMost = int64_t{1} << 31;
  if (groups * groups * d.count >= kMost || d.row_bytes * 16 >= kMost) return cudaErrorNotSupported;
  a.codes = d.codes, a.scale = d.scale, a.x = p.x, a.y = p.y;
  a.m = static_cast<int32_t>(p.m), a.rows = static_cast<int32_t>(d.rows), a.cols = static_cast<int32_t>(d.cols);
  a.row_bytes = static_cast<int32_t>(d.row_bytes), a.chunks = static_cast<int32_t>(d.cols / KC);
  a.groups = static_cast<int32_t>(groups), a.total = static_cast<int32_t>(groups * d.count);
  a.tiles_magic = magic_of(a.tiles), a.groups_magic = magic_of(groups);
  a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.row_scale = FMT == kNf4 || !d.scale ? 0 : d.scale_rows == 1 ? 2 : 1;
  a.width_log = S::width_log(a.m);
  a.next_tile = 16 * d.row_bytes, a.next_chunk = S::kSegment - (a.tiles - 1) * a.next_tile;
  a.codes_batch = d.row_bytes * d.rows, a.x_batch = p.m * d.cols, a.y_batch = p.m * d.rows;
  a.scale_batch = d.scale_rows * scale_row;
  for (int i = 0; i < 16; ++i) a.book[i] = kHostCodebook[i];
  if constexpr (FMT == kTernary || FMT == kBinary) a.fields = Weights<FMT, E>::field_bits();
  auto* kernel = &skinny_kernel<FMT, E, NT, KC, RING, kWarps>;
  static std::atomic<bool> allowed{false};  // setting it again does no harm
  if (!allowed.load()) {
    constexpr auto kSize = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, kSize, shared_bytes)) return e;
    allowed.store(true);
  }
  const int blocks = a.total < multiprocessors ? a.total : multiprocessors;
  kernel<<<blocks, S::kThreads, S::shared_bytes(a.tiles, a.scale_cells, a.m), stream>>>(a);
  return cudaGetLastError();
}

// More rows of x leave too few registers and too little shared memory for deep rings.
template <class E>
cudaError_t choose_skinny(cudaStream_t stream, const Product& p, int multiprocessors, int shared_bytes) {
  if (p.m > 8) return cudaErrorNotSupported;
  switch (p.d.fmt) {
    case 0:
      return launch_skinny<kNf4, E, 1, 256, 2>(stream, p, multiprocessors, shared_bytes);
    case 1:
      return launch_skinny<kInt8, E, 1, 128, 4>(stream, p, multiprocessors, shared_bytes);
    case 2:
      return launch_skinny<kTernary, E, 1, 256, 6>(stream, p, multiprocessors, shared_bytes);
    case 3:
      return launch_skinny<kBinary, E, 1, 256, 6>(stream, p, multiprocessors, shared_bytes);
  }
  return cudaErrorNotSupported;
}

}  // namespace eformer

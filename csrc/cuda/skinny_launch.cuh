// Puts one product on a stream for the kernel of skinny.cuh, or says that it does not take it.
#pragma once

#include <atomic>

#include "device.h"
#include "kernels.h"
#include "parts.h"
#include "skinny.cuh"

namespace eformer {

// The tiles a block takes at a time, so that the multiprocessors end together; 0 where shared memory is too small.
template <class S>
int skinny_tiles(const Product& p, int cells, int pitch, const Device& device) {
  int best = 0;
  double least = 0;
  for (int tiles = 1; tiles <= S::kMostTiles && tiles * 16 <= p.d.rows; ++tiles) {
    if (S::shared_bytes(tiles, cells, pitch, static_cast<int>(p.m)) > device.shared_bytes) break;
    const int64_t groups = ceil_div<int64_t>(p.d.rows, tiles * 16) * p.d.count;
    const double cost = static_cast<double>(ceil_div<int64_t>(groups, device.multiprocessors)) * (tiles + 0.5);
    if (best == 0 || cost < least) best = tiles, least = cost;
  }
  return best;
}

template <int FMT, class E, int NT, int KC, int RING, int WARPS = 16, int TERMS = 1>
cudaError_t launch_skinny(cudaStream_t stream, const Product& p, const Device& device) {
  using S = SkinnyShape<FMT, NT, KC, RING, WARPS, TERMS>;
  const Matrices& d = p.d;
  const uint64_t aligned = reinterpret_cast<uintptr_t>(d.codes) | d.row_bytes | reinterpret_cast<uintptr_t>(p.x);
  if (d.cols % KC || aligned % 16 || d.rows < 16 || p.groups) return cudaErrorNotSupported;
  const int64_t scale_row = d.scale ? d.scale_cols * item_size(d.scale_dtype) : 0;
  int share_log = 0;
  if (kInBlocks<FMT>) {
    while ((kGroup<FMT> << share_log) < d.block) ++share_log;
    const uint64_t there = static_cast<uint64_t>(scale_row) | reinterpret_cast<uintptr_t>(d.scale);
    if ((kGroup<FMT> << share_log) != d.block || there % 16) return cudaErrorNotSupported;
  }
  SkinnyArgs a{};
  a.scale_cells = kInBlocks<FMT> ? static_cast<int32_t>(scale_row / 16) : 0, a.share_log = share_log;
  if constexpr (kShifted<FMT>) {
    const int64_t row = d.scale_cols * item_size(d.offset_dtype);
    const uint64_t there = static_cast<uint64_t>(row) | reinterpret_cast<uintptr_t>(d.offset);
    if (there % 4) return cudaErrorNotSupported;
    a.offset = d.offset, a.offset_dtype = d.offset_dtype, a.centre = d.centre;
    a.offset_row = static_cast<int32_t>(row), a.offset_unit = there % 16 == 0 ? 16 : there % 8 == 0 ? 8 : 4;
    a.offset_pitch = S::scale_pitch(static_cast<int>(ceil_div<int64_t>(row, 16))), a.offset_batch = d.scale_rows * row;
  }
  a.tiles = skinny_tiles<S>(p, a.scale_cells, a.offset_pitch, device);
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
  a.row_scale = kInBlocks<FMT> || !d.scale ? 0 : d.scale_rows == 1 ? 2 : 1;
  a.width_log = S::width_log(a.m);
  a.next_tile = 16 * d.row_bytes, a.next_chunk = S::kSegment - (a.tiles - 1) * a.next_tile;
  a.codes_batch = d.row_bytes * d.rows, a.x_batch = p.m * d.cols, a.y_batch = p.m * d.rows;
  a.scale_batch = d.scale_rows * scale_row, a.stack = d.stack;
  if constexpr (kInNibbles<FMT>) a.book = book_of(d.fmt), a.rough_book = rough_book();
  if constexpr (FMT == kTernary || FMT == kBinary) a.fields = Weights<FMT, E>::field_bits();
  auto* kernel = &skinny_kernel<FMT, E, NT, KC, RING, WARPS, TERMS>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, device.shared_bytes, &allowed)) return e;
  const int blocks = a.total < device.multiprocessors ? a.total : device.multiprocessors;
  kernel<<<blocks, S::kThreads, S::shared_bytes(a.tiles, a.scale_cells, a.offset_pitch, a.m), stream>>>(a);
  return cudaGetLastError();
}

// Rings are short: what is asked for far ahead comes in any order, and the first piece late. Where 256 columns are more
// chunks than warps and 512 are not, ternary and binary take 512, so that a warp needs x once.
template <int FMT, class E, int TERMS>
cudaError_t multiply_skinny(cudaStream_t stream, const Product& p, const Device& device) {
  const int64_t values = p.d.rows * p.d.cols;
  if constexpr (kInNibbles<FMT>) {
    if (p.m > 8) return launch_skinny<FMT, E, 2, 256, 2, 8, TERMS>(stream, p, device);
    return p.m > 2 ? launch_skinny<FMT, E, 1, 256, 1, 16, TERMS>(stream, p, device)
                   : launch_skinny<FMT, E, 1, 256, 2, 16, TERMS>(stream, p, device);
  } else if constexpr (kInByteBlocks<FMT>) {
    return p.m > 8 ? launch_skinny<FMT, E, 2, 128, 2, 12>(stream, p, device)
                   : launch_skinny<FMT, E, 1, 128, 2>(stream, p, device);
  } else if constexpr (kInBytes<FMT>) {
    if (p.m > 8) return launch_skinny<FMT, E, 2, 128, 2, 12>(stream, p, device);
    if (values <= int64_t{1} << 24) return launch_skinny<FMT, E, 1, 128, 1>(stream, p, device);
    return values <= int64_t{1} << 27 ? launch_skinny<FMT, E, 1, 128, 2>(stream, p, device)
                                      : launch_skinny<FMT, E, 1, 128, 3>(stream, p, device);
  } else {
    if (p.m > 8) return launch_skinny<FMT, E, 2, 256, FMT == kBinary ? 2 : 1>(stream, p, device);
    const bool wide = p.d.cols % 512 == 0 && p.d.cols > 4096 && p.d.cols <= 8192;
    return wide ? launch_skinny<FMT, E, 1, 512, 1>(stream, p, device) : launch_skinny<FMT, E, 1, 256, 2>(stream, p, device);
  }
}

}  // namespace eformer

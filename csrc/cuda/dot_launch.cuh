// Puts one product on a stream for the kernel of dot.cuh: describes the operands to it, sizes the grid.
#pragma once

#include <atomic>

#include "device.h"
#include "dot.cuh"
#include "kernels.h"
#include "parts.h"
#include "tensor_map.h"

namespace eformer {

inline bool is_pow2(int64_t v) { return v > 0 && (v & (v - 1)) == 0; }
inline int log2_of(int64_t v) {
  int n = 0;
  while ((int64_t{1} << (n + 1)) <= v) ++n;
  return n;
}
// Largest copy that every row allows.
inline int unit_of(const void* base, int64_t pitch, int64_t stride) {
  const uint64_t all = reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(pitch) | static_cast<uint64_t>(stride);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

template <class S, int FMT>
void describe_scales(const Product& p, DotArgs* a) {
  a->scale_piece = a->scale_bytes = a->scale_copies_log = a->scale_share_log = 0;
  if (!kInNibbles<FMT>) return;
  const int group = kGroup<FMT>, size = item_size(p.d.scale_dtype);
  a->block = p.d.block, a->scale_cols = static_cast<int32_t>(p.d.scale_cols);
  if (kShifted<FMT> || !is_pow2(p.d.block / group) || S::kCols % p.d.block != 0) return;
  const int bytes = S::kCols / p.d.block * size;
  const uint64_t all = reinterpret_cast<uintptr_t>(p.d.scale) | static_cast<uint64_t>(p.d.scale_cols * size) |
                       static_cast<uint64_t>(p.d.rows * p.d.scale_cols * size) | static_cast<uint64_t>(bytes);
  const int piece = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 0;
  if (!piece) return;
  a->scale_piece = piece, a->scale_bytes = bytes, a->scale_copies_log = log2_of(bytes / piece);
  a->scale_share_log = log2_of(p.d.block / group);
}

template <class S, int FMT>
bool describe_boxes(const Product& p, DotArgs* a) {
  const Matrices& d = p.d;
  const uint64_t rows = d.rows, count = d.count, bytes = d.row_bytes, cols = d.cols;
  const uint32_t box_rows = a->tiles * 16;
  constexpr CUtensorMapDataType kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8, kTwo = CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const Boxes codes{d.codes, kByte, {bytes, rows, stored_in(d)}, {bytes, bytes * rows}, {128, box_rows, 1}, true};
  if (!make_tensor_map(&a->codes_map, codes)) return false;
  const uint64_t x_rows = p.groups ? p.m : p.m * count;
  const Boxes x{p.x, kTwo, {S::kXBox, x_rows, cols / S::kXBox}, {cols * 2, S::kXBox * 2},
                {S::kXBox, static_cast<uint32_t>(a->x_rows), S::kCols / S::kXBox}, S::kXBox == 64};
  if (cols % S::kXBox || !make_tensor_map(&a->x_map, x)) return false;
  if (!kInNibbles<FMT>) return true;
  const uint64_t pitch = d.scale_cols * item_size(d.scale_dtype), box_bytes = a->scale_bytes;
  const Boxes scale{d.scale, kByte, {pitch, rows, stored_in(d)}, {pitch, pitch * rows}, {static_cast<uint32_t>(box_bytes), box_rows, 1}, false};
  return a->scale_piece == 16 && make_tensor_map(&a->scale_map, scale);
}

// Adds up the splits of the columns.
static __global__ void sum_kernel(const __grid_constant__ DotArgs a, int splits, int64_t size) {
  wait_for_previous_kernel();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    float total = 0.f;
    for (int s = 0; s < splits; ++s) total += a.partial[s * size + i];
    const int64_t batch = first_matrix(a.stack) + (a.y_batch ? i / a.y_batch : 0);
    store_float(a.y, i, a.y_dtype, total * row_factor(a, a.scale + batch * a.scale_batch, static_cast<int>(i % a.rows)));
  }
}

inline cudaError_t launch_sum(cudaStream_t stream, const DotArgs& a, int splits, int count) {
  const int64_t size = a.y_batch * count;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div<int64_t>(size, 256) < 1056 ? ceil_div<int64_t>(size, 256) : 1056));
  config.blockDim = dim3(256);
  config.stream = stream;
  cudaLaunchAttribute early[1];
  early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = early, config.numAttrs = 1;
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major < 9) config.numAttrs = 0;
  return cudaLaunchKernelEx(&config, sum_kernel, a, splits, size);
}

template <int FMT, class E, int NT, int T, int WK, int STAGES>
cudaError_t launch_dot(cudaStream_t stream, const Product& p, const Device& device) {
  using S = DotShape<FMT, NT, T, WK, STAGES>;
  const Matrices& d = p.d;
  DotArgs a{};
  a.codes = d.codes, a.scale = d.scale, a.x = p.x, a.y = p.y, a.groups = p.groups;
  a.m = static_cast<int32_t>(p.m), a.rows = static_cast<int32_t>(d.rows), a.cols = static_cast<int32_t>(d.cols);
  a.row_bytes = static_cast<int32_t>(d.row_bytes), a.group_count = static_cast<int32_t>(d.count);
  a.x_rows = static_cast<int32_t>(p.m < 8 * NT ? p.m : 8 * NT);
  a.tiles = p.tiles < 1 ? 1 : p.tiles > S::kTiles ? S::kTiles : p.tiles;
  const int available = device.shared_bytes - 1024;
  while (a.tiles > 1 && S::shared_bytes(a.tiles, a.x_rows) > available) --a.tiles;
  const int shared = S::shared_bytes(a.tiles, a.x_rows);
  if (shared > available) return cudaErrorNotSupported;
  a.m_chunks = p.groups ? 1 : static_cast<int32_t>(ceil_div<int64_t>(p.m, 8 * NT));
  a.stages = static_cast<int32_t>(ceil_div<int64_t>(d.cols, S::kCols));
  const int splits = p.partial && p.splits > 1 ? (p.splits < a.stages ? p.splits : a.stages) : 1;
  a.stages_per_split = ceil_div(a.stages, splits);
  const int blocks_y = ceil_div(a.stages, a.stages_per_split);
  a.partial = blocks_y > 1 ? p.partial : nullptr;
  a.codes_batch = d.row_bytes * d.rows, a.x_batch = p.m * d.cols, a.y_batch = p.m * d.rows;
  a.scale_batch = d.scale ? d.scale_rows * d.scale_cols * item_size(d.scale_dtype) : 0, a.stack = d.stack;
  a.offset = d.offset, a.offset_dtype = d.offset_dtype, a.centre = d.centre;
  a.offset_batch = d.scale_rows * d.scale_cols * item_size(d.offset_dtype);
  a.scale_dtype = d.scale_dtype, a.y_dtype = p.y_dtype;
  a.row_scale = kInNibbles<FMT> || !d.scale ? 0 : d.scale_rows == 1 ? 2 : 1;
  a.codes_unit = unit_of(d.codes, d.row_bytes, a.codes_batch);
  a.x_unit = unit_of(p.x, d.cols * 2, 0);
  describe_scales<S, FMT>(p, &a);
  if constexpr (kInNibbles<FMT>) a.book = book_of(d.fmt);
  a.boxes = device.major >= 9 && a.codes_unit == 16 && describe_boxes<S, FMT>(p, &a);
  if (S::kSelfLoading && !a.boxes) return cudaErrorNotSupported;
  auto* kernel = &dot_kernel<FMT, E, NT, T, WK, STAGES>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t e = allow_shared(kernel, device, available, &allowed)) return e;
  const int64_t row_blocks = ceil_div<int64_t>(d.rows, a.tiles * 16);
  const dim3 grid(static_cast<unsigned>(row_blocks * a.m_chunks), blocks_y, static_cast<unsigned>(d.count + (p.groups != nullptr)));
  kernel<<<grid, S::kThreads, shared, stream>>>(a);
  if (cudaError_t e = cudaGetLastError()) return e;
  return a.partial ? launch_sum(stream, a, blocks_y, static_cast<int>(d.count)) : cudaSuccess;
}

// One column (NT) per eight rows of x. More columns leave fewer registers for tiles, and x takes shared memory in
// proportion to the columns of D in a stage, of which binary has many.
template <int FMT, class E>
cudaError_t multiply_dot(cudaStream_t stream, const Product& p, const Device& device) {
  const int64_t m = p.groups ? (p.m + p.d.count - 1) / p.d.count : p.m;
  if (m <= 8) return launch_dot<FMT, E, 1, 8, 8, 3>(stream, p, device);
  if (m <= 16) return launch_dot<FMT, E, 2, 8, FMT == kBinary ? 4 : 8, 3>(stream, p, device);
  if constexpr (FMT != kBinary && !kShifted<FMT>) {  // offsets are not for the copy engine
    if (m > 32 && device.major >= 9) {
      const cudaError_t error = launch_dot<FMT, E, 8, 4, 4, FMT == kTernary ? 2 : 3>(stream, p, device);
      if (error != cudaErrorNotSupported) return error;
    }
  }
  return launch_dot<FMT, E, 4, 4, 4, FMT == kBinary ? 2 : 3>(stream, p, device);
}

}  // namespace eformer

// Chooses the kernel of a product by the format. The kernels are compiled elsewhere, some formats at a time (parts.cmake).
#include <type_traits>

#include "common.cuh"
#include "device.h"
#include "kernels.h"
#include "parts.h"

namespace eformer {
namespace {

template <class E>
constexpr bool kIsBf16 = std::is_same_v<E, __nv_bfloat16>;

template <class E>
cudaError_t choose_skinny(cudaStream_t stream, const Product& p, const Device& device) {
  if (p.m > 16) return cudaErrorNotSupported;
  const bool fine = p.d.block % 64 != 0;
  if (device.major == 9 && p.m > 2 && in_nibbles(p.d.fmt) && !fine && !p.d.offset && !p.groups) {
    if constexpr (kIsBf16<E>) {
      const cudaError_t error = p.d.fmt != 0          ? multiply_split<kCode4, E>(stream, p, device)
                                : p.y_dtype == kBf16 ? multiply_split<kNf4, E>(stream, p, device)
                                                     : cudaErrorNotSupported;
      if (error != cudaErrorNotSupported) return error;
    }
  }
  if (p.d.offset) {
    if (p.d.fmt == 7) return multiply_skinny<kShift8, E, 1>(stream, p, device);
    if (p.d.fmt != 4) return cudaErrorNotSupported;
    return fine ? multiply_skinny<kShift4Fine, E, 1>(stream, p, device) : multiply_skinny<kShift4, E, 1>(stream, p, device);
  }
  switch (p.d.fmt) {
    case 0:
      if constexpr (kIsBf16<E>) {
        if (p.y_dtype == kBf16) return multiply_skinny<kNf4, E, 1>(stream, p, device);
      }
      return multiply_skinny<kNf4, E, 2>(stream, p, device);
    case 1:
      return multiply_skinny<kInt8, E, 1>(stream, p, device);
    case 2:
      return multiply_skinny<kTernary, E, 1>(stream, p, device);
    case 3:
      return multiply_skinny<kBinary, E, 1>(stream, p, device);
    case 4:
    case 5:
    case 6:
      return fine ? multiply_skinny<kCode4Fine, E, 1>(stream, p, device) : multiply_skinny<kCode4, E, 1>(stream, p, device);
    case 8:
      return multiply_skinny<kE4m3, E, 1>(stream, p, device);
    case 9:
      return multiply_skinny<kE5m2, E, 1>(stream, p, device);
    case 7:
      return multiply_skinny<kInt8Block, E, 1>(stream, p, device);
    case 10:
      return multiply_skinny<kE4m3Block, E, 1>(stream, p, device);
  }
  return cudaErrorNotSupported;
}

template <class E>
cudaError_t choose(cudaStream_t stream, const Product& asked) {
  Product p = asked;
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (asked.tiles < 1) {  // the caller leaves it to the kernels
    if (device.major >= 9) {
      const cudaError_t error = choose_skinny<E>(stream, asked, device);
      if (error != cudaErrorNotSupported) return error;
    }
    const int64_t each = ceil_div<int64_t>(p.d.rows * p.d.count, 16 * device.multiprocessors);
    p.tiles = clamp_to(static_cast<int>(each) - 1, 7) + 1;
  }
  if (in_nibbles(p.d.fmt) && p.d.block % 32) return cudaErrorNotSupported;
  if (p.d.offset) return p.d.fmt == 4 ? multiply_dot<kShift4Fine, E>(stream, p, device) : cudaErrorNotSupported;
  switch (p.d.fmt) {
    case 0:
      return p.d.block % 64 ? multiply_dot<kNf4Fine, E>(stream, p, device) : multiply_dot<kNf4, E>(stream, p, device);
    case 1:
      return multiply_dot<kInt8, E>(stream, p, device);
    case 2:
      return multiply_dot<kTernary, E>(stream, p, device);
    case 3:
      return multiply_dot<kBinary, E>(stream, p, device);
    case 4:
    case 5:
    case 6:
      return multiply_dot<kCode4Fine, E>(stream, p, device);
    case 8:
      return multiply_dot<kE4m3, E>(stream, p, device);
    case 9:
      return multiply_dot<kE5m2, E>(stream, p, device);
  }
  return cudaErrorNotSupported;
}

// The kernels of NF4 serve other formats of 4 bits, too, where values and scales are multiplied in float32.
template <class E, int FORM>
cudaError_t choose_wide_nibbles(cudaStream_t stream, const WideProduct& w) {
  const bool nf4 = w.p.d.fmt == 0, whole = w.p.d.block % 64 == 0;
  if (w.p.d.offset) {  // (code - zero) is exact in bf16, other offsets are added in float32
    if constexpr (kIsBf16<E>) {
      if (w.p.y_dtype == kF32) return whole ? multiply_wide<kBias4, E, FORM, 2>(stream, w) : cudaErrorNotSupported;
      const bool exact = w.p.y_dtype == kBf16 && w.p.d.offset_dtype == kU8;
      if (exact && w.p.d.block % 32 == 0) return multiply_wide<kShift4Fine, E, FORM, 1>(stream, w);
    }
    return whole ? multiply_wide<kBias4, E, FORM, 1>(stream, w) : cudaErrorNotSupported;
  }
  if constexpr (kIsBf16<E>) {
    if (w.p.y_dtype == kF32) return whole ? multiply_wide<kNf4, E, FORM, 2>(stream, w) : cudaErrorNotSupported;
    // bf16 holds the other values exactly, and scales in two parts.
    if (!nf4) return w.p.d.block % 32 || w.p.y_dtype != kBf16 ? cudaErrorNotSupported : multiply_wide<kCode4Fine, E, FORM, 1>(stream, w);
  }
  return whole ? multiply_wide<kNf4, E, FORM, 1>(stream, w) : cudaErrorNotSupported;
}

// Few rows of x in the axpy form: one kernel for all formats of 4 bits, by columns of eight rows.
cudaError_t choose_axpy(cudaStream_t stream, const WideProduct& w, const Device& device) {
  if (!in_nibbles(w.p.d.fmt) || w.p.y_dtype != kBf16) return cudaErrorNotSupported;
  return w.p.m <= 8 ? multiply_axpy<1>(stream, w.p, device) : multiply_axpy<2>(stream, w.p, device);
}

template <class E, int FORM>
cudaError_t choose_wide(cudaStream_t stream, const WideProduct& w) {
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major != 9) return cudaErrorNotSupported;  // no other generation has the instruction
  if (w.width < 1) return kIsBf16<E> && FORM == kAxpy ? choose_axpy(stream, w, device) : cudaErrorNotSupported;
  switch (w.p.d.fmt) {
    case 0:
    case 4:
    case 5:
    case 6:
      return choose_wide_nibbles<E, FORM>(stream, w);
    case 1:
      return multiply_wide<kInt8, E, FORM, 1>(stream, w);
    case 2:
      return multiply_wide<kTernary, E, FORM, 1>(stream, w);
    case 3:
      return multiply_wide<kBinary, E, FORM, 1>(stream, w);
    case 8:
      return multiply_wide<kE4m3, E, FORM, 1>(stream, w);
    case 9:
      return multiply_wide<kE5m2, E, FORM, 1>(stream, w);
    case 7:
    case 10:
      if constexpr (kIsBf16<E>) {  // which holds the values exactly, and scales in two parts
        if (w.p.y_dtype != kBf16 || w.p.d.block % 32 || w.p.d.offset) return cudaErrorNotSupported;
        return w.p.d.fmt == 7 ? multiply_wide<kInt8Block, E, FORM, 1>(stream, w)
                              : multiply_wide<kE4m3Block, E, FORM, 1>(stream, w);
      }
  }
  return cudaErrorNotSupported;
}

template <class E, int FORM>
cudaError_t choose_odd(cudaStream_t stream, const WideProduct& w) {
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major != 9 || w.p.d.offset) return cudaErrorNotSupported;
  switch (w.p.d.fmt) {
    case 0:
    case 4:
    case 5:
    case 6:
      return w.p.d.block % 32 || w.p.y_dtype != w.p.x_dtype ? cudaErrorNotSupported : multiply_odd<kNf4, E, FORM>(stream, w, device);
    case 1:
      return multiply_odd<kInt8, E, FORM>(stream, w, device);
    case 2:
      return multiply_odd<kTernary, E, FORM>(stream, w, device);
    case 3:
      return multiply_odd<kBinary, E, FORM>(stream, w, device);
    case 8:
      return multiply_odd<kE4m3, E, FORM>(stream, w, device);
    case 9:
      return multiply_odd<kE5m2, E, FORM>(stream, w, device);
  }
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t multiply_bf16(cudaStream_t stream, const Product& p) { return choose<__nv_bfloat16>(stream, p); }
cudaError_t multiply_f16(cudaStream_t stream, const Product& p) { return choose<__half>(stream, p); }
cudaError_t multiply_wide_bf16(cudaStream_t stream, const WideProduct& w) {
  return w.axpy ? choose_wide<__nv_bfloat16, kAxpy>(stream, w) : choose_wide<__nv_bfloat16, kDot>(stream, w);
}
cudaError_t multiply_wide_f16(cudaStream_t stream, const WideProduct& w) {
  return w.axpy ? choose_wide<__half, kAxpy>(stream, w) : choose_wide<__half, kDot>(stream, w);
}
cudaError_t multiply_odd(cudaStream_t stream, const WideProduct& w) {
  if (w.p.x_dtype == kBf16) return w.axpy ? choose_odd<__nv_bfloat16, kAxpy>(stream, w) : choose_odd<__nv_bfloat16, kDot>(stream, w);
  return w.axpy ? choose_odd<__half, kAxpy>(stream, w) : choose_odd<__half, kDot>(stream, w);
}
cudaError_t multiply_bytes(cudaStream_t stream, const BytesProduct& p) {
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major != 9) return multiply_tiles(stream, p);  // a program that was exported for Hopper
  if (p.d.fmt == 1) {
    return p.axpy ? multiply_bytes<kInt8, kAxpy>(stream, p, device) : multiply_bytes<kInt8, kDot>(stream, p, device);
  }
  return p.axpy ? multiply_bytes<kE4m3, kAxpy>(stream, p, device) : multiply_bytes<kE4m3, kDot>(stream, p, device);
}
cudaError_t multiply_tiles(cudaStream_t stream, const BytesProduct& p) {
  Device device;
  if (cudaError_t e = current_device(&device)) return e;
  if (device.major < 8) return cudaErrorNotSupported;
  if (p.d.fmt == 1) {
    return p.axpy ? multiply_tiles<kInt8, kAxpy>(stream, p, device) : multiply_tiles<kInt8, kDot>(stream, p, device);
  }
  return p.axpy ? multiply_tiles<kE4m3, kAxpy>(stream, p, device) : multiply_tiles<kE4m3, kDot>(stream, p, device);
}

}  // namespace eformer

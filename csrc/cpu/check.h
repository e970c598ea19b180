// From FFI buffers to the plain structs of problem.h; every size is checked before a pointer is used.
#pragma once

#include <optional>
#include <sstream>
#include <string>

#include "kernels.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace eformer {

namespace ffi = xla::ffi;

// The attributes of a call; those a handler does not use keep these values.
struct Attributes {
  int64_t fmt = -1;
  int64_t form = 0;
  int64_t cols = -1;
  int64_t block = 0;
  int64_t isa = -1;     // -1: the best
  int64_t threads = 0;  // 0: all of XLA's pool, 1: the calling thread

  explicit Attributes(const ffi::Dictionary& attributes);
};

template <class... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream text;
  text << "eformer: ";
  (text << ... << parts);
  return ffi::Error::InvalidArgument(text.str());
}

std::string show(const ffi::AnyBuffer& buffer);

// f32, bf16 or f16; nothing otherwise. A scale may also be of bytes: u8 is e8m0.
std::optional<Type> float_type(const ffi::AnyBuffer& buffer);
std::optional<Type> scale_type(const ffi::AnyBuffer& buffer);

// What multiplies all scales of a matrix: one number for each, or none.
using Factor = ffi::Buffer<ffi::F32>;

// Describes the first matrix of `codes`, which has `batch` leading axes (0 or 1), of `scale` and of `offset`, if not null.
// The distances in bytes from one matrix of the batch to the next are left in *_step.
struct Stack {
  Matrix first;
  int64_t count;
  int64_t codes_step;
  int64_t scale_step;
  int64_t offset_step;

  Matrix operator[](int64_t i) const {
    Matrix d = first;
    d.codes += i * codes_step;
    if (d.scale.data) d.scale.data = static_cast<const std::byte*>(d.scale.data) + i * scale_step;
    if (d.scale.factor) d.scale.factor += i;
    d.offset = d.offset.moved(i * offset_step);
    return d;
  }
};
ffi::Error check_stack(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale, const ffi::AnyBuffer* offset,
                       const Factor& factor, const Attributes& a, int64_t batch, Stack& stack);

ffi::Error check_kernels(int64_t isa, const Kernels*& kernels);

}  // namespace eformer

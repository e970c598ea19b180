#include "check.h"

#include <algorithm>

namespace eformer {

Attributes::Attributes(const ffi::Dictionary& attributes) {
  const auto read = [&](const char* name, int64_t& value) {
    if (!attributes.contains<int64_t>(name)) return;
    value = attributes.get<int64_t>(name).value();
  };
  read("fmt", fmt);
  read("form", form);
  read("cols", cols);
  read("block", block);
  read("isa", isa);
  read("threads", threads);
}

std::string show(const ffi::AnyBuffer& buffer) {
  std::ostringstream text;
  text << buffer.element_type() << "[";
  const char* comma = "";
  for (int64_t size : buffer.dimensions()) {
    text << comma << size;
    comma = ", ";
  }
  text << "]";
  return text.str();
}

std::optional<Type> float_type(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return Type::f32;
    case ffi::DataType::BF16: return Type::bf16;
    case ffi::DataType::F16: return Type::f16;
    default: return std::nullopt;
  }
}

std::optional<Type> scale_type(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::U8: return Type::e8m0;
    case ffi::DataType::F8E4M3FN: return Type::e4m3;
    default: return float_type(buffer);
  }
}

namespace {

ffi::Error check_codes(const ffi::AnyBuffer& codes, const Attributes& a, int64_t batch, Matrix& d) {
  if (a.form < 0 || a.form > 1) return invalid("form=", a.form, " is unknown; 0 dot, 1 axpy.");
  if (a.fmt < 0 || a.fmt >= format_count)
    return invalid("fmt=", a.fmt, " is unknown; formats are numbered from 0 to ", format_count - 1, ".");
  const Format format = static_cast<Format>(a.fmt);
  const bool four_bits = format == Format::nf4 || (format >= Format::int4 && format <= Format::fp4);
  const bool in_blocks = four_bits || blocked(format) || format >= Format::int2;
  d.table = four_bits && format != Format::nf4 ? static_cast<int>(a.fmt) - static_cast<int>(Format::int4) + 1 : 0;
  const bool in_bits = format >= Format::int2 && format <= Format::int6;
  d.bits = format == Format::int2 ? 2 : format == Format::int3 ? 3 : format == Format::int5 ? 5 : format == Format::int6 ? 6 : 8;
  d.format = four_bits ? Format::nf4 : in_bits ? Format::int8_block : format;
  const bool is_signed = format == Format::int8 || format == Format::int8_block;
  const auto type = is_signed ? ffi::DataType::S8 : ffi::DataType::U8;
  const auto dims = codes.dimensions();
  if (codes.element_type() != type || static_cast<int64_t>(dims.size()) != batch + (in_blocks ? 3 : 2))
    return invalid("codes ", show(codes), " must be ", type, " of rank ", batch + (in_blocks ? 3 : 2), ".");
  if (a.cols < 0 || a.block < 0) return invalid("cols=", a.cols, " and block=", a.block, " must not be negative.");
  d.rows = dims[batch];
  d.cols = a.cols;
  d.block = in_blocks ? a.block : 0;
  d.codes = static_cast<const uint8_t*>(codes.untyped_data());
  if (in_blocks) {
    const int64_t block_bytes = a.block * d.bits / 8 / per_byte(d.format);
    if (a.block < 2 || a.block % 2 || a.block * d.bits % 8 || dims[batch + 1] != d.blocks() || dims[batch + 2] != block_bytes)
      return invalid("codes ", show(codes), " do not hold ", a.cols, " columns in blocks of ", a.block, ".");
    d.row_bytes = d.blocks() * block_bytes;
  } else {
    d.row_bytes = (a.cols + per_byte(d.format) - 1) / per_byte(d.format);
    if (dims[batch + 1] != d.row_bytes) return invalid("codes ", show(codes), " do not hold ", a.cols, " columns.");
  }
  return ffi::Error::Success();
}

ffi::Error check_scale(const ffi::AnyBuffer& scale, const ffi::AnyBuffer& codes, int64_t batch, Matrix& d) {
  const bool in_blocks = blocked(d.format);
  if (!in_blocks && scale.element_count() == 0) return ffi::Error::Success();
  const auto type = scale_type(scale);
  const auto dims = scale.dimensions();
  if (!type || static_cast<int64_t>(dims.size()) != batch + 2 || (batch && dims[0] != codes.dimensions()[0]))
    return invalid("scale ", show(scale), " must be f32, bf16, f16, f8e4m3fn or u8 with the batch axes of codes ", show(codes), ".");
  const int64_t rows = dims[batch], cols = dims[batch + 1];
  const int64_t full = in_blocks ? d.blocks() : d.cols;
  const bool fits = in_blocks ? rows == d.rows && cols == full
                              : (rows == d.rows || rows == 1) && (cols == full || cols == 1);
  if (!fits) return invalid("scale ", show(scale), " does not fit D of ", d.rows, " rows and ", full, " scales a row.");
  d.scale.data = scale.untyped_data();
  d.scale.type = *type;
  d.scale.row_stride = rows == 1 ? 0 : cols;
  d.scale.col_stride = cols == 1 ? 0 : 1;
  return ffi::Error::Success();
}

// Without elements there is no factor.
ffi::Error check_factor(const Factor& factor, int64_t count, Matrix& d) {
  const auto numbers = static_cast<int64_t>(factor.element_count());
  if (numbers == 0) return ffi::Error::Success();
  if (numbers != count || !d.scale.data) return invalid("factor has ", numbers, " entries for the scales of ", count, " matrices.");
  d.scale.factor = factor.typed_data();
  return ffi::Error::Success();
}

// Without elements there is no offset.
ffi::Error check_offset(const ffi::AnyBuffer& offset, const ffi::AnyBuffer& scale, const Attributes& a, Matrix& d) {
  if (offset.element_count() == 0) return ffi::Error::Success();
  const bool is_zero = offset.element_type() == ffi::DataType::U8;
  const auto type = float_type(offset);
  const auto dims = offset.dimensions(), wanted = scale.dimensions();
  const bool integers = static_cast<Format>(a.fmt) == Format::int4 || d.format == Format::int8_block;
  if (!integers || (!is_zero && !type) || !std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end()))
    return invalid("offset ", show(offset), " must be u8, f32, bf16 or f16 of the shape of scale ", show(scale),
                   ", for integers in blocks; fmt=", a.fmt, ".");
  const int bits = d.format == Format::int8_block ? d.bits : 4;
  d.offset = {offset.untyped_data(), is_zero, type.value_or(Type::f32), static_cast<float>(1 << (bits - 1))};
  return ffi::Error::Success();
}

}  // namespace

ffi::Error check_stack(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale, const ffi::AnyBuffer* offset,
                       const Factor& factor, const Attributes& a, int64_t batch, Stack& stack) {
  if (auto error = check_codes(codes, a, batch, stack.first); error.failure()) return error;
  if (auto error = check_scale(scale, codes, batch, stack.first); error.failure()) return error;
  if (offset) {
    if (auto error = check_offset(*offset, scale, a, stack.first); error.failure()) return error;
  }
  stack.count = batch ? codes.dimensions()[0] : 1;
  if (auto error = check_factor(factor, stack.count, stack.first); error.failure()) return error;
  stack.codes_step = stack.first.rows * stack.first.row_bytes;
  stack.scale_step = stack.count ? static_cast<int64_t>(scale.size_bytes()) / stack.count : 0;
  stack.offset_step = stack.first.rows * stack.first.blocks() * static_cast<int64_t>(stack.first.offset.size());
  return ffi::Error::Success();
}

ffi::Error check_kernels(int64_t isa, const Kernels*& kernels) {
  kernels = kernels_of(isa);
  if (kernels) return ffi::Error::Success();
  std::ostringstream text;
  text << "eformer: no CPU kernels for isa=" << isa << " on this machine, whose best is " << best_isa() << ".";
  return ffi::Error(ffi::ErrorCode::kUnimplemented, text.str());
}

}  // namespace eformer

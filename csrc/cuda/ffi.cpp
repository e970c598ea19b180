// The doors of the library: XLA FFI handlers and the version of their interface. Checks only; kernels are elsewhere.
#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace eformer {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t abi_version = 9;
// Bits of a value, by the number of the format.
constexpr int64_t formats = 16, bits_of[formats] = {4, 8, 2, 1, 4, 4, 4, 8, 8, 8, 8, 8, 2, 3, 5, 6};

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("eformer: " + what); }

ffi::Error finished(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  if (error == cudaErrorNotSupported) return invalid("no CUDA kernel takes this block size on this device.");
  return ffi::Error::Internal(std::string("eformer: ") + cudaGetErrorString(error));
}

std::optional<int> float_type(ffi::AnyBuffer b) {
  switch (b.element_type()) {
    case ffi::F32:
      return 0;
    case ffi::BF16:
      return 1;
    case ffi::F16:
      return 2;
    default:
      return std::nullopt;
  }
}

// codes (count, rows, ...) and scale (count, ...), or a scale of one axis and no elements.
ffi::Error matrices(ffi::AnyBuffer codes, ffi::AnyBuffer scale, int64_t fmt, int64_t cols, int64_t block, Matrices* d) {
  const auto c = codes.dimensions(), s = scale.dimensions();
  const auto type = float_type(scale);
  const bool blocks = in_blocks(fmt);
  if (fmt < 0 || fmt >= formats || c.size() != (blocks ? 4u : 3u) || !type || (blocks ? block < 1 : block != 0))
    return invalid("the codes do not fit the format.");
  d->fmt = static_cast<int>(fmt), d->count = c[0], d->rows = c[1], d->cols = cols, d->block = static_cast<int>(block);
  d->row_bytes = blocks ? c[2] * c[3] : c[2];
  const int64_t needed = ((blocks ? (cols + block - 1) / block * block : cols) * bits_of[fmt] + 7) / 8;
  if (d->row_bytes != needed) return invalid("the codes do not have as many columns as they should.");
  d->codes = static_cast<const uint8_t*>(codes.untyped_data());
  d->scale_dtype = *type;
  d->scale = nullptr, d->scale_rows = d->scale_cols = 1;
  if (s.size() == 1) return blocks ? invalid("blocks need a scale.") : ffi::Error::Success();
  if (s.size() != 3 || s[0] != c[0] || (s[1] != 1 && s[1] != c[1])) return invalid("the scale does not fit the codes.");
  if (blocks ? s[1] != c[1] || s[2] != c[2] : s[2] != 1 && s[2] != cols) return invalid("the scale does not fit the codes.");
  d->scale = static_cast<const uint8_t*>(scale.untyped_data());
  d->scale_rows = s[1], d->scale_cols = s[2];
  return ffi::Error::Success();
}

// One number for every scale of integers in blocks, or no elements: see Matrices.
ffi::Error offsets(ffi::AnyBuffer offset, ffi::AnyBuffer scale, Matrices* d) {
  if (offset.element_count() == 0) return ffi::Error::Success();
  const auto type = float_type(offset);
  if (d->fmt != 4 && d->fmt != 7 && d->fmt < 12) return invalid("only integers in blocks have offsets.");
  if (!type && offset.element_type() != ffi::U8) return invalid("offsets must be uint8, float32, bfloat16 or float16.");
  const auto o = offset.dimensions(), s = scale.dimensions();
  if (o.size() != s.size() || !std::equal(o.begin(), o.end(), s.begin())) return invalid("the offset does not fit the scale.");
  d->offset = static_cast<const uint8_t*>(offset.untyped_data());
  d->offset_dtype = type.value_or(3), d->centre = static_cast<float>(1 << (bits_of[d->fmt] - 1));
  return ffi::Error::Success();
}

// The codes are a stack of groups of `count` matrices, of which the index names one; or it has no elements.
ffi::Error choose_group(ffi::Buffer<ffi::S32> index, int64_t count, Matrices* d) {
  if (index.element_count() == 0) return ffi::Error::Success();
  if (index.element_count() != 1 || count < 1 || d->count % count) return invalid("the index does not fit the codes.");
  d->stack = {index.typed_data(), static_cast<int32_t>(d->count / count), static_cast<int32_t>(count)};
  d->count = count;
  return ffi::Error::Success();
}

ffi::Error product(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, Product p, int64_t tiles, int64_t splits) {
  const auto x_type = float_type(x), y_type = float_type(y);
  if (!x_type || *x_type == 0 || !y_type) return invalid("x must be bfloat16 or float16, y a float.");
  const bool blocks = in_blocks(p.d.fmt);
  if (!blocks && p.d.scale && p.d.scale_cols != 1) return invalid("scales along the columns belong into x.");
  if (blocks && p.d.scale_dtype == 2) return invalid("scales of blocks must be float32 or bfloat16.");
  p.x = static_cast<const uint8_t*>(x.untyped_data()), p.x_dtype = *x_type;
  p.y = y.untyped_data(), p.y_dtype = *y_type;
  p.tiles = static_cast<int>(tiles), p.splits = static_cast<int>(splits);
  return finished(*x_type == 1 ? multiply_bf16(stream, p) : multiply_f16(stream, p));
}

ffi::Error qmatmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                   ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::F32>> work, int64_t fmt, int64_t cols,
                   int64_t block, int64_t tiles, int64_t splits) {
  Product p{};
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &p.d); e.failure()) return e;
  if (ffi::Error e = offsets(offset, scale, &p.d); e.failure()) return e;
  const auto xd = x.dimensions(), yd = y->dimensions();
  if (ffi::Error e = choose_group(index, xd.size() ? xd[0] : 0, &p.d); e.failure()) return e;
  if (xd.size() != 3 || yd.size() != 3 || xd[0] != p.d.count || xd[2] != cols || yd[0] != xd[0] || yd[1] != xd[1] ||
      yd[2] != p.d.rows)
    return invalid("x and y do not fit the codes.");
  p.m = xd[1];
  if (splits > 1 && static_cast<int64_t>(work->element_count()) < splits * p.d.count * p.m * p.d.rows)
    return invalid("the work space is too small for the splits.");
  p.partial = splits > 1 ? work->typed_data() : nullptr;
  return product(stream, x, *y, p, tiles, splits);
}

// What the kernels in both forms get of a product.
ffi::Error both_forms(ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::Buffer<ffi::S32> index,
                      ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block, int64_t axpy, int64_t width,
                      int64_t splits, WideProduct* w) {
  Product& p = w->p;
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &p.d); e.failure()) return e;
  if (ffi::Error e = offsets(offset, scale, &p.d); e.failure()) return e;
  const auto xd = x.dimensions(), yd = y->dimensions();
  if (ffi::Error e = choose_group(index, xd.size() ? xd[0] : 0, &p.d); e.failure()) return e;
  const int64_t deep = axpy ? p.d.rows : cols, across = axpy ? cols : p.d.rows;
  if (xd.size() != 3 || yd.size() != 3 || xd[0] != p.d.count || xd[2] != deep || yd[0] != xd[0] || yd[1] != xd[1] ||
      yd[2] != across)
    return invalid("x and y do not fit the codes.");
  const auto x_type = float_type(x), y_type = float_type(*y);
  if (!x_type || *x_type == 0 || !y_type) return invalid("x must be bfloat16 or float16, y a float.");
  if (!in_blocks(fmt) && p.d.scale && (axpy ? p.d.scale_rows : p.d.scale_cols) != 1)
    return invalid("scales along the contracted axis belong into x.");
  p.x = static_cast<const uint8_t*>(x.untyped_data()), p.x_dtype = *x_type, p.m = xd[1];
  p.y = y->untyped_data(), p.y_dtype = *y_type, p.splits = static_cast<int>(splits);
  w->axpy = axpy != 0, w->width = static_cast<int>(width);
  return ffi::Error::Success();
}

ffi::Error wide(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block, int64_t axpy, int64_t width,
                int64_t outs, int64_t splits, int64_t rest, int64_t rest_splits) {
  WideProduct w{};
  ffi::Error e = both_forms(x, codes, scale, offset, index, y, fmt, cols, block, axpy, width, splits, &w);
  if (e.failure()) return e;
  w.outs = static_cast<int>(outs), w.rest = static_cast<int>(rest), w.rest_splits = static_cast<int>(rest_splits);
  return finished(w.p.x_dtype == 1 ? multiply_wide_bf16(stream, w) : multiply_wide_f16(stream, w));
}

ffi::Error odd(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
               ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block, int64_t axpy, int64_t width,
               int64_t splits) {
  WideProduct w{};
  ffi::Error e = both_forms(x, codes, scale, offset, index, y, fmt, cols, block, axpy, width, splits, &w);
  return e.failure() ? e : finished(multiply_odd(stream, w));
}

// x is rounded to codes, which go into `rounded` with their scales in `found`. `given` has no elements where the scales of x
// are to be found.
ffi::Error round_x(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                   ffi::Buffer<ffi::F32> given, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::Buffer<ffi::U8>> rounded, ffi::Result<ffi::Buffer<ffi::F32>> found, int64_t fmt, int64_t cols,
                   int64_t block, int64_t axpy, BytesProduct* product) {
  BytesProduct& p = *product;
  if (fmt != 1 && fmt != 8) return invalid("x is rounded to 8 bits for int8 and e4m3 weights only.");
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &p.d); e.failure()) return e;
  const auto xd = x.dimensions(), yd = y->dimensions(), rd = rounded->dimensions();
  if (ffi::Error e = choose_group(index, xd.size() ? xd[0] : 0, &p.d); e.failure()) return e;
  const int64_t deep = axpy ? p.d.rows : cols, across = axpy ? cols : p.d.rows;
  const auto x_type = float_type(x), y_type = float_type(*y);
  if (!x_type || !y_type) return invalid("x and y must be floats.");
  if (xd.size() != 3 || yd.size() != 3 || xd[0] != p.d.count || xd[2] != deep || yd[0] != xd[0] || yd[1] != xd[1] ||
      yd[2] != across)
    return invalid("x and y do not fit the codes.");
  const int64_t rows = xd[0] * xd[1];
  if (rd.size() != 3 || rd[0] != xd[0] || rd[1] != xd[1] || rd[2] < deep || rd[2] % 16 ||
      static_cast<int64_t>(found->element_count()) != rows)
    return invalid("the work space does not fit x.");
  const int64_t has = static_cast<int64_t>(given.element_count());
  if (has != 0 && has != rows) return invalid("there must be one scale for every row of x.");
  if (!p.d.scale || (axpy ? p.d.scale_rows : p.d.scale_cols) != 1) return invalid("scales must be those of results.");
  const RoundedRows r{x.untyped_data(), *x_type, rows, deep, rd[2], fmt == 8, has ? given.typed_data() : nullptr,
                      rounded->typed_data(), found->typed_data()};
  if (cudaError_t e = round_rows(stream, r)) return finished(e);
  p.x = r.codes, p.x_scale = r.scale, p.m = xd[1], p.x_pitch = rd[2];
  p.y = y->untyped_data(), p.y_dtype = *y_type;
  p.axpy = axpy != 0;
  return ffi::Error::Success();
}

ffi::Error bytes(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                 ffi::Buffer<ffi::F32> given, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U8>> rounded,
                 ffi::Result<ffi::Buffer<ffi::F32>> found, int64_t fmt, int64_t cols, int64_t block, int64_t axpy, int64_t width,
                 int64_t splits) {
  BytesProduct p{};
  ffi::Error e = round_x(stream, x, codes, scale, given, index, y, rounded, found, fmt, cols, block, axpy, &p);
  if (e.failure()) return e;
  p.width = static_cast<int>(width), p.splits = static_cast<int>(splits);
  return finished(multiply_bytes(stream, p));
}

// The same elsewhere than on Hopper, with a place for the sums of splits.
ffi::Error tiles(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                 ffi::Buffer<ffi::F32> given, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U8>> rounded,
                 ffi::Result<ffi::Buffer<ffi::F32>> found, ffi::Result<ffi::Buffer<ffi::U32>> sums, int64_t fmt, int64_t cols, int64_t block,
                 int64_t axpy, int64_t width, int64_t splits) {
  BytesProduct p{};
  ffi::Error e = round_x(stream, x, codes, scale, given, index, y, rounded, found, fmt, cols, block, axpy, &p);
  if (e.failure()) return e;
  if (splits > 1 && static_cast<int64_t>(sums->element_count()) < splits * static_cast<int64_t>(y->element_count()))
    return invalid("the work space is too small for the splits.");
  p.width = static_cast<int>(width), p.splits = static_cast<int>(splits);
  p.sums = splits > 1 ? sums->typed_data() : nullptr;
  return finished(multiply_tiles(stream, p));
}

ffi::Error ragged(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                  ffi::Buffer<ffi::S32> groups, ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block,
                  int64_t tiles) {
  Product p{};
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &p.d); e.failure()) return e;
  if (ffi::Error e = offsets(offset, scale, &p.d); e.failure()) return e;
  const auto xd = x.dimensions(), yd = y->dimensions();
  if (xd.size() != 2 || yd.size() != 2 || xd[1] != cols || yd[0] != xd[0] || yd[1] != p.d.rows ||
      static_cast<int64_t>(groups.element_count()) != p.d.count)
    return invalid("x, y and the group sizes do not fit the codes.");
  p.m = xd[0], p.groups = groups.typed_data();
  return product(stream, x, *y, p, tiles, 1);
}

ffi::Error dequant(cudaStream_t stream, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                   ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block) {
  Rows r{};
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &r.d); e.failure()) return e;
  if (ffi::Error e = offsets(offset, scale, &r.d); e.failure()) return e;
  if (ffi::Error e = choose_group(index, 1, &r.d); e.failure()) return e;
  const auto type = float_type(*y);
  r.n = r.d.count * r.d.rows;
  if (!type || static_cast<int64_t>(y->element_count()) != r.n * cols) return invalid("y does not fit the codes.");
  r.y = y->untyped_data(), r.y_dtype = *type;
  return finished(decode_rows(stream, r));
}

ffi::Error qgather(cudaStream_t stream, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                   ffi::Buffer<ffi::S32> indices, ffi::Result<ffi::AnyBuffer> y, int64_t fmt, int64_t cols, int64_t block) {
  Rows r{};
  if (ffi::Error e = matrices(codes, scale, fmt, cols, block, &r.d); e.failure()) return e;
  if (ffi::Error e = offsets(offset, scale, &r.d); e.failure()) return e;
  const auto type = float_type(*y);
  r.n = static_cast<int64_t>(indices.element_count()), r.indices = indices.typed_data();
  if (!type || r.d.count != 1 || static_cast<int64_t>(y->element_count()) != r.n * cols)
    return invalid("y does not fit the codes and indices.");
  r.y = y->untyped_data(), r.y_dtype = *type;
  return finished(decode_rows(stream, r));
}

// Rows of a cache, of any rank: codes (..., positions, blocks, bytes) and scale (..., positions, blocks).
struct CacheRows {
  int bits, padded;
  int64_t heads, positions;
};
ffi::Error cache_rows(ffi::AnyBuffer codes, ffi::AnyBuffer scale, int64_t size, CacheRows* rows) {
  const auto s = scale.dimensions();
  const bool bytes = codes.element_type() == ffi::S8;
  if ((!bytes && codes.element_type() != ffi::U8) || scale.element_type() != (bytes ? ffi::F32 : ffi::BF16) || s.size() < 2)
    return invalid("a cache is int8 with float32 scales, or int4 with bfloat16 scales.");
  rows->bits = bytes ? 8 : 4, rows->positions = s[s.size() - 2];
  const int64_t blocks = s[s.size() - 1], padded = bytes ? size : blocks * 64;
  rows->padded = static_cast<int>(padded), rows->heads = 1;
  for (size_t i = 0; i + 2 < s.size(); ++i) rows->heads *= s[i];
  if ((bytes && blocks != 1) || padded < size || rows->positions < 1 || rows->positions >= int64_t{1} << 30 ||
      static_cast<int64_t>(codes.element_count()) != rows->heads * rows->positions * padded * rows->bits / 8)
    return invalid("the codes of a cache do not fit its scales.");
  return ffi::Error::Success();
}

// With rows to write, the results behind y are the arrays of the cache again: codes and scales, in the order of the operands.
// `joined`, the heads of a text: q has, for every text, queries of all of them, then its row of keys, then that of values; 0: q and the
// rows are arrays of their own. `turns` are cosines, then sines, or have no elements.
ffi::Error attention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer new_keys, ffi::AnyBuffer new_values, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::AnyBuffer key_scale, ffi::AnyBuffer value_scale, ffi::Buffer<ffi::S32> place,
                     ffi::Buffer<ffi::S32> index, ffi::Buffer<ffi::F32> turns, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets written,
                     int64_t window, float factor, float cap, int64_t joined, int64_t halves) {
  const auto type = float_type(q), y_type = float_type(*y);
  const auto qd = y->dimensions();
  const int64_t rows_of_text = joined ? (qd.size() == 3 && joined > 0 && qd[0] % joined == 0 ? joined * (qd[1] + 2) * qd[2] : -1) : 0;
  const int64_t given = joined ? (rows_of_text > 0 ? qd[0] / joined * rows_of_text : -1) : static_cast<int64_t>(y->element_count());
  if (qd.size() != 3 || !type || type != y_type || given != static_cast<int64_t>(q.element_count()) || place.element_count() != 1)
    return invalid("q, y and the place do not fit.");
  if (turns.element_count() != 0 && (static_cast<int64_t>(turns.element_count()) != qd[2] || qd[2] % 8))
    return invalid("the angles do not fit q.");
  CacheRows k{}, v{};
  if (ffi::Error e = cache_rows(keys, key_scale, qd[2], &k); e.failure()) return e;
  if (ffi::Error e = cache_rows(values, value_scale, qd[2], &v); e.failure()) return e;
  const bool stacked = index.element_count() != 0;
  if (k.heads != v.heads || k.positions != v.positions || k.padded != v.padded || qd[0] < 1 || qd[1] < 1 || qd[1] > 16 ||
      index.element_count() > 1 || (stacked ? k.heads % qd[0] != 0 : k.heads != qd[0]) || window < 0)
    return invalid("keys, values and q do not fit.");
  if (k.heads >= int64_t{1} << 31) return finished(cudaErrorNotSupported);
  CacheAttention a{};
  a.q = q.untyped_data(), a.y = y->untyped_data(), a.dtype = *type;
  const std::array<ffi::AnyBuffer, 4> cache{keys, values, key_scale, value_scale};
  if (written.size() != 0) {
    for (const ffi::AnyBuffer& rows : {new_keys, new_values}) {
      if (float_type(rows) != type || static_cast<int64_t>(rows.element_count()) != (joined ? 0 : qd[0] * qd[2]))
        return invalid("the rows to write do not fit q.");
    }
    a.new_keys = new_keys.untyped_data(), a.new_values = new_values.untyped_data();
    if (joined) {
      const auto* first = static_cast<const uint8_t*>(q.untyped_data());
      const int64_t item = *type == 0 ? 4 : 2, of_queries = joined * qd[1] * qd[2] * item;
      a.new_keys = first + of_queries, a.new_values = first + of_queries + joined * qd[2] * item;
    }
    for (size_t i = 0; i < 4; ++i) {
      auto again = written.get<ffi::AnyBuffer>(i);
      if (written.size() != 4 || !again.has_value() || (*again)->untyped_data() != cache[i].untyped_data())
        return invalid("rows are written in place, and a result is not its operand.");
    }
  }
  if (joined && written.size() == 0) return invalid("all of a token's rows were given, and none is written.");
  a.row = rows_of_text, a.heads_of_row = static_cast<int>(joined);
  if (turns.element_count() != 0) {
    if (k.padded != qd[2]) return invalid("heads that are padded are not turned.");
    a.cosines = turns.typed_data(), a.sines = a.cosines + qd[2] / 2, a.halves = static_cast<int>(halves);
  }
  const auto bytes = [&](int i) { return static_cast<uint8_t*>(cache[i].untyped_data()); };
  a.keys = bytes(0), a.values = bytes(1), a.key_scale = bytes(2), a.value_scale = bytes(3);
  a.key_bits = k.bits, a.value_bits = v.bits, a.place = place.typed_data();
  const auto heads = static_cast<int32_t>(qd[0]);
  a.stack = {stacked ? index.typed_data() : nullptr, static_cast<int32_t>(k.heads / qd[0]), heads};
  a.group = static_cast<int>(qd[1]), a.size = static_cast<int>(qd[2]), a.padded = k.padded;
  a.positions = static_cast<int>(k.positions), a.window = static_cast<int>(window < 1 << 30 ? window : 1 << 30);
  a.factor = factor, a.cap = cap;
  return finished(attend(stream, a));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaQmatmul, qmatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("tiles")
                                  .Attr<int64_t>("splits"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaWide, wide,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("axpy")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("outs")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("rest")
                                  .Attr<int64_t>("rest_splits"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaOdd, odd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("axpy")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("splits"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaBytes, bytes,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("axpy")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("splits"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaTiles, tiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("axpy")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("splits"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaRagged, ragged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("tiles"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaDequant, dequant,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaQgather, qgather,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("fmt")
                                  .Attr<int64_t>("cols")
                                  .Attr<int64_t>("block"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerCudaAttention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("factor")
                                  .Attr<float>("cap")
                                  .Attr<int64_t>("joined")
                                  .Attr<int64_t>("halves"),
                              {ffi::Traits::kCmdBufferCompatible});
extern "C" int64_t eformer_cuda_abi() { return abi_version; }
#pragma GCC visibility pop

}  // namespace eformer

// The doors of the library: XLA FFI handlers and three plain functions. Checks and loops over matrices, no arithmetic.
#include <atomic>
#include <cstring>
#include <new>

#include "check.h"
#include "kernels.h"
#include "pool.h"

namespace eformer {
namespace {

constexpr int64_t abi_version = 5;

// The scratch memory of a call is the one thing that can run out; the C API of the FFI must not see an exception.
template <class Call>
ffi::Error guarded(Call&& call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eformer: no memory for the scratch space of a product.");
  }
}

struct Operands {
  Type x_type, y_type;
  int64_t m, k, n;
};

// x (batch..., M, K) and y (batch..., M, N) against the matrices of `stack`.
ffi::Error check_operands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Form form, const Stack& stack,
                          size_t batch, Operands& o) {
  const auto xd = x.dimensions(), yd = y.dimensions();
  const auto x_type = float_type(x), y_type = float_type(y);
  const Matrix& d = stack.first;
  o.k = form == Form::dot ? d.cols : d.rows;
  o.n = form == Form::dot ? d.rows : d.cols;
  const bool ranks = xd.size() == batch + 2 && yd.size() == batch + 2;
  if (!x_type || !y_type || !ranks || xd[batch + 1] != o.k || yd[batch + 1] != o.n || xd[batch] != yd[batch] ||
      (batch && (xd[0] != stack.count || yd[0] != stack.count)))
    return invalid("x ", show(x), " and y ", show(y), " do not fit D of ", d.rows, " rows and ", d.cols, " columns, ",
                   "form ", static_cast<int64_t>(form), ".");
  o.x_type = *x_type;
  o.y_type = *y_type;
  o.m = xd[batch];
  return ffi::Error::Success();
}

Product product(const Operands& o, Form form, const Matrix& d, const ffi::AnyBuffer& x, int64_t row, int64_t m,
                const ffi::AnyBuffer& y) {
  const auto* from = static_cast<const std::byte*>(x.untyped_data()) + row * o.k * size_of(o.x_type);
  auto* to = static_cast<std::byte*>(y.untyped_data()) + row * o.n * size_of(o.y_type);
  return {form, from, o.x_type, d, to, o.y_type, m};
}

// A product, or one whose x is rounded: what the kernels are, and the scales of the rows of x, which need not be there.
struct Exact {
  static constexpr auto kernel = &Kernels::matmul;

  Product operator()(const Product& p, int64_t) const { return p; }
};

struct Rounded {
  static constexpr auto kernel = &Kernels::byte_matmul;

  const float* x_scale;
  ByteProduct operator()(const Product& p, int64_t row) const { return {p, x_scale ? x_scale + row : nullptr}; }
};

ffi::Error check_rounded(const Stack& stack, Form form, const Operands& o, int64_t rows, const ffi::Buffer<ffi::F32>& x_scale,
                         Rounded& kind) {
  if (!has_byte_product(stack.first, form))
    return invalid("x cannot be rounded for D of format ", static_cast<int64_t>(stack.first.format), ", form ",
                   static_cast<int64_t>(form), ", blocks of ", stack.first.block, " and such scales.");
  if (o.k > most_byte_products) return invalid("sums of ", o.k, " products are not exact.");
  const auto count = static_cast<int64_t>(x_scale.element_count());
  if (count && count != rows) return invalid("x_scale has ", count, " entries for ", rows, " rows.");
  kind.x_scale = count ? x_scale.typed_data() : nullptr;
  return ffi::Error::Success();
}

// Runs products 0..count-1, each on all threads, or, when they are small and many, each on one.
template <class Kernel, class Make>
ffi::Error run_all(Kernel kernel, Pool& pool, int64_t count, int64_t work_each, Make&& make) {
  constexpr int64_t small = 1 << 20;
  if (count == 1 || work_each > small || pool.workers() == 1)
    return guarded([&] { for (int64_t i = 0; i < count; ++i) kernel(make(i), pool); });
  struct State {
    Kernel kernel;
    Make& make;
    std::atomic<bool> failed{false};
  } state{kernel, make};
  const auto one = [](void* data, int64_t i, int64_t) {
    auto& state = *static_cast<State*>(data);
    Inline here;
    if (guarded([&] { state.kernel(state.make(i), here); }).failure()) state.failed = true;
  };
  const auto all = guarded([&] { pool.loop(count, {one, &state}); });
  return state.failed ? ffi::Error(ffi::ErrorCode::kResourceExhausted, "eformer: no memory for scratch space.") : all;
}

Form form_of(const Attributes& a) { return static_cast<Form>(a.form); }

// Null, or which of the groups that the codes are, each of as many matrices as x has, is multiplied.
using Index = const ffi::Buffer<ffi::S32>*;

ffi::Error choose_group(Index index, const ffi::AnyBuffer& x, Stack& stack) {
  const int64_t count = x.dimensions().size() ? x.dimensions()[0] : 0;
  if (index->element_count() != 1 || count < 1 || stack.count < count || stack.count % count)
    return invalid("an index of ", index->element_count(), " elements and x ", show(x), " do not fit ", stack.count, " matrices.");
  stack.first = stack[std::clamp<int64_t>(*index->typed_data(), 0, stack.count / count - 1) * count];
  stack.count = count;
  return ffi::Error::Success();
}

ffi::Error check_product(const ffi::AnyBuffer& x, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                         const ffi::AnyBuffer* offset, const Factor& factor, const ffi::AnyBuffer& y, const Attributes& a, int64_t batch_of_x, const Kernels*& kernels, Stack& stack, Operands& o,
                         Index index = nullptr) {
  if (auto e = check_kernels(a.isa, kernels); e.failure()) return e;
  if (auto e = check_stack(codes, scale, offset, factor, a, 1, stack); e.failure()) return e;
  if (index) {
    if (auto e = choose_group(index, x, stack); e.failure()) return e;
  }
  return check_operands(x, y, form_of(a), stack, batch_of_x, o);
}

template <class Kind>
ffi::Error run_products(ffi::ThreadPool& threads, const Kernels& kernels, const Attributes& a, const Stack& stack, const Operands& o,
                        const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, const Kind& kind) {
  Pool pool(threads, a.threads);
  return run_all(kernels.*Kind::kernel, pool, stack.count, o.m * o.k * o.n, [&](int64_t i) {
    return kind(product(o, form_of(a), stack[i], x, i * o.m, o.m, y), i * o.m);
  });
}

// Groups of rows of x, each times its own matrix; rows after the last group are zeros.
template <class Kind>
ffi::Error run_groups(ffi::ThreadPool& threads, const Kernels& kernels, const Attributes& a, const Stack& stack, const Operands& o,
                      const ffi::AnyBuffer& x, const ffi::Buffer<ffi::S32>& group_sizes, const ffi::AnyBuffer& y,
                      const Kind& kind) {
  if (static_cast<int64_t>(group_sizes.element_count()) != stack.count)
    return invalid("group_sizes has ", group_sizes.element_count(), " entries for ", stack.count, " matrices.");
  Pool pool(threads, a.threads);
  const int32_t* sizes = group_sizes.typed_data();
  int64_t row = 0;
  auto result = guarded([&] {
    for (int64_t g = 0; g < stack.count && row < o.m; ++g) {
      const int64_t m = std::clamp<int64_t>(sizes[g], 0, o.m - row);
      if (m) (kernels.*Kind::kernel)(kind(product(o, form_of(a), stack[g], x, row, m, y), row), pool);
      row += m;
    }
  });
  const size_t row_bytes = o.n * size_of(o.y_type);
  std::memset(static_cast<std::byte*>(y.untyped_data()) + row * row_bytes, 0, (o.m - row) * row_bytes);
  return result;
}

ffi::Error multiply(ffi::ThreadPool& threads, const ffi::AnyBuffer& x, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                    const Factor& factor, const ffi::AnyBuffer& offset, Index index, const ffi::AnyBuffer& y, const ffi::Dictionary& attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  Stack stack{};
  Operands o;
  if (auto e = check_product(x, codes, scale, &offset, factor, y, a, 1, kernels, stack, o, index); e.failure()) return e;
  return run_products(threads, *kernels, a, stack, o, x, y, Exact{});
}

ffi::Error multiply_rounded(ffi::ThreadPool& threads, const ffi::AnyBuffer& x, const ffi::AnyBuffer& codes,
                            const ffi::AnyBuffer& scale, const Factor& factor, const ffi::Buffer<ffi::F32>& x_scale, Index index,
                            const ffi::AnyBuffer& y, const ffi::Dictionary& attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  Stack stack{};
  Operands o;
  Rounded kind;
  if (auto e = check_product(x, codes, scale, nullptr, factor, y, a, 1, kernels, stack, o, index); e.failure()) return e;
  if (auto e = check_rounded(stack, form_of(a), o, stack.count * o.m, x_scale, kind); e.failure()) return e;
  return run_products(threads, *kernels, a, stack, o, x, y, kind);
}

ffi::Error Qmatmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                   ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes) {
  return multiply(threads, x, codes, scale, factor, offset, nullptr, *y, attributes);
}

ffi::Error StackQmatmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                        ffi::AnyBuffer offset, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Dictionary attributes) {
  return multiply(threads, x, codes, scale, factor, offset, &index, *y, attributes);
}

ffi::Error ByteMatmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                      ffi::Buffer<ffi::F32> x_scale, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes) {
  return multiply_rounded(threads, x, codes, scale, factor, x_scale, nullptr, *y, attributes);
}

ffi::Error StackByteMatmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                           ffi::Buffer<ffi::F32> x_scale, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> y,
                           ffi::Dictionary attributes) {
  return multiply_rounded(threads, x, codes, scale, factor, x_scale, &index, *y, attributes);
}

ffi::Error Ragged(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                  ffi::AnyBuffer offset, ffi::Buffer<ffi::S32> group_sizes, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  Stack stack{};
  Operands o;
  if (auto e = check_product(x, codes, scale, &offset, factor, *y, a, 0, kernels, stack, o); e.failure()) return e;
  return run_groups(threads, *kernels, a, stack, o, x, group_sizes, *y, Exact{});
}

ffi::Error ByteRagged(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor,
                      ffi::Buffer<ffi::S32> group_sizes, ffi::Buffer<ffi::F32> x_scale, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Dictionary attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  Stack stack{};
  Operands o;
  Rounded kind;
  if (auto e = check_product(x, codes, scale, nullptr, factor, *y, a, 0, kernels, stack, o); e.failure()) return e;
  if (auto e = check_rounded(stack, form_of(a), o, o.m, x_scale, kind); e.failure()) return e;
  return run_groups(threads, *kernels, a, stack, o, x, group_sizes, *y, kind);
}

ffi::Error Qgather(ffi::ThreadPool threads, ffi::AnyBuffer codes, ffi::AnyBuffer scale, Factor factor, ffi::AnyBuffer offset,
                   ffi::Buffer<ffi::S32> indices, ffi::Result<ffi::AnyBuffer> rows, ffi::Dictionary attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  Stack stack{};
  if (auto e = check_kernels(a.isa, kernels); e.failure()) return e;
  if (auto e = check_stack(codes, scale, &offset, factor, a, 0, stack); e.failure()) return e;
  const auto dims = rows->dimensions();
  const auto type = float_type(*rows);
  const auto count = static_cast<int64_t>(indices.element_count());
  if (!type || dims.size() != 2 || dims[0] != count || dims[1] != a.cols)
    return invalid("rows ", show(*rows), " must be f32, bf16 or f16 of ", count, " by ", a.cols, ".");
  if (count && !stack.first.rows) return invalid("there are no rows to gather from in ", show(codes), ".");
  Pool pool(threads, a.threads);
  return guarded([&] {
    kernels->gather({stack.first, indices.typed_data(), count, rows->untyped_data(), *type}, pool);
  });
}

ffi::Error Nf4Encode(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::U8>> codes,
                     ffi::Result<ffi::Buffer<ffi::F32>> absmax, ffi::Dictionary attributes) {
  const Attributes a(attributes);
  const Kernels* kernels;
  if (auto e = check_kernels(a.isa, kernels); e.failure()) return e;
  const auto type = float_type(x);
  const auto xd = x.dimensions(), cd = codes->dimensions(), ad = absmax->dimensions();
  if (!type || xd.size() != 2) return invalid("x ", show(x), " must be f32, bf16 or f16 of rank 2.");
  if (a.block < 2 || a.block % 2) return invalid("block=", a.block, " must be even and positive.");
  const int64_t blocks = (xd[1] + a.block - 1) / a.block;
  if (cd.size() != 3 || cd[0] != xd[0] || cd[1] != blocks || cd[2] * 2 != a.block || ad.size() != 2 ||
      ad[0] != xd[0] || ad[1] != blocks)
    return invalid("codes and absmax of x ", show(x), " must be [", xd[0], ", ", blocks, ", ", a.block / 2, "] and [",
                   xd[0], ", ", blocks, "].");
  Pool pool(threads, a.threads);
  return guarded([&] {
    kernels->encode({x.untyped_data(), *type, xd[0], xd[1], a.block, codes->typed_data(), absmax->typed_data()}, pool);
  });
}

}  // namespace
}  // namespace eformer

// What a handler takes is read off its function; only that its first parameter is the pool of the call has to be said.
template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = ThreadPool;
};

// The library is compiled with hidden visibility; these names are what it exports.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerQmatmul, eformer::Qmatmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerStackQmatmul, eformer::StackQmatmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerRagged, eformer::Ragged);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerByteMatmul, eformer::ByteMatmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerStackByteMatmul, eformer::StackByteMatmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerByteRagged, eformer::ByteRagged);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerQgather, eformer::Qgather);
XLA_FFI_DEFINE_HANDLER_SYMBOL(EformerNf4Encode, eformer::Nf4Encode);

extern "C" int64_t eformer_cpu_isa() { return eformer::best_isa(); }
extern "C" int64_t eformer_cpu_abi() { return eformer::abi_version; }
extern "C" int64_t eformer_cpu_formats() { return eformer::format_count; }

#pragma GCC visibility pop

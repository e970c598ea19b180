// Rows of bits (int2, int3, int5, int6) as signed bytes, the storage of INT8 in blocks: those kernels do the rest.
//
// Eight codes are a number of `bits` bytes, the first code in its high bits; a row is one stretch of such numbers.
#pragma once

#include <cstring>

#include "scalar.h"
#include "simd/simd.h"

namespace eformer::EFORMER_ISA {

class Unpacker {
 public:
  static constexpr int columns = 4 * lanes;  // codes of one vector of bytes

  // Of 8 bits there is nothing to unpack.
  explicit Unpacker(int bits) : bits_(bits) {
    if (bits == 8) return;
    alignas(64) uint8_t order[columns];
    for (int i = 0; i < columns; ++i) {
      const int byte = bits - 1 - i % 8;  // of the number, which is turned around
      order[i] = static_cast<uint8_t>(byte < 0 ? 0x80 : (whole_vector ? i / 8 : i / 8 % 2) * bits + byte);
    }
    order_ = load_bits(order);
#if defined(__AVX512VBMI__)
    for (int i = 0; i < columns; ++i) order[i] = static_cast<uint8_t>(bits * (7 - i % 8));
    starts_ = load_bits(order);
    mask_ = broadcast_bits(((1u << bits) - 1) * 0x01010101u);
    needed_ = (uint64_t{1} << 8 * bits) - 1;
#endif
    zeros_ = broadcast_bits((1u << (bits - 1)) * 0x01010101u);
  }

  int bits() const { return bits_; }
  // Bytes of `count` codes, a multiple of 8.
  int64_t bytes(int64_t count) const { return count * bits_ / 8; }

  // Writes whole vectors: `count` codes and what follows them, zeros' codes behind `end`, where the row ends.
  void operator()(const uint8_t* from, const uint8_t* end, int64_t count, uint8_t* to) const {
    const Unpacker here = *this;  // in registers
    const int64_t step = bytes(columns);
    for (int64_t i = 0; i < count; i += columns, from += step, to += columns) store_bits(to, here.vector(from, end));
  }

  // One vector of codes.
  INLINE I vector(const uint8_t* from, const uint8_t* end) const {
    if (end - from >= bytes(columns) + overread) [[likely]] return whole(from);
    uint8_t rest[bytes_at_most] = {};
    if (end > from) std::memcpy(rest, from, min(bytes(columns), end - from));
    return whole(rest);
  }

 private:
#if defined(__AVX512VBMI__)
  static constexpr bool whole_vector = true;
  static constexpr int overread = 0, bytes_at_most = 64;
  I starts_, mask_;
  uint64_t needed_;

  INLINE I whole(const uint8_t* p) const {
    const I numbers = _mm512_permutexvar_epi8(order_, _mm512_maskz_loadu_epi8(needed_, p));
    return _mm512_sub_epi8(bit_and(_mm512_multishift_epi64_epi8(starts_, numbers), mask_), zeros_);
  }
#else
  static constexpr bool whole_vector = false;
  static constexpr int overread = 16, bytes_at_most = columns + overread;
  using Q = uint64_t __attribute__((vector_size(columns)));

  // The upper half of every number goes down, the lower half up, until each code has a byte.
  INLINE I whole(const uint8_t* p) const {
    const uint64_t ones = ~uint64_t{0}, half = ~(ones << 4 * bits_), quarter = ~(ones << 2 * bits_), one = ~(ones << bits_);
    const uint64_t quarters = quarter * 0x0000000100000001, each = one * 0x0001000100010001;
    Q v = numbers(p);
    v = v >> 4 * bits_ | (v & half) << 32;
    v = (v >> 2 * bits_ & quarters) | (v & quarters) << 16;
    v = (v >> bits_ & each) | (v & each) << 8;
    constexpr uint64_t top = 0x8080808080808080;  // a difference of bytes that borrows nothing
    v = ((v | top) - bit_cast<Q>(zeros_)) ^ top;
    return bit_cast<I>(v);
  }

#if defined(__AVX512F__)
  INLINE Q numbers(const uint8_t* p) const {
    const auto two = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i * bits_)); };
    I v = _mm512_castsi128_si512(two(0));
    v = _mm512_inserti32x4(v, two(1), 1);
    v = _mm512_inserti32x4(_mm512_inserti32x4(v, two(2), 2), two(3), 3);
    return bit_cast<Q>(_mm512_shuffle_epi8(v, order_));
  }
#elif defined(__AVX2__)
  INLINE Q numbers(const uint8_t* p) const {
    const auto two = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i * bits_)); };
    return bit_cast<Q>(_mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(1), 1), order_));
  }
#else
  INLINE Q numbers(const uint8_t* p) const {
    Q v;
    for (int i = 0; i < columns / 8; ++i) {
      uint64_t number;
      std::memcpy(&number, p + i * bits_, 8);
      v[i] = __builtin_bswap64(number) >> (64 - 8 * bits_);
    }
    return v;
  }
#endif
#endif

  int bits_;
  I order_, zeros_;
};

}  // namespace eformer::EFORMER_ISA

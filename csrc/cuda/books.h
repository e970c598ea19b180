// The 16 values of the formats of 4 bits, for the launching side, which hands them to the kernels.
#pragma once

#include <vector_types.h>
#include <cuda_fp16.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace eformer {

struct Book {
  float v[16];
};

// By the number of the format; zeros where it has none.
inline const Book& book_of(int fmt) {
  static const Book nf4{{-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                         -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                         0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                         0.7229568362236023f, 1.0f}};
  static const Book int4{{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};
  static const Book iq4_nl{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
  static const Book fp4{{0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f}};
  static const Book none{};
  return fmt == 0 ? nf4 : fmt == 4 ? int4 : fmt == 5 ? iq4_nl : fmt == 6 ? fp4 : none;
}

// The codebook of NF4 in f16, the two halves of four words for two times four places: eight roundings, whose mean is a
// value within a sixteenth of the last place; for the factor it is within 4e-7 of all values, whatever the weights are:
// normal, uniform, with long tails, in blocks of any size.
constexpr float kRoughFactor = 1.3184108f;
struct RoughBook {
  uint4 v[16];
};
inline const RoughBook& rough_book() {
  static const RoughBook made = [] {
    RoughBook book{};
    constexpr int kOrder[4] = {0, 6, 3, 5};  // of a place; the second of two columns gets 7 minus that
    for (int c = 0; c < 16; ++c) {
      const double value = static_cast<double>(book_of(0).v[c]) * kRoughFactor;
      uint32_t words[4] = {0, 0, 0, 0};
      for (int i = 0; i < 8 && value != 0; ++i) {
        const int order = i % 2 ? 7 - kOrder[i / 2] : kOrder[i / 2];
        int exponent;
        std::frexp(value, &exponent);
        const double rounded = std::ldexp(std::floor(std::ldexp(value, 11 - exponent) + (order + 0.5) / 8), exponent - 11);
        const __half_raw bits = __half(static_cast<float>(rounded));
        words[i / 2] |= static_cast<uint32_t>(bits.x) << (i % 2 * 16);
      }
      book.v[c] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return book;
  }();
  return made;
}

// The 16 values in bf16, rounded in sixteen ways: eight words of two places each, whose mean is a value within a 32nd of the
// last place. Times the factor for NF4, it is within 4e-6 of all values. The others are exact in bf16, whatever the place.
constexpr float kFineFactor = 1.2497f;
struct FineBook {
  uint4 v[16][2];
};
inline const FineBook& fine_book_of(int fmt) {
  static const auto make = [](int format) {
    FineBook book{};
    constexpr int kOrder[8] = {0, 12, 6, 10, 2, 14, 4, 8};  // of a place; the second of two stored rows gets 15 minus that
    for (int c = 0; c < 16; ++c) {
      const double value = static_cast<double>(book_of(format).v[c]) * (format == 0 ? kFineFactor : 1.0);
      uint32_t words[8] = {};
      for (int i = 0; i < 16 && value != 0; ++i) {
        const int order = i % 2 ? 15 - kOrder[i / 2] : kOrder[i / 2];
        int exponent;
        std::frexp(value, &exponent);
        const double rounded = std::ldexp(std::floor(std::ldexp(value, 8 - exponent) + (order + 0.5) / 16), exponent - 8);
        const float single = static_cast<float>(rounded);
        uint32_t bits;
        std::memcpy(&bits, &single, 4);
        // Two stored rows of a lane are in the first four words, two in the others.
        words[i / 4 + (i / 2 % 2) * 4] |= bits >> 16 << (i % 2 * 16);
      }
      book.v[c][0] = make_uint4(words[0], words[1], words[2], words[3]);
      book.v[c][1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
    return book;
  };
  static const FineBook books[4] = {make(0), make(4), make(5), make(6)};
  return books[fmt == 0 ? 0 : fmt - 3];
}

}  // namespace eformer

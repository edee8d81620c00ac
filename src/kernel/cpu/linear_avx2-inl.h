// SPDX-License-Identifier: Apache-2.0
// The linear family for AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

constexpr int kTileRows = 3, kTileVectors = 2;  // with two chains, 12 sums in 16 registers
inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
/// sums[j] = all lanes of x[j].
inline void sum4(const F (&x)[4], float (&sums)[4]) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline void arrange(float*, std::int64_t) noexcept {}

/// Through fp16, which has e4m3's numbers with 8 added to the exponent; NaN would become 480.
//   e4m3                s eeee mmm
//   sign-extended, << 7 s s eeee mmm 0000000
//   fp16, x 2^-8        s 0 eeee mmm 0000000
template <>
struct Reader<Codes::f8_e4m3> {
  static constexpr bool kScalesSum = true;
  explicit Reader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    largest_ = _mm_max_epu8(largest_, _mm_and_si128(bytes, _mm_set1_epi8(0x7F)));
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(~0x4000)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth);
  }
  F value(F sum) const {
    const __m128i nan = _mm_cmpeq_epi8(largest_, _mm_set1_epi8(0x7F));
    return _mm_testz_si128(nan, nan) ? sum * 256.0f : splat(__builtin_nanf(""));
  }

 private:
  __m128i largest_ = _mm_setzero_si128();
};

/// e5m2 is the upper half of an fp16 number.
template <>
struct Reader<Codes::f8_e5m2> {
  static constexpr bool kScalesSum = true;
  explicit Reader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth);
  }
  F value(F sum) const { return sum; }
};

/// Eight nibbles of a 32-bit word, one shift each, in order:
//   lane   0   1   2   3   4   5   6   7
//   shift  4   0  12   8  20  16  28  24
// vpermps reads three bits of a lane, and the fourth, moved to the sign, picks the half of the
// table.
struct NibbleReader {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values)
      : values_{_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)} {
    set_scale(1.0f);
  }
  void set_scale(float scale) {
    set_scale(scale, [](F x) { return x; });
  }
  template <class Round>
  void set_scale(float scale, Round round) {
    for (int i = 0; i < 2; ++i) table_[i] = round(_mm256_mul_ps(values_[i], _mm256_set1_ps(scale)));
  }
  F read(const std::uint8_t* codes) {
    const __m256i kDown = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    const __m256i kUp = _mm256_setr_epi32(24, 28, 16, 20, 8, 12, 0, 4);
    const __m256i word = _mm256_set1_epi32(load_as<int>(codes));
    const __m256i index = _mm256_srlv_epi32(word, kDown);
    const __m256 low = _mm256_permutevar8x32_ps(table_[0], index);
    const __m256 high = _mm256_permutevar8x32_ps(table_[1], index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_sllv_epi32(word, kUp)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }

 private:
  __m256 values_[2], table_[2];
};
template <>
struct Reader<Codes::nf4> : NibbleReader {
  using NibbleReader::NibbleReader;
};
template <>
struct Reader<Codes::fp4> : NibbleReader {
  using NibbleReader::NibbleReader;
};

}  // namespace
}  // namespace stowage
#include "kernel/cpu/linear-inl.h"

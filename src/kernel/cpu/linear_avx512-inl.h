// SPDX-License-Identifier: Apache-2.0
// The linear family for AVX-512 (F, BW, DQ, VL).
#pragma once
#include <immintrin.h>

#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

constexpr int kTileRows = 6, kTileVectors = 2;  // with two chains, 24 sums in 32 registers
inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
/// sums[j] = all lanes of x[j]: halves of each first, then as quarters of one register.
inline void sum4(const F (&x)[4], float (&sums)[4]) {
  __m256 half[4];
  for (int j = 0; j < 4; ++j)
    half[j] = _mm256_add_ps(_mm512_castps512_ps256(x[j]), _mm512_extractf32x8_ps(x[j], 1));
  const __m256 pairs =
      _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

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
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    note(_mm512_zextsi128_si512(bytes));
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(~0x4000)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    note(_mm512_loadu_si512(codes));
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const __m256i*>(codes) + half;
      __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from)), 7);
      words = _mm512_and_si512(words, _mm512_set1_epi16(~0x4000));
      w[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
      w[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
    }
  }
  F value(F sum) const {
    const bool nan = _mm512_cmpeq_epi8_mask(largest_, _mm512_set1_epi8(0x7F)) != 0;
    return nan ? splat(__builtin_nanf("")) : sum * 256.0f;
  }

 private:
  void note(__m512i bytes) {
    largest_ = _mm512_max_epu8(largest_, _mm512_and_si512(bytes, _mm512_set1_epi8(0x7F)));
  }
  __m512i largest_ = _mm512_setzero_si512();
};

/// e5m2 is the upper half of an fp16 number.
template <>
struct Reader<Codes::f8_e5m2> {
  static constexpr bool kScalesSum = true;
  explicit Reader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth);
  }
  F value(F sum) const { return sum; }
};

/// Sixteen nibbles, those of two 32-bit words a and b in turn, so that one shift finds them all:
//   lane   0   1   2   3   4   5  ...  14  15
//   word   a   b   a   b   a   b       a   b
//   shift  4   4   0   0  12  12      24  24     element  0 8 1 9 2 10 ... 7 15 (arrange)
// The table is one register, and vpermps reads the low four bits of a lane: no mask.
struct NibbleReader {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values) : values_(_mm512_loadu_ps(values)), table_(values_) {}
  void set_scale(float scale) {
    set_scale(scale, [](F x) { return x; });
  }
  template <class Round>
  void set_scale(float scale, Round round) {
    table_ = round(_mm512_mul_ps(values_, _mm512_set1_ps(scale)));
  }
  F read(const std::uint8_t* codes) {
    const __m512i kShifts =
        _mm512_setr_epi32(4, 4, 0, 0, 12, 12, 8, 8, 20, 20, 16, 16, 28, 28, 24, 24);
    const __m512i words = _mm512_set1_epi64(load_as<long long>(codes));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, kShifts), table_);
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }

 private:
  __m512 values_, table_;
};
template <>
struct Reader<Codes::nf4> : NibbleReader {
  using NibbleReader::NibbleReader;
};
template <>
struct Reader<Codes::fp4> : NibbleReader {
  using NibbleReader::NibbleReader;
};

inline void arrange(float* x, std::int64_t n) noexcept {
  const __m512i kOrder = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  for (std::int64_t i = 0; i < n; i += 16)
    _mm512_storeu_ps(x + i, _mm512_permutexvar_ps(kOrder, _mm512_loadu_ps(x + i)));
}

}  // namespace
}  // namespace stowage
#include "kernel/cpu/linear-inl.h"

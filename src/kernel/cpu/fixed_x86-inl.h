// SPDX-License-Identifier: Apache-2.0
// Eight numbers of x: a register of 256 bits.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

using Floats = __m256;
using Numbers = __m256i;

/// The low byte of each, the first four of them to `first`, the others to `last`.
inline void put_bytes(Numbers numbers, std::int8_t* first, std::int8_t* last) {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_cvtsi32_si128(0x0C080400));
  const __m256i fours = _mm256_shuffle_epi8(numbers, low);
  store_as(first, _mm_cvtsi128_si32(_mm256_castsi256_si128(fours)));
  store_as(last, _mm_cvtsi128_si32(_mm256_extracti128_si256(fours, 1)));
}
inline std::int32_t total(Numbers numbers) {
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
  const __m128i two = _mm_hadd_epi32(four, four);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
}

/// Eight numbers of kIn.
template <Dtype kIn>
Floats load_eight(const void* x) {
  const __m128i eight = load_as<__m128i>(x);
  if constexpr (kIn == Dtype::f16) return _mm256_cvtph_ps(eight);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
inline std::uint32_t largest_magnitude(Floats x) {
  const __m256i sizes = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
  const __m128i four =
      _mm_max_epi32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<std::uint32_t>(
      _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
}
inline Floats join_fours(const float* first, const float* last) {
  return _mm256_loadu2_m128(last, first);
}
/// x times a power of two, to the nearest integers.
inline Numbers integers_of(Floats x, float power) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(power)));
}
/// X = 256 high + low.
inline Numbers high_of(Numbers numbers) {
  return _mm256_srai_epi32(_mm256_add_epi32(numbers, _mm256_set1_epi32(128)), 8);
}
inline Numbers low_of(Numbers numbers, Numbers high) {
  return _mm256_sub_epi32(numbers, _mm256_slli_epi32(high, 8));
}
/// Those at even places, then the others.
inline Numbers part(Numbers numbers) {
  return _mm256_permutevar8x32_epi32(numbers, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

}  // namespace
}  // namespace stowage

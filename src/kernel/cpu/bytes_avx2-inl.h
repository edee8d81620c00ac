// SPDX-License-Identifier: Apache-2.0
// Registers of 256 bits.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

using Bytes = __m256i;
inline Bytes spread_byte(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
inline Bytes repeat(const std::int8_t* sixteen) {
  return _mm256_broadcastsi128_si256(load_as<__m128i>(sixteen));
}
inline Bytes low_nibbles(Bytes x) { return x & spread_byte(15); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
template <int kBits>
Bytes left_in_lanes(Bytes x) {
  return _mm256_slli_epi32(x, kBits);
}
inline Bytes look_up(Bytes tables, Bytes places) { return _mm256_shuffle_epi8(tables, places); }
inline Bytes low_words(Bytes low, Bytes high) { return _mm256_unpacklo_epi8(low, high); }
inline Bytes high_words(Bytes low, Bytes high) { return _mm256_unpackhi_epi8(low, high); }
inline Bytes add_lanes(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline F to_floats(Bytes lanes) { return _mm256_cvtepi32_ps(lanes); }
inline F less_product(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
/// What is added to signed codes so that they are digits.
constexpr int kMoreThanSigned = 128;
/// Whether codes of a byte in long groups are quicker so than in fp32, one conversion for each.
constexpr bool kWholeInLong = false;
#if defined(__AVXVNNI__)
inline Bytes add_fours(Bytes sums, Bytes digits, Bytes bytes) {
  return _mm256_dpbusd_avx_epi32(sums, digits, bytes);
}
inline Bytes add_twos(Bytes sums, Bytes a, Bytes b) { return _mm256_dpwssd_avx_epi32(sums, a, b); }
#else
/// Two products of digits and bytes to a word, of both.
inline Bytes products_in_words(Bytes a, Bytes x, Bytes b, Bytes y) {
  return _mm256_add_epi16(_mm256_maddubs_epi16(a, x), _mm256_maddubs_epi16(b, y));
}
/// To each of the sums: two words, times a factor.
template <int kFactor>
Bytes add_words(Bytes sums, Bytes words) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(kFactor)));
}
inline Bytes add_twos(Bytes sums, Bytes a, Bytes b) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
#endif

template <int kGroups>
F spread(__m256 both) {  // which has the numbers in each half
  const __m256i which = kGroups == 2 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)
                                     : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  return _mm256_permutevar_ps(both, which);
}
template <int kGroups>
F spread(const float* numbers) {
  if constexpr (kGroups <= 1) return _mm256_broadcast_ss(numbers);
  if constexpr (kGroups == 2)
    return spread<2>(_mm256_castpd_ps(_mm256_set1_pd(load_as<double>(numbers))));
  if constexpr (kGroups == 4)
    return spread<4>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(numbers)));
}
template <int kGroups>
F spread(const std::int8_t* numbers) {
  if constexpr (kGroups <= 1) return splat(static_cast<float>(*numbers));
  std::int32_t some = 0;
  __builtin_memcpy(&some, numbers, kGroups);
  const __m128 made = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(some)));
  return spread<kGroups>(_mm256_set_m128(made, made));
}

}  // namespace
}  // namespace stowage

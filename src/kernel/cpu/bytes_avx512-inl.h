// SPDX-License-Identifier: Apache-2.0
// Registers of 512 bits.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

using Bytes = __m512i;
inline Bytes spread_byte(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
inline Bytes repeat(const std::int8_t* sixteen) {
  return _mm512_broadcast_i32x4(load_as<__m128i>(sixteen));
}
inline Bytes low_nibbles(Bytes x) { return x & spread_byte(15); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
template <int kBits>
Bytes left_in_lanes(Bytes x) {
  return _mm512_slli_epi32(x, kBits);
}
inline Bytes look_up(Bytes tables, Bytes places) { return _mm512_shuffle_epi8(tables, places); }
inline Bytes low_words(Bytes low, Bytes high) { return _mm512_unpacklo_epi8(low, high); }
inline Bytes high_words(Bytes low, Bytes high) { return _mm512_unpackhi_epi8(low, high); }
inline Bytes add_lanes(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline F to_floats(Bytes lanes) { return _mm512_cvtepi32_ps(lanes); }
inline F less_product(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
/// To each of the sums: four digits times four bytes.
inline Bytes add_fours(Bytes sums, Bytes digits, Bytes bytes) {
  return _mm512_dpbusd_epi32(sums, digits, bytes);
}
/// What is added to signed codes so that they are digits.
constexpr int kMoreThanSigned = 128;
/// Whether codes of a byte in long groups are quicker so than in fp32, one conversion for each.
constexpr bool kWholeInLong = false;
/// To each of the sums: two words times two.
inline Bytes add_twos(Bytes sums, Bytes a, Bytes b) { return _mm512_dpwssd_epi32(sums, a, b); }

template <int kGroups>
__m512i places_of_groups() {
  I places;
  for (int i = 0; i < kWidth; ++i) places[i] = i * kGroups / kWidth;
  return reinterpret_cast<__m512i>(places);
}
/// A number of each group of a block, in the lanes of its columns.
template <int kGroups>
F spread(const float* numbers) {
  const __m512i places = places_of_groups<kGroups>();
  if constexpr (kGroups <= 1) return _mm512_set1_ps(*numbers);
  if constexpr (kGroups == 2)
    return _mm512_permutevar_ps(_mm512_castpd_ps(_mm512_set1_pd(load_as<double>(numbers))), places);
  if constexpr (kGroups == 4)
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(numbers)), places);
  if constexpr (kGroups == 8)
    return _mm512_permutexvar_ps(places, _mm512_castps256_ps512(_mm256_loadu_ps(numbers)));
}
/// The same of integers.
template <int kGroups>
F spread(const std::int8_t* numbers) {
  if constexpr (kGroups <= 1) return splat(static_cast<float>(*numbers));
  std::int64_t some = 0;
  __builtin_memcpy(&some, numbers, kGroups);
  const __m256 eight = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(some)));
  return _mm512_permutexvar_ps(places_of_groups<kGroups>(), _mm512_castps256_ps512(eight));
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Registers of bytes and words as wide as F, of 256 bits or 512: what looks them up and multiplies
// them into lanes of 32 bits, and numbers of groups in the lanes of their columns.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

#if defined(__AVX512VNNI__)
using Bytes = __m512i;
inline Bytes spread_byte(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
inline Bytes repeat(__m128i sixteen) { return _mm512_broadcast_i32x4(sixteen); }
template <int kBits>
Bytes right_in_words(Bytes x) {
  return _mm512_srli_epi16(x, kBits);
}
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
#else
using Bytes = __m256i;
inline Bytes spread_byte(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
inline Bytes repeat(__m128i sixteen) { return _mm256_broadcastsi128_si256(sixteen); }
template <int kBits>
Bytes right_in_words(Bytes x) {
  return _mm256_srli_epi16(x, kBits);
}
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
#if defined(__AVXVNNI__)
inline Bytes add_fours(Bytes sums, Bytes digits, Bytes bytes) {
  return _mm256_dpbusd_avx_epi32(sums, digits, bytes);
}
inline Bytes add_twos(Bytes sums, Bytes a, Bytes b) { return _mm256_dpwssd_avx_epi32(sums, a, b); }
#else
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
#endif
static_assert(sizeof(Bytes) == sizeof(F));

/// The same of a block that ends after its first half: no more numbers are read.
template <int kGroups, class T>
F spread_half(const T* numbers) {
  T some[kGroups < 1 ? 1 : kGroups] = {};
  __builtin_memcpy(some, numbers, sizeof(T) * (kGroups < 2 ? 1 : kGroups / 2));
  return spread<kGroups>(some);
}

}  // namespace
}  // namespace stowage

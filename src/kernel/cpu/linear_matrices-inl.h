// SPDX-License-Identifier: Apache-2.0
// What products of matrices of bf16 share, whatever multiplies them, in vectors of 512 bits: rows
// put in pairs, and sums turned.
#pragma once
#include <immintrin.h>

#include "kernel/linear.h"

namespace stowage {
namespace {

constexpr std::int64_t kTile = kMatrixTile;  // rows, and columns of sums

// A block at a time: all numbers of one row are in the low halves of its lanes.
void pair_rows(const std::uint16_t* even, const std::uint16_t* odd, std::int64_t n,
               std::uint16_t* out, std::int64_t stride) noexcept {
  for (std::int64_t i = 0; i < n; i += kTile, out += stride) {
    const auto* low = reinterpret_cast<const __m256i*>(even + i);
    const auto* high = reinterpret_cast<const __m256i*>(odd + i);
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(high));
    _mm512_storeu_si512(out, _mm512_or_si512(_mm512_cvtepu16_epi32(_mm256_loadu_si256(low)),
                                             _mm512_slli_epi32(words, 16)));
  }
}

/// Four numbers of each of 16 rows, of which every fourth shares a vector.
[[gnu::always_inline]] inline __m512 load_fourths(const float* c, std::int64_t stride) {
  const auto at = [&](int i) __attribute__((always_inline)) {
    return _mm_loadu_ps(c + 4 * i * stride);
  };
  __m512 lanes = _mm512_castps128_ps512(at(0));
  lanes = _mm512_mask_broadcast_f32x4(lanes, 0x00F0, at(1));
  lanes = _mm512_mask_broadcast_f32x4(lanes, 0x0F00, at(2));
  return _mm512_mask_broadcast_f32x4(lanes, 0xF000, at(3));
}

bool turn_sums(const TurnTask& task) noexcept {
  constexpr int kInfiniteOrNaN = 0x99;  // of VFPCLASSPS: quiet NaN, both infinities, signalling NaN
  __mmask16 bad = 0;
  for (std::int64_t i = 0; i < task.rows; i += kTile) {
    const __m512 scale = _mm512_loadu_ps(task.scales + i);
    const __mmask16 scaled = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    for (std::int64_t j = 0; j < kTile; j += 4) {
      const float* c = task.c + i * task.c_stride + j;
      const __m512 a = load_fourths(c, task.c_stride);
      const __m512 b = load_fourths(c + task.c_stride, task.c_stride);
      const __m512 d = load_fourths(c + 2 * task.c_stride, task.c_stride);
      const __m512 e = load_fourths(c + 3 * task.c_stride, task.c_stride);
      const __m512d ab0 = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
      const __m512d ab1 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
      const __m512d de0 = _mm512_castps_pd(_mm512_unpacklo_ps(d, e));
      const __m512d de1 = _mm512_castps_pd(_mm512_unpackhi_ps(d, e));
      const __m512d columns[] = {_mm512_unpacklo_pd(ab0, de0), _mm512_unpackhi_pd(ab0, de0),
                                 _mm512_unpacklo_pd(ab1, de1), _mm512_unpackhi_pd(ab1, de1)};
      for (int t = 0; t < 4; ++t) {
        const __m512 sums = _mm512_mul_ps(_mm512_castpd_ps(columns[t]), scale);
        bad |= _mm512_mask_fpclass_ps_mask(scaled, sums, kInfiniteOrNaN);
        _mm512_storeu_ps(task.out + (j + t) * task.out_stride + i, sums);
      }
    }
  }
  return bad == 0;
}

}  // namespace
}  // namespace stowage

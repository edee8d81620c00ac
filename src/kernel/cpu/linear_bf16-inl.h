// SPDX-License-Identifier: Apache-2.0
// Products of bf16 in AVX512-BF16: two columns to a lane, summed in fp32. Here are those of any
// weight whose rows were widened to bf16 before.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/streams-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

constexpr __mmask16 kUpper = 0xFF00;  // the upper half of the lanes

[[gnu::always_inline]] inline __m512bh load(const std::uint16_t* x) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(x));
}

__m512 add_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
/// y[r] += all lanes of sums[r].
template <int kRows>
[[gnu::always_inline]] inline void add_totals(const __m512 (&sums)[kRows], float* y) {
  if constexpr (kRows == 4) {
    const __m512d ab = _mm512_castps_pd(add_pairs(sums[0], sums[1]));
    const __m512d cd = _mm512_castps_pd(add_pairs(sums[2], sums[3]));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(y, _mm_add_ps(_mm_loadu_ps(y), four));
  } else {
    for (int r = 0; r < kRows; ++r) y[r] += _mm512_reduce_add_ps(sums[r]);
  }
}

constexpr int kMostVectors = 6;  // rows of x, with four of weight: 24 sums in 32 registers

template <int kRows, int kVectors>
void add_pairs_of(const PairsTask& task, std::int64_t row, std::int64_t j) {
  const std::uint16_t *w = task.w + row * task.w_stride, *x = task.x + j * task.x_stride;
  __m512 sums[kVectors][kRows];  // in registers, once all loops over them are unrolled
#pragma GCC unroll 6
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[v][r] = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < task.columns; k += kPairsPad) {
    __m512bh values[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) values[r] = load(w + r * task.w_stride + k);
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) {
      const __m512bh vector = load(x + v * task.x_stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], values[r], vector);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const __m512 scale = _mm512_set1_ps(task.scales[row + r]);
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) sums[v][r] = _mm512_mul_ps(sums[v][r], scale);
  }
#pragma GCC unroll 6
  for (int v = 0; v < kVectors; ++v)
    add_totals<kRows>(sums[v], task.y + (j + v) * task.y_stride + row);
}

template <int kRows>
void add_rows_of_pairs(const PairsTask& task, std::int64_t row) {
  constexpr decltype(&add_pairs_of<kRows, 1>) kParts[kMostVectors] = {
      &add_pairs_of<kRows, 1>, &add_pairs_of<kRows, 2>, &add_pairs_of<kRows, 3>,
      &add_pairs_of<kRows, 4>, &add_pairs_of<kRows, 5>, &add_pairs_of<kRows, 6>};
  std::int64_t j = 0;
  for (std::int64_t parts = (task.m + kMostVectors - 1) / kMostVectors; parts > 0; --parts) {
    const std::int64_t count = (task.m - j + parts - 1) / parts;
    kParts[count - 1](task, row, j);
    j += count;
  }
}

void add_pairs(const PairsTask& task) noexcept {
  std::int64_t row = 0;
  for (; row + 4 <= task.rows; row += 4) add_rows_of_pairs<4>(task, row);
  for (; row < task.rows; ++row) add_rows_of_pairs<1>(task, row);
}

}  // namespace
}  // namespace stowage

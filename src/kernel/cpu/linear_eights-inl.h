// SPDX-License-Identifier: Apache-2.0
// Products of codes of a byte with more rows of bf16 than linear_float8-inl.h takes, in pairs of
// bf16. Codes become numbers in registers, again for each four, six or eight rows of x: shuffles
// and conversions have units of their own, and pass while others multiply. With two rows of weight
// these are sixteen sums, and x, of which a few columns stay in the L1 cache, is read once for
// both.
#pragma once
#include "kernel/cpu/linear_float8-inl.h"

namespace stowage {
namespace {

/// What Float8Tables are for codes of fp8.
struct Int8Numbers {
  [[gnu::always_inline]] void look_up(const std::uint8_t* codes, __m512bh& first,
                                      __m512bh& last) const {
    const auto sixteen = [&](int i) __attribute__((always_inline)) {
      const auto* from = reinterpret_cast<const __m128i*>(codes + 16 * i);
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
    };
    first = _mm512_cvtne2ps_pbh(sixteen(1), sixteen(0));
    last = _mm512_cvtne2ps_pbh(sixteen(3), sixteen(2));
  }
};

constexpr int kRowsOfEights = 2;  // of weight
constexpr float kUnscaled = 1.0f;
constexpr std::int64_t kRowsAhead = 4;  // codes that are asked for lie so many rows further

/// Of rows of x and of weight: in registers, once all loops over them are unrolled.
template <int kVectors>
using Sums = __m512[kVectors][kRowsOfEights];

template <int kVectors>
[[gnu::always_inline]] inline void clear(Sums<kVectors>& sums) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
    for (int r = 0; r < kRowsOfEights; ++r) sums[v][r] = _mm512_setzero_ps();
}

/// Of 64 columns from k on, whose numbers come in two halves.
template <int kVectors>
[[gnu::always_inline]] inline void add_products(Sums<kVectors>& sums,
                                                const __m512bh (&w)[kRowsOfEights][2],
                                                const Bf16DotTask& task, std::int64_t k) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m512bh x = load(task.x + v * task.x_stride + k + 32 * half);
#pragma GCC unroll 2
      for (int r = 0; r < kRowsOfEights; ++r)
        sums[v][r] = _mm512_dpbf16_ps(sums[v][r], w[r][half], x);
    }
}

/// y[v, row + r] += the lanes of sums[v][r], for v < m and r < count.
template <int kVectors>
[[gnu::always_inline]] inline void add_totals_of_eights(const Sums<kVectors>& sums,
                                                        const Bf16DotTask& task, std::int64_t row,
                                                        std::int64_t count) {
  alignas(16) float totals[kVectors][kRowsOfEights] = {};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v += 2)
    add_totals<4>({sums[v][0], sums[v][1], sums[v + 1][0], sums[v + 1][1]}, totals[v]);
  for (std::int64_t v = 0; v < task.m; ++v)
    for (std::int64_t r = 0; r < count; ++r) task.y[v * task.y_stride + row + r] += totals[v][r];
}

/// Up to two rows of weight, the second one again the first where `count` is 1, and kVectors of x,
/// of which task.m count.
template <class Numbers, int kVectors>
void add_eights(const Bf16DotTask& task, const Numbers& of_format, std::int64_t row,
                std::int64_t count) {
  const Numbers numbers = of_format;  // in registers, which nothing else refers to
  const std::uint8_t* codes[kRowsOfEights];
  const float* scales[kRowsOfEights];
  const bool scaled = task.run.scales != nullptr;
  const std::int64_t begin = task.run.first + (task.one_line ? 0 : row * task.row_stride);
  for (int r = 0; r < kRowsOfEights; ++r) {
    const std::int64_t first = task.run.first + (row + r % count) * task.row_stride;
    codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + first;
    scales[r] =
        scaled ? task.run.scales + (task.one_line ? begin : first) / task.run.group : &kUnscaled;
  }
  const std::int64_t ahead = kRowsAhead * task.row_stride;
  Sums<kVectors> totals;  // of the groups before
  std::int64_t in_group = scaled ? task.run.group - begin % task.run.group : task.columns;
  for (std::int64_t k = 0;; in_group = task.run.group) {
    const bool is_first = k == 0, is_last = in_group >= task.columns - k;
    const std::int64_t end = is_last ? task.columns : k + in_group;
    Sums<kVectors> sums;
    clear<kVectors>(sums);
    for (; k < end; k += kFloat8Step) {
      __m512bh w[kRowsOfEights][2];
#pragma GCC unroll 2
      for (int r = 0; r < kRowsOfEights; ++r) {
        ask_for_line<true>(codes[r] + k + ahead);
        numbers.look_up(codes[r] + k, w[r][0], w[r][1]);
      }
      add_products<kVectors>(sums, w, task, k);
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRowsOfEights; ++r) {
      const __m512 scale = _mm512_set1_ps(*scales[r]);
      scales[r] += scaled;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[v][r] = is_first ? _mm512_mul_ps(sums[v][r], scale)
                              : _mm512_fmadd_ps(sums[v][r], scale, totals[v][r]);
    }
    if (is_last) return add_totals_of_eights<kVectors>(sums, task, row, count);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
      for (int r = 0; r < kRowsOfEights; ++r) totals[v][r] = sums[v][r];
  }
}

template <class Numbers>
void dot_by_eights(const Bf16DotTask& task, const Numbers& numbers) {
  const auto add = task.m <= 4   ? &add_eights<Numbers, 4>
                   : task.m <= 6 ? &add_eights<Numbers, 6>
                                 : &add_eights<Numbers, kMostEights>;
  for (std::int64_t row = 0; row < task.rows; row += kRowsOfEights)
    add(task, numbers, row, row + 1 < task.rows ? 2 : 1);
}

template <Codes kCodes>
void dot_eights(const Bf16DotTask& task) noexcept {
  if constexpr (kCodes == Codes::int8)
    dot_by_eights(task, Int8Numbers());
  else
    dot_by_eights(task, Float8Tables(kFloat8Bytes<kCodes>));
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Products of bf16 in AVX512-BF16: two columns to a lane, summed in fp32. Rows of any weight may be
// widened to bf16 before; 4-bit weights are read as they are.
//
// A load of 64 bytes is 128 columns, two blocks of 64. Each of its 16-bit words holds four nibbles;
// a shift moves one of them to the low end, and one lookup by 16 bits makes 32 bf16 numbers:
//
//   shift      4               0               12               8
//   columns    0 4 8 ... 124   1 5 9 ... 125   2 6 10 ... 126   3 7 11 ... 127
//
// x is arranged in this order. A lookup reads five bits of a word; the fifth is made to say which
// of the two blocks it is, and the table of 32 has the values of both.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/streams-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

constexpr int kMostVectors = 6;       // rows of x, with four of weight: 24 sums in 32 registers
constexpr std::int64_t kTables = 32;  // of a row of weight that are kept at a time
constexpr __mmask16 kUpper = 0xFF00;  // lanes of the second block
constexpr int kShifts[] = {4, 0, 12, 8};

/// The values of two blocks.
[[gnu::always_inline]] inline __m512i table_of(__m512 values, float first, float second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
      _mm512_mul_ps(values, _mm512_set1_ps(second)), _mm512_mul_ps(values, _mm512_set1_ps(first))));
}

/// 64 bytes of codes, or the last 32 of a row.
[[gnu::always_inline]] inline __m512i load_codes(const std::uint8_t* codes, bool whole) {
  if (whole) return _mm512_loadu_si512(codes);
  return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
}

[[gnu::always_inline]] inline __m512bh look_up(__m512i words, __m512i table) {
  return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(words, table));
}
/// Where the two halves of the table differ.
[[gnu::always_inline]] inline __m512bh look_up_half(__m512i words, __m512i table) {
  const __m512i kFifth = _mm512_set1_epi16(16);
  const __m512i kHalf = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  // 0xB8: the third where the second is set, else the first.
  return look_up(_mm512_ternarylogic_epi32(words, kFifth, kHalf, 0xB8), table);
}

[[gnu::always_inline]] inline __m512bh load(const std::uint16_t* x) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(x));
}

void arrange_bf16(const void* x, std::int64_t n, std::uint16_t* out) noexcept {
  alignas(64) std::uint16_t fourths[32];
  for (int i = 0; i < 32; ++i) fourths[i] = static_cast<std::uint16_t>(i % 16 * 4);
  const auto* from = static_cast<const std::uint16_t*>(x);
  for (std::int64_t i = 0; i < n; i += kBf16Pad, out += kBf16Pad) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 32);
    const bool whole = n - i >= kBf16Pad;
    const __m512i c = whole ? _mm512_loadu_si512(from + i + 64) : _mm512_setzero_si512();
    const __m512i d = whole ? _mm512_loadu_si512(from + i + 96) : _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      const __m512i places =
          _mm512_add_epi16(_mm512_load_si512(fourths), _mm512_set1_epi16(static_cast<short>(s)));
      const __m512i ab = _mm512_permutex2var_epi16(a, places, b);
      const __m512i cd = _mm512_permutex2var_epi16(c, places, d);
      _mm512_storeu_si512(out + 32 * s, _mm512_inserti64x4(ab, _mm512_castsi512_si256(cd), 1));
    }
  }
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

/// kRows rows of weight from `row` on, `apart` from one to the next.
template <int kRows>
struct Bf16Rows {
  const Bf16DotTask& task;
  const std::uint8_t* codes;
  std::int64_t stride;         // bytes between rows
  std::uint64_t first[kRows];  // element
  const float* common[kRows];  // scales of blocks of 64; null if blocks are larger

  Bf16Rows(const Bf16DotTask& of, std::int64_t row, std::int64_t apart = 1)
      : task(of), stride(apart * of.row_stride / 2) {
    for (int r = 0; r < kRows; ++r) {
      first[r] = static_cast<std::uint64_t>(task.run.first + (row + r * apart) * task.row_stride);
      common[r] = task.run.group == 64 ? task.run.scales + first[r] / 64 : nullptr;
    }
    codes = static_cast<const std::uint8_t*>(task.run.codes) + first[0] / 2;
  }
  /// Calls use(r, a, b) for each row with the scales of columns k and k + 64, which is beyond the
  /// row where that has not both.
  template <class Use>
  [[gnu::always_inline]] void scales(std::int64_t k, bool both, Use use) const {
    if (common[0] != nullptr) {
      for (int r = 0; r < kRows; ++r)
        use(r, common[r][k / 64], both ? common[r][k / 64 + 1] : 0.0f);
      return;
    }
    const auto group = static_cast<std::uint64_t>(task.run.group);
    for (int r = 0; r < kRows; ++r) {
      const std::uint64_t at = first[r] + static_cast<std::uint64_t>(k);
      use(r, task.run.scales[at / group], both ? task.run.scales[(at + 64) / group] : 0.0f);
    }
  }
  /// Scales of rows that are read soon, sixteen blocks of each, are on their way to the L2 cache
  /// while these are computed; so are codes, a line of each row.
  [[gnu::always_inline]] void fetch_scales(std::int64_t k, std::int64_t rows = kRows) const {
    if (common[0] == nullptr || k % 1024 != 0) return;
    for (int r = 0; r < kRows; ++r)
      __builtin_prefetch(common[r] + (rows * task.row_stride + k) / 64, 0, 2);
  }
  template <bool kNear = false>
  [[gnu::always_inline]] void fetch_codes(const std::uint8_t* from) const {
    for (int r = 0; r < kRows; ++r) ask_for_line<kNear>(from + r * stride);
  }
};

/// The products of columns from `from` on, each 128 of a row with the next of its tables. The codes
/// `ahead` bytes further will be read soon.
template <int kRows, int kVectors>
void add_span(const Bf16Rows<kRows>& w, const __m512i* tables, std::int64_t from,
              std::int64_t columns, std::int64_t ahead, const std::uint16_t* x,
              std::int64_t x_stride, float* y, std::int64_t y_stride) {
  __m512 sums[kVectors][kRows];  // in registers, once all loops over them are unrolled
#pragma GCC unroll 6
  for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[j][r] = _mm512_setzero_ps();
  const std::uint8_t* codes = w.codes + from / 2;
  const std::int64_t stride = w.stride;
  const auto add = [&](bool whole) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const std::uint8_t* again = codes;  // read again rather than kept: sums take the registers
      __asm__ volatile("" : "+r"(again));
      __m512bh values[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i words = load_codes(again + r * stride, whole);
        values[r] = look_up_half(
            kShifts[s] == 0 ? words : _mm512_srli_epi16(words, static_cast<unsigned>(kShifts[s])),
            tables[r]);
      }
#pragma GCC unroll 6
      for (int j = 0; j < kVectors; ++j) {
        const __m512bh vector = load(x + j * x_stride + 32 * s);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sums[j][r] = _mm512_dpbf16_ps(sums[j][r], values[r], vector);
      }
    }
  };
  for (; columns >= kBf16Pad; columns -= kBf16Pad, tables += kRows, x += kBf16Pad) {
    w.fetch_codes(codes + ahead);
    add(true);
    codes += kBf16Pad / 2;
  }
  if (columns > 0) add(false);
#pragma GCC unroll 6
  for (int j = 0; j < kVectors; ++j) add_totals<kRows>(sums[j], y + j * y_stride);
}

/// A table for each two blocks: values are those of dequantize to bf16, bit for bit, but for
/// subnormal ones.
template <int kRows>
void rows_by_tables(const Bf16DotTask& task, std::int64_t row) {
  constexpr decltype(&add_span<kRows, 1>) kSpans[kMostVectors] = {
      &add_span<kRows, 1>, &add_span<kRows, 2>, &add_span<kRows, 3>,
      &add_span<kRows, 4>, &add_span<kRows, 5>, &add_span<kRows, 6>};
  alignas(64) __m512i tables[kTables * kRows];
  const __m512 values = _mm512_loadu_ps(task.values);
  const Bf16Rows<kRows> w(task, row);
  for (std::int64_t k = 0; k < task.columns; k += kTables * kBf16Pad) {
    const std::int64_t left = task.columns - k;
    const std::int64_t columns = left < kTables * kBf16Pad ? left : kTables * kBf16Pad;
    __m512i* next = tables;
    const auto make = [&](std::int64_t c, bool both) __attribute__((always_inline)) {
      w.scales(
          c, both, [&](int r, float a, float b) __attribute__((always_inline)) {
            next[r] = table_of(values, a, b);
          });
      w.fetch_scales(c);
      next += kRows;
    };
    std::int64_t c = k;
    for (; c + kBf16Pad <= k + columns; c += kBf16Pad) make(c, true);
    if (c < k + columns) make(c, false);
    std::int64_t j = 0;
    for (std::int64_t parts = (task.m + kMostVectors - 1) / kMostVectors; parts > 0; --parts) {
      const std::int64_t count = (task.m - j + parts - 1) / parts;
      kSpans[count - 1](w, tables, k, columns, j == 0 ? kRows * w.stride : 0,
                        task.x + j * task.x_stride + k, task.x_stride,
                        task.y + j * task.y_stride + row, task.y_stride);
      j += count;
    }
  }
}

/// One table for all blocks, whose sums are scaled: less work where there are up to three rows of
/// x. The values are rounded to bf16 after a product with `stretch`, by which that loses least.
/// False, and nothing is added, if a sum is not finite: then values decide what it is.
template <int kRows, int kVectors, bool kNear = false>
bool rows_by_scales(const Bf16DotTask& task, float stretch, std::int64_t row, std::int64_t apart) {
  const __m512i table = table_of(_mm512_loadu_ps(task.values), stretch, stretch);
  const Bf16Rows<kRows> w(task, row, apart);
  const std::int64_t rows = apart == 1 ? kRows : rows_ahead(row, apart, task.row_stride / 2);
  const std::int64_t ahead =
      apart == 1 ? kRows * task.row_stride / 2
                 : bytes_ahead<kNear>(row, apart, task.row_stride / 2, task.columns / 2);
  __m512 sums[kVectors][kRows];
  for (auto& of_vector : sums)
    for (__m512& sum : of_vector) sum = _mm512_setzero_ps();
  const auto add = [&](std::int64_t k, bool whole) __attribute__((always_inline)) {
    w.scales(
        k, whole, [&](int r, float a, float b) __attribute__((always_inline)) {
          const __m512i words = load_codes(w.codes + r * w.stride + k / 2, whole);
          __m512 two[kVectors];
          for (__m512& sum : two) sum = _mm512_setzero_ps();
#pragma GCC unroll 4
          for (int s = 0; s < 4; ++s) {
            const __m512bh values = look_up(
                kShifts[s] == 0 ? words
                                : _mm512_srli_epi16(words, static_cast<unsigned>(kShifts[s])),
                table);
            for (int j = 0; j < kVectors; ++j)
              two[j] =
                  _mm512_dpbf16_ps(two[j], values, load(task.x + j * task.x_stride + k + 32 * s));
          }
          const __m512 scale = _mm512_mask_blend_ps(kUpper, _mm512_set1_ps(a), _mm512_set1_ps(b));
          for (int j = 0; j < kVectors; ++j)
            sums[j][r] = _mm512_fmadd_ps(two[j], scale, sums[j][r]);
        });
  };
  std::int64_t k = 0;
  for (; k + kBf16Pad <= task.columns; k += kBf16Pad) {
    w.template fetch_codes<kNear>(w.codes + k / 2 + ahead);
    if constexpr (!kNear) w.template fetch_codes<true>(w.codes + k / 2 + kNearAhead);
    w.fetch_scales(k, rows);
    add(k, true);
  }
  if (k < task.columns) add(k, false);
  float totals[kVectors][kRows] = {}, finite = 0;
  for (int j = 0; j < kVectors; ++j) {
    add_totals<kRows>(sums[j], totals[j]);
    for (int r = 0; r < kRows; ++r) finite += totals[j][r] * 0.0f;
  }
  if (finite != 0.0f) return false;
  for (int j = 0; j < kVectors; ++j)
    for (int r = 0; r < kRows; ++r)
      task.y[j * task.y_stride + row + r * apart] += totals[j][r] * (1 / stretch);
  return true;
}

template <int kRows>
void dot_some(const Bf16DotTask& task, float stretch, std::int64_t row) {
  const bool done = stretch == 0  ? false
                    : task.m == 1 ? rows_by_scales<kRows, 1>(task, stretch, row, 1)
                    : task.m == 2 ? rows_by_scales<kRows, 2>(task, stretch, row, 1)
                    : task.m == 3 ? rows_by_scales<kRows, 3>(task, stretch, row, 1)
                                  : false;
  if (!done) rows_by_tables<kRows>(task, row);
}

void dot_all(const Bf16DotTask& task, float stretch) {
  std::int64_t row = 0;
  if (task.m == 1 && stretch != 0) {  // each a quarter of all rows from the next
    const std::int64_t apart = task.rows / kStreams;
    const auto in_streams = [&]<bool kNear>() {
      for (; row < apart; ++row)
        if (!rows_by_scales<kStreams, 1, kNear>(task, stretch, row, apart))
          // Others are not to depend on a row whose sum is not finite: each has what it has alone.
          for (int r = 0; r < kStreams; ++r) dot_some<1>(task, stretch, row + r * apart);
    };
    if (task.near) in_streams.template operator()<true>();
    in_streams.template operator()<false>();
    row *= kStreams;
  }
  for (; row + 4 <= task.rows; row += 4) dot_some<4>(task, stretch, row);
  for (; row < task.rows; ++row) dot_some<1>(task, stretch, row);
}

// Of all factors in [1, 2) with 12 bits, this one makes the mean square error of the values least:
// 0.4 of what rounding a normal weight to bf16 costs. Thirds of fp4 become exact.
void dot_nf4(const Bf16DotTask& task) noexcept { dot_all(task, 0x1.6fep+0f); }
void dot_fp4(const Bf16DotTask& task) noexcept { dot_all(task, 1.5f); }
void dot_own(const Bf16DotTask& task) noexcept { dot_all(task, 0); }

// --- widened rows -------------------------------------------------------------------------------

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

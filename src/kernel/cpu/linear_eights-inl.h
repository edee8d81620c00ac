// SPDX-License-Identifier: Apache-2.0
// Products of codes of a byte with more rows of bf16 than linear_float8-inl.h takes, in pairs of
// bf16. Codes of four rows of weight and a stretch of columns become numbers once: while the first
// rows of x are multiplied, since shuffles and conversions have units of their own. The others find
// them in the L1 cache, where these columns of all rows of x are. Scales multiply sums, of whole
// rows or of long groups, whose numbers are made again for each eight rows of x. Those of groups of
// 32 multiply numbers, which are rounded to bf16: the values of dequantize, bit for bit, but for
// subnormal ones.
#pragma once
#include "kernel/cpu/linear_float8-inl.h"

namespace stowage {
namespace {

constexpr int kPanelRows = 4;                           // of weight
constexpr std::int64_t kPanelStride = kMostPanel + 32;  // no power of two, as elsewhere
constexpr std::int64_t kOfNumbers = 16;                 // columns of a register of fp32

/// Of the two halves of a step.
using HalfScales = __m512[2];

/// What Float8Tables are for codes of fp8.
struct Int8Numbers {
  [[gnu::always_inline]] static __m512 sixteen(const std::uint8_t* codes, int i) {
    const auto* from = reinterpret_cast<const __m128i*>(codes + kOfNumbers * i);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
  }
  [[gnu::always_inline]] void look_up(const std::uint8_t* codes, __m512bh& first,
                                      __m512bh& last) const {
    first = _mm512_cvtne2ps_pbh(sixteen(codes, 1), sixteen(codes, 0));
    last = _mm512_cvtne2ps_pbh(sixteen(codes, 3), sixteen(codes, 2));
  }
  [[gnu::always_inline]] void look_up(const std::uint8_t* codes, const HalfScales& scales,
                                      __m512bh& first, __m512bh& last) const {
    const auto some = [&](int i) __attribute__((always_inline)) {
      return _mm512_mul_ps(sixteen(codes, i), scales[i / 2]);
    };
    first = _mm512_cvtne2ps_pbh(some(1), some(0));
    last = _mm512_cvtne2ps_pbh(some(3), some(2));
  }
};

/// The column of each byte that Float8Tables::look_up_in takes.
struct alignas(64) SixteensOfFloat8 {
  std::uint8_t place[64];
  constexpr SixteensOfFloat8() : place() {
    for (int i = 0; i < 64; ++i) {
      const int lane = i / 16, half = i % 16 / 8, word = i % 8;
      place[i] = static_cast<std::uint8_t>(16 * (2 * half + word % 2) + 4 * lane + word / 2);
    }
  }
};
constexpr SixteensOfFloat8 kSixteensOfFloat8;

struct Float8Numbers : Float8Tables {
  using Float8Tables::Float8Tables;
  using Float8Tables::look_up;
  /// Words of numbers of bf16 are the upper halves of lanes of fp32: so the even and the odd ones
  /// of each half are sixteen columns.
  [[gnu::always_inline]] void look_up(const std::uint8_t* codes, const HalfScales& scales,
                                      __m512bh& first, __m512bh& last) const {
    const __m512i place = _mm512_load_si512(kSixteensOfFloat8.place);
    __m512bh lower, upper;
    look_up_in(_mm512_permutexvar_epi8(place, _mm512_loadu_si512(codes)), lower, upper);
    first = scaled(lower, scales[0]), last = scaled(upper, scales[1]);
  }

 private:
  [[gnu::always_inline]] static __m512bh scaled(__m512bh words, __m512 scale) {
    const auto lanes = reinterpret_cast<__m512i>(words);
    const __m512i odd = _mm512_and_si512(lanes, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16));
    return _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_castsi512_ps(odd), scale),
                               _mm512_mul_ps(even, scale));
  }
};

/// Where groups begin: divisions, once for all rows.
struct GroupsOfRows {
  std::int64_t first = 0, of_row = 0;  // group of the first row; from row to row, 0: not so many
  std::int64_t left, group;            // columns to the end of the first groups, of the next ones
  std::int64_t each = 1, second = 0;   // groups of so many columns; that of the last 32 of 64

  explicit GroupsOfRows(const Bf16DotTask& task) : left(task.columns), group(task.columns) {
    if (task.run.scales == nullptr) return;
    const std::int64_t of = task.run.group;
    if (of < kFloat8Step) each = 2, second = 1;
    group = of * each;
    first = task.run.first / of, left = group - task.run.first % group;
    if (!task.one_line) of_row = task.row_stride / of;
  }
  const float* scales_of(const Bf16DotTask& task, std::int64_t row) const {
    static constexpr float kOne = 1.0f;
    if (task.run.scales == nullptr) return &kOne;
    if (of_row != 0 || task.one_line) return task.run.scales + first + row * of_row;
    return task.run.scales + (task.run.first + row * task.row_stride) / task.run.group;
  }
};

/// Four rows of weight from `row` on, of which `count` are there; in place of others is the last.
struct PanelOfBytes {
  const GroupsOfRows& groups;
  const std::uint8_t* codes[kPanelRows];
  const float* scales[kPanelRows];  // of the groups that they begin with
  std::int64_t ahead;               // bytes to the next four rows

  PanelOfBytes(const Bf16DotTask& task, const GroupsOfRows& of, std::int64_t row,
               std::int64_t count)
      : groups(of), ahead(kPanelRows * task.row_stride) {
    for (std::int64_t r = 0; r < kPanelRows; ++r) {
      const std::int64_t some = row + (r < count ? r : count - 1);
      codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + task.run.first +
                 some * task.row_stride;
      scales[r] = of.scales_of(task, some);
    }
  }
};

/// Of rows of x and of two of weight: in registers, once all loops over them are unrolled.
template <int kVectors>
using SumsOfTwo = __m512[kVectors][2];

/// Where rows of x are, from the first: few registers for all of them.
struct RowsOfX {
  std::int64_t one, three, five, seven;  // bytes
  explicit RowsOfX(std::int64_t stride)
      : one(stride * std::int64_t{sizeof(std::uint16_t)}),
        three(3 * one),
        five(5 * one),
        seven(7 * one) {}
  [[gnu::always_inline]] std::int64_t at(int v) const {
    const std::int64_t odd[] = {one, three, five, seven};
    return v % 2 == 1 ? odd[v / 2] : v == 6 ? 2 * three : v * one;
  }
};

/// Of 64 columns, whose numbers come in two halves.
template <int kVectors>
[[gnu::always_inline]] inline void add_products(SumsOfTwo<kVectors>& sums,
                                                const __m512bh (&w)[2][2], const std::uint16_t* x,
                                                const RowsOfX& rows) {
  const char* from = reinterpret_cast<const char*>(x);
  __asm__("" : "+r"(from));  // no pointers that go on beside it
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m512bh of_x = load(from + rows.at(v) + 64 * half);
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], w[r][half], of_x);
    }
}

/// y[v, r] += the lanes of sums[v][r] times scales[r], for v < m: as add_pairs_of does, so that
/// rows of x that are alike have the same bytes wherever they stand.
template <int kVectors>
[[gnu::always_inline]] inline void add_totals_of_two(const PairsTask& task, int row,
                                                     SumsOfTwo<kVectors>& sums) {
  alignas(16) float totals[kVectors][2] = {};
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    const __m512 scale = _mm512_set1_ps(task.scales[row + r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v][r] = _mm512_mul_ps(sums[v][r], scale);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v += 2)
    add_totals<4>({sums[v][0], sums[v][1], sums[v + 1][0], sums[v + 1][1]}, totals[v]);
  for (std::int64_t v = 0; v < task.m && v < kVectors; ++v)
    for (int r = 0; r < 2; ++r) task.y[v * task.y_stride + row + r] += totals[v][r];
}

/// What scales multiply.
enum class Scaled { rows, groups, numbers };

template <int kVectors>
[[gnu::always_inline]] inline void clear(SumsOfTwo<kVectors>& sums) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) sums[v][r] = _mm512_setzero_ps();
}

/// Two rows of a panel from `row` on and the first rows of x, kVectors, or as many as there are.
/// kKept: numbers are kept in `w` for others.
template <int kVectors, Scaled kScaled, bool kKept, class Numbers>
[[gnu::noinline]] void add_first(const PairsTask& task, const PanelOfBytes& panel,
                                 const Numbers& of_format, int row, std::uint16_t* w) {
  const Numbers numbers = of_format;  // in registers, which nothing else refers to
  const RowsOfX rows_of_x(task.x_stride);
  const std::uint8_t* const codes[] = {panel.codes[row], panel.codes[row + 1]};
  const float* scales[] = {panel.scales[row], panel.scales[row + 1]};
  const std::int64_t columns = task.columns, ahead = panel.ahead, second = panel.groups.second;
  const std::uint16_t* const x = task.x;
  SumsOfTwo<kVectors> sums;
  clear<kVectors>(sums);
  const auto add = [&](std::int64_t k) __attribute__((always_inline)) {
    __m512bh of[2][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      ask_for_line<true>(codes[r] + k + ahead);
      if constexpr (kScaled == Scaled::numbers) {
        const HalfScales some = {_mm512_set1_ps(scales[r][0]), _mm512_set1_ps(scales[r][second])};
        numbers.look_up(codes[r] + k, some, of[r][0], of[r][1]);
      } else {
        numbers.look_up(codes[r] + k, of[r][0], of[r][1]);
      }
      if constexpr (kKept)
        for (int half = 0; half < 2; ++half)
          store_as(w + (row + r) * kPanelStride + k + 32 * half, of[r][half]);
    }
    add_products<kVectors>(sums, of, x + k, rows_of_x);
  };
  std::int64_t left = panel.groups.left;
  const auto next_group = [&]() __attribute__((always_inline)) {
    left = panel.groups.group;
    for (const float*& of_row : scales) of_row += panel.groups.each;
  };
  if constexpr (kScaled == Scaled::groups) {
    SumsOfTwo<kVectors> totals;  // of the groups before
    clear<kVectors>(totals);
    for (std::int64_t k = 0; k < columns; next_group()) {
      clear<kVectors>(sums);
      const std::int64_t end = k + (left < columns - k ? left : columns - k);
      for (; k < end; k += kFloat8Step) add(k);
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const __m512 scale = _mm512_set1_ps(*scales[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          totals[v][r] = _mm512_fmadd_ps(sums[v][r], scale, totals[v][r]);
      }
    }
    return add_totals_of_two<kVectors>(task, row, totals);
  }
  for (std::int64_t k = 0; k < columns; k += kFloat8Step) {
    add(k);
    if (kScaled == Scaled::numbers && (left -= kFloat8Step) <= 0) next_group();
  }
  add_totals_of_two<kVectors>(task, row, sums);
}

/// All rows of x, of which the first ones are multiplied while numbers are made.
template <int kVectors, Scaled kScaled, class Numbers>
void add_panel(const PairsTask& task, const PanelOfBytes& panel, const Numbers& numbers,
               std::uint16_t* w) {
  const bool more = task.m > kVectors;
  for (int row = 0; row < kPanelRows; row += 2) {
    if constexpr (kVectors == 4 || kScaled == Scaled::groups)
      add_first<kVectors, kScaled, false>(task, panel, numbers, row, w);
    else if (more)
      add_first<kVectors, kScaled, true>(task, panel, numbers, row, w);
    else
      add_first<kVectors, kScaled, false>(task, panel, numbers, row, w);
  }
  if (more) add_rows_of_pairs<kPanelRows>(task, 0, kVectors);
}

template <Scaled kScaled, class Numbers>
void dot_by_panels(const Bf16DotTask& task, const Numbers& numbers) {
  alignas(64) std::uint16_t w[kPanelRows * kPanelStride];
  float few[kPanelRows * kMostBf16Rows];  // sums of rows of which no four are there
  const GroupsOfRows groups(task);
  const auto add = task.m <= 4                                   ? &add_panel<4, kScaled, Numbers>
                   : task.m <= 6 || (task.m > 8 && task.m <= 12) ? &add_panel<6, kScaled, Numbers>
                                                                 : &add_panel<8, kScaled, Numbers>;
  for (std::int64_t row = 0; row < task.rows; row += kPanelRows) {
    const std::int64_t count = task.rows - row < kPanelRows ? task.rows - row : kPanelRows;
    const PanelOfBytes panel(task, groups, row, count);
    float scales[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r)
      scales[r] = kScaled == Scaled::rows ? *panel.scales[r] : 1.0f;
    const bool all = count == kPanelRows;
    for (std::int64_t i = 0; !all && i < kPanelRows * task.m; ++i) few[i] = 0.0f;
    add({w, kPanelStride, kPanelRows, scales, task.x, task.x_stride, task.m, task.columns,
         all ? task.y + row : few, all ? task.y_stride : kPanelRows},
        panel, numbers, w);
    for (std::int64_t j = 0; !all && j < task.m; ++j)
      for (std::int64_t r = 0; r < count; ++r)
        task.y[j * task.y_stride + row + r] += few[j * kPanelRows + r];
  }
}

template <class Numbers>
void dot_by_scales(const Bf16DotTask& task, const Numbers& numbers) {
  const std::int64_t group = task.run.scales == nullptr ? 0 : task.run.group;
  // A row begins with a group, or lies in one.
  if (group == 0 || group - task.run.first % group >= task.columns)
    return dot_by_panels<Scaled::rows>(task, numbers);
  if (group < kFloat8Step) return dot_by_panels<Scaled::numbers>(task, numbers);
  Bf16DotTask some = task;
  for (std::int64_t parts = (task.m + kMostOfLong - 1) / kMostOfLong, j = 0; parts > 0;
       --parts, j += some.m) {
    some.m = (task.m - j + parts - 1) / parts;
    some.x = task.x + j * task.x_stride, some.y = task.y + j * task.y_stride;
    dot_by_panels<Scaled::groups>(some, numbers);
  }
}

template <Codes kCodes>
void dot_eights(const Bf16DotTask& task) noexcept {
  if constexpr (kCodes == Codes::int8)
    dot_by_scales(task, Int8Numbers());
  else
    dot_by_scales(task, Float8Numbers(kFloat8Bytes<kCodes>));
}

}  // namespace
}  // namespace stowage

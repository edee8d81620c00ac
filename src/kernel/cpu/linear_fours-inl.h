// SPDX-License-Identifier: Apache-2.0
// Products of bf16 with codes of four bits, two in a byte, which are read as they are.
//
// A load of 64 bytes is 128 columns. Each of its 16-bit words holds four codes; a shift moves one
// of them to the low end, and one lookup by 16 bits makes 32 bf16 numbers:
//
//   shift      4               0               12               8
//   columns    0 4 8 ... 124   1 5 9 ... 125   2 6 10 ... 126   3 7 11 ... 127
//
// x is arranged in this order, with zeros up to a multiple of 128; or by twos in the other one,
// where the first of two codes lies in the low half of its byte. So a lane of 32 bits is always of
// the same eight columns, and groups of 16 or more have lanes of their own. There are two ways:
//
//   by scales  one table for all groups; its products are summed for 128 columns, and these sums
//              scaled. Less work where rows of x are few, or groups short.
//   by tables  what codes of a group stand for is rounded to bf16 once, and chosen among. A lookup
//              reads five bits of a word, or six: those above the code are made to say which of the
//              groups of 128 columns it is.
#pragma once

#include <array>
#include <utility>

#include "kernel/cpu/linear_bf16-inl.h"

namespace stowage {
namespace {

constexpr int kShifts[] = {4, 0, 12, 8};
/// Groups of a multiple of 64 columns; others are of 16, 32 or, where that is worth code of its
/// own, 64.
constexpr int kLong = 0;
constexpr int kOfHalf = 64;  // columns of a half of the lanes

/// The last 64 columns of a row that has no 128 more, and zeros. Other rows just go on: what
/// follows them is the next one, and x has zeros there.
struct LastOfRow {
  alignas(64) std::uint8_t codes[kBf16Pad / 2];
  const std::uint8_t* read(const std::uint8_t* from) {
    const auto* last = reinterpret_cast<const __m256i*>(from);
    _mm512_store_si512(codes, _mm512_zextsi256_si512(_mm256_loadu_si256(last)));
    return codes;
  }
};
/// How many rows of a task have codes and scales behind them, if they need them.
std::int64_t rows_that_go_on(const Bf16DotTask& task) {
  if (task.columns % kBf16Pad == 0) return task.rows;
  return task.run.group > task.row_stride ? 0 : task.rows - 1;
}

[[gnu::always_inline]] inline __m512i shifted(__m512i words, int s) {
  return kShifts[s] == 0 ? words : _mm512_srli_epi16(words, static_cast<unsigned>(kShifts[s]));
}
[[gnu::always_inline]] inline __m512i both_of(__m512 first, __m512 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}
[[gnu::always_inline]] inline __m512bh look_up(__m512i words, __m512i table) {
  return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(words, table));
}

void arrange_fours(const void* x, std::int64_t n, bool high_first, bool with_sums,
                   std::uint16_t* out) noexcept {
  alignas(64) std::uint16_t fourths[32];
  for (int i = 0; i < 32; ++i) fourths[i] = static_cast<std::uint16_t>(i % 16 * 4);
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3F80));
  const auto* from = static_cast<const std::uint16_t*>(x);
  for (std::int64_t i = 0; i < n; i += kBf16Pad, out += with_sums ? kBf16WithSums : kBf16Pad) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 32);
    const bool whole = n - i >= kBf16Pad;
    const __m512i c = whole ? _mm512_loadu_si512(from + i + 64) : _mm512_setzero_si512();
    const __m512i d = whole ? _mm512_loadu_si512(from + i + 96) : _mm512_setzero_si512();
    __m512 sums = _mm512_setzero_ps();
    for (int s = 0; s < 4; ++s) {
      const int column = high_first ? s : s ^ 1;
      const __m512i places = _mm512_add_epi16(_mm512_load_si512(fourths),
                                              _mm512_set1_epi16(static_cast<short>(column)));
      const __m512i ab = _mm512_permutex2var_epi16(a, places, b);
      const __m512i cd = _mm512_permutex2var_epi16(c, places, d);
      const __m512i some = _mm512_inserti64x4(ab, _mm512_castsi512_si256(cd), 1);
      _mm512_storeu_si512(out + 32 * s, some);
      sums = _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(some), ones);
    }
    if (with_sums) _mm512_storeu_ps(reinterpret_cast<float*>(out + kBf16Pad), sums);
  }
}

/// In which of so many groups of 128 columns each lane is.
template <int kCount>
struct LanesOf {
  alignas(64) std::int32_t group[16];
  constexpr LanesOf() : group() {
    for (int i = 0; i < 16; ++i) group[i] = i * kCount / 16;
  }
};
template <int kCount>
constexpr LanesOf<kCount> kLanesOf;

/// What groups have beside scales.
enum class BesideScales { nothing, zeros, offsets };

/// kRows rows of weight from `row` on, `apart` from one to the next, in groups of 16 or 32 columns,
/// or of multiples of 64. They begin with a group, or lie in one.
template <int kRows, int kGroup>
struct FourBitRows {
  const Bf16DotTask& task;
  const std::uint8_t* codes;
  std::int64_t stride;        // bytes between rows
  std::int64_t group[kRows];  // that a row begins in
  std::uint64_t per_group;    // 2^64 over its columns, rounded up: exact for kMostBf16Columns

  FourBitRows(const Bf16DotTask& of, std::int64_t row, std::int64_t apart = 1)
      : task(of), stride(apart * of.row_stride / 2) {
    const std::int64_t columns = of.run.group < of.row_stride ? of.run.group : of.row_stride;
    per_group = ~std::uint64_t{0} / static_cast<std::uint64_t>(columns) + 1;
    const std::int64_t first = task.run.first + row * task.row_stride;
    codes = static_cast<const std::uint8_t*>(task.run.codes) + first / 2;
    for (int r = 0; r < kRows; ++r)
      group[r] = (first + r * apart * task.row_stride) / task.run.group;
  }
  /// The group of a row's column k.
  [[gnu::always_inline]] std::int64_t group_of(int r, std::int64_t k) const {
    return group[r] + groups_before(k);
  }
  [[gnu::always_inline]] std::int64_t groups_before(std::int64_t k) const {
    if constexpr (kGroup != kLong) return k / (kGroup + !kGroup);
    const auto columns = static_cast<unsigned __int128>(k);
    return static_cast<std::int64_t>(columns * per_group >> 64);
  }
  /// The scales of columns from k on, or what is taken off, each in the lanes of its group. Where a
  /// row has but 64 columns more, those of lanes beyond are anything: their products are zeros.
  [[gnu::always_inline]] __m512 in_lanes(const float* of_groups, int r, std::int64_t k,
                                         bool whole) const {
    const float* const from = of_groups + group_of(r, k);
    if constexpr (kGroup == kLong || kGroup == kOfHalf) {
      const float* const second = of_groups + group_of(r, whole ? k + kOfHalf : k);
      return _mm512_mask_blend_ps(kUpper, _mm512_set1_ps(*from), _mm512_set1_ps(*second));
    } else {
      constexpr int kCount = static_cast<int>(kBf16Pad) / kGroup;
      const auto some = static_cast<__mmask16>((1 << (whole ? kCount : kCount / 2)) - 1);
      return _mm512_permutexvar_ps(_mm512_load_si512(kLanesOf<kCount>.group),
                                   _mm512_maskz_loadu_ps(some, from));
    }
  }
  /// What the codes of a group stand for.
  template <BesideScales kBeside>
  [[gnu::always_inline]] __m512 made(std::int64_t g) const {
    const Run& run = task.run;
    __m512 values = _mm512_loadu_ps(task.values);
    if constexpr (kBeside == BesideScales::zeros)
      values = _mm512_sub_ps(values, _mm512_set1_ps(static_cast<float>(run.zeros[g])));
    values = _mm512_mul_ps(values, _mm512_set1_ps(run.scales[g]));
    if constexpr (kBeside == BesideScales::offsets)
      values = _mm512_sub_ps(values, _mm512_set1_ps(run.offsets[g]));
    return values;
  }
  /// Scales that lie so many groups further, a line for each row, are on their way to the L2 cache
  /// while these are computed; so are codes.
  [[gnu::always_inline]] void fetch_scales(std::int64_t k, std::int64_t groups) const {
    constexpr std::int64_t kOfLine = 16 * (kGroup == kLong ? kOfHalf : kGroup);  // columns
    if (k % kOfLine == 0)
      for (int r = 0; r < kRows; ++r)
        __builtin_prefetch(task.run.scales + group_of(r, k) + groups, 0, 2);
  }
  template <bool kNear = false>
  [[gnu::always_inline]] void fetch_codes(const std::uint8_t* from) const {
    for (int r = 0; r < kRows; ++r) ask_for_line<kNear>(from + r * stride);
  }
};

// --- by scales ----------------------------------------------------------------------------------

/// With kVectors rows of x from j on. The values are rounded to bf16 after a product with
/// `stretch`, by which that loses least. kOffsets: and what is taken off them multiplies sums of x.
template <int kRows, int kVectors, int kGroup, bool kOffsets = false, bool kNear = false>
[[gnu::noclone]] void rows_by_scales(const Bf16DotTask& task, float stretch, std::int64_t row,
                                     std::int64_t apart, std::int64_t j) {
  const __m512 stretched = _mm512_mul_ps(_mm512_loadu_ps(task.values), _mm512_set1_ps(stretch));
  const __m512i table = both_of(stretched, stretched);
  const FourBitRows<kRows, kGroup> w(task, row, apart);
  const std::uint16_t* const x = task.x + j * task.x_stride;
  const std::int64_t rows = apart == 1 ? kRows : rows_ahead(row, apart, task.row_stride / 2);
  const std::int64_t groups = rows * task.row_stride / task.run.group;
  const std::int64_t ahead =
      apart == 1 ? kRows * task.row_stride / 2
                 : bytes_ahead<kNear>(row, apart, task.row_stride / 2, task.columns / 2);
  __m512 sums[kVectors][kRows];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[v][r] = _mm512_setzero_ps();
  // `whole`: there are 128 columns; else codes of a row alone may lie elsewhere.
  const auto add = [&](std::int64_t k, bool whole, const std::uint8_t* codes)
      __attribute__((always_inline)) {
    const std::int64_t at = kOffsets ? k / kBf16Pad * kBf16WithSums : k;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i words = _mm512_loadu_si512(codes + r * w.stride);
      __m512 some[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) some[v] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s) {
        const __m512bh values = look_up(shifted(words, s), table);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          some[v] = _mm512_dpbf16_ps(some[v], values, load(x + v * task.x_stride + at + 32 * s));
      }
      const __m512 scales = w.in_lanes(task.run.scales, r, k, whole);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[v][r] = _mm512_fmadd_ps(some[v], scales, sums[v][r]);
      if constexpr (kOffsets) {
        const __m512 offsets = w.in_lanes(task.run.offsets, r, k, whole);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const auto* of_x = reinterpret_cast<const float*>(x + v * task.x_stride + at + kBf16Pad);
          sums[v][r] = _mm512_fnmadd_ps(offsets, _mm512_loadu_ps(of_x), sums[v][r]);
        }
      }
    }
  };
  const std::int64_t end = kRows > 1 ? task.columns : task.columns / kBf16Pad * kBf16Pad;
  std::int64_t k = 0;
  for (; k < end; k += kBf16Pad) {
    w.template fetch_codes<kNear>(w.codes + k / 2 + ahead);
    if constexpr (!kNear) w.template fetch_codes<true>(w.codes + k / 2 + kNearAhead);
    w.fetch_scales(k, groups);
    add(k, true, w.codes + k / 2);
  }
  if (kRows == 1 && k < task.columns) {
    LastOfRow last;
    add(k, false, last.read(w.codes + k / 2));
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    float totals[kRows] = {};
    add_totals<kRows>(sums[v], totals);
    for (int r = 0; r < kRows; ++r)
      task.y[(j + v) * task.y_stride + row + r * apart] += totals[r] * (1 / stretch);
  }
}

/// Four rows of weight and up to four of x at a time, and what is left of weight alone. For one row
/// of x those four are each a quarter of all from the next.
template <int kGroup, bool kOffsets = false>
void all_by_scales(const Bf16DotTask& task, float stretch) {
  constexpr std::int64_t kMost = 4;
  constexpr decltype(&rows_by_scales<kStreams, 1, kGroup>) kParts[kMost] = {
      &rows_by_scales<kStreams, 1, kGroup, kOffsets>,
      &rows_by_scales<kStreams, 2, kGroup, kOffsets>,
      &rows_by_scales<kStreams, 3, kGroup, kOffsets>,
      &rows_by_scales<kStreams, 4, kGroup, kOffsets>};
  constexpr bool kIsLong = kGroup == kLong || kGroup == kOfHalf;
  const std::int64_t fours = rows_that_go_on(task) / kStreams, parts = (task.m + kMost - 1) / kMost;
  for (std::int64_t i = 0; i < fours; ++i)
    for (std::int64_t part = 0, j = 0; part < parts; ++part) {
      const std::int64_t count = (task.m - j + parts - part - 1) / (parts - part);
      if (task.m > 1)
        kParts[count - 1](task, stretch, i * kStreams, 1, j);
      else if (task.near && kIsLong)
        rows_by_scales<kStreams, 1, kGroup, false, kIsLong>(task, stretch, i, fours, 0);
      else
        kParts[0](task, stretch, i, fours, 0);
      j += count;
    }
  for (std::int64_t row = fours * kStreams; row < task.rows; ++row)
    for (std::int64_t j = 0; j < task.m; ++j)
      rows_by_scales<1, 1, kGroup, kOffsets>(task, stretch, row, 1, j);
}

// --- by tables ----------------------------------------------------------------------------------

/// For 128 columns: each table has the values of two groups.
template <int kGroup>
constexpr int kTablesOf = kGroup == 32 ? 2 : 1;

template <int kGroup>
[[gnu::always_inline]] inline __m512bh choose(__m512i words, const __m512i* table) {
  // 0xB8: the third where the second is set, else the first.
  if constexpr (kGroup == 32) {
    const __m512i kBits = _mm512_set1_epi16(48);
    const __m512i kQuarter =
        _mm512_setr_epi64(0, 0, 0x10001000100010, 0x10001000100010, 0x20002000200020,
                          0x20002000200020, 0x30003000300030, 0x30003000300030);
    const __m512i place = _mm512_ternarylogic_epi32(words, kBits, kQuarter, 0xB8);
    return reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(table[0], place, table[1]));
  } else {
    const __m512i kBit = _mm512_set1_epi16(16);
    const __m512i kSecond = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    return look_up(_mm512_ternarylogic_epi32(words, kBit, kSecond, 0xB8), table[0]);
  }
}

/// The tables of columns from k on; where a row has but 64 of them, the others are like those.
template <int kRows, int kGroup, BesideScales kBeside>
[[gnu::always_inline]] inline void make_tables(const FourBitRows<kRows, kGroup>& w, std::int64_t k,
                                               bool whole, __m512i* tables) {
  const auto made = [&](std::int64_t g) __attribute__((always_inline)) {
    return w.template made<kBeside>(g);
  };
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r, tables += kTablesOf<kGroup>) {
    const std::int64_t g = w.group_of(r, k);
    if constexpr (kGroup == 32) {
      const std::int64_t more = whole ? g + 2 : g;
      tables[0] = both_of(made(g), made(g + 1));
      tables[1] = both_of(made(more), made(more + 1));
    } else {
      const __m512 first = made(g);
      const std::int64_t next = w.group_of(r, whole ? k + kOfHalf : k);
      tables[0] = both_of(first, next == g ? first : made(next));
    }
  }
}

/// The products of columns from `from` on, each 128 of a row with the next of its tables. The first
/// part of the rows of x makes them.
template <int kRows, int kVectors, int kGroup, BesideScales kBeside, bool kMake>
void add_span(const FourBitRows<kRows, kGroup>& w, __m512i* tables, std::int64_t from,
              std::int64_t columns, const std::uint16_t* x, std::int64_t x_stride, float* y,
              std::int64_t y_stride) {
  constexpr bool kReadsTables = kVectors == 5 && kGroup == 32;  // again for each 32 columns
  __m512 sums[kVectors][kRows];  // in registers, once all loops over them are unrolled
#pragma GCC unroll 5
  for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[j][r] = _mm512_setzero_ps();
  const std::uint8_t* codes = w.codes + from / 2;
  const std::int64_t groups = kRows * w.task.row_stride / w.task.run.group;
  const std::int64_t stride = w.stride;
  LastOfRow last;
  for (; columns > 0; columns -= kBf16Pad, tables += kRows * kTablesOf<kGroup>) {
    const bool whole = kRows > 1 || columns >= kBf16Pad;
    if (!whole) codes = last.read(codes);
    if constexpr (kMake) {
      w.fetch_codes(codes + kRows * stride);
      w.template fetch_codes<true>(codes + kNearAhead);
      w.fetch_scales(from, groups);
      make_tables<kRows, kGroup, kBeside>(w, from, whole, tables);
    }
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      // Read again rather than kept: sums take the registers.
      const std::uint8_t* again = codes;
      const __m512i* of_rows = tables;
      __asm__ volatile("" : "+r"(again));
      if constexpr (kReadsTables) __asm__ volatile("" : "+r"(of_rows));
      __m512bh values[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        values[r] = choose<kGroup>(shifted(_mm512_loadu_si512(again + r * stride), s),
                                   of_rows + r * kTablesOf<kGroup>);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) {
        const __m512bh vector = load(x + j * x_stride + 32 * s);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sums[j][r] = _mm512_dpbf16_ps(sums[j][r], values[r], vector);
      }
    }
    codes += kBf16Pad / 2, x += kBf16Pad, from += kBf16Pad;
  }
#pragma GCC unroll 5
  for (int j = 0; j < kVectors; ++j) add_totals<kRows>(sums[j], y + j * y_stride);
}

/// Values are those of dequantize to bf16, bit for bit, but for subnormal ones. Rows of x are taken
/// kMost at a time or one fewer, which not all numbers are sums of: then zeros are among them.
template <int kRows, int kMost, int kGroup, BesideScales kBeside>
void rows_by_tables(const Bf16DotTask& task, std::int64_t row) {
  constexpr std::int64_t kSome = 32;  // of a row's tables
  constexpr int kFewer = kMost > 1 ? kMost - 1 : 1;
  alignas(64) __m512i tables[kSome * kRows * kTablesOf<kGroup>];
  const FourBitRows<kRows, kGroup> w(task, row);
  const std::int64_t parts = (task.m + kMost - 1) / kMost;
  const std::int64_t larger = task.m > parts * kFewer ? task.m - parts * kFewer : 0;
  for (std::int64_t k = 0; k < task.columns; k += kSome * kBf16Pad) {
    const std::int64_t left = task.columns - k;
    const std::int64_t columns = left < kSome * kBf16Pad ? left : kSome * kBf16Pad;
    for (std::int64_t part = 0, j = 0; part < parts; ++part) {
      constexpr auto* kMakeMost = &add_span<kRows, kMost, kGroup, kBeside, true>;
      constexpr auto* kMakeFewer = &add_span<kRows, kFewer, kGroup, kBeside, true>;
      constexpr auto* kAddMost = &add_span<kRows, kMost, kGroup, BesideScales::nothing, false>;
      constexpr auto* kAddFewer = &add_span<kRows, kFewer, kGroup, BesideScales::nothing, false>;
      const bool most = part < larger;
      const auto span = part == 0 ? most ? kMakeMost : kMakeFewer : most ? kAddMost : kAddFewer;
      span(w, tables, k, columns, task.x + j * task.x_stride + k, task.x_stride,
           task.y + j * task.y_stride + row, task.y_stride);
      j += most ? kMost : kFewer;
    }
  }
}

template <int kGroup, BesideScales kBeside>
void all_by_tables(const Bf16DotTask& task) {
  constexpr int kMost = 5;  // 20 sums in 32 registers, with four rows of weight
  static_assert(kMost - 2 == kMoreBf16Rows, "one row of x is taken as one fewer");
  const std::int64_t fours = rows_that_go_on(task) / 4;
  std::int64_t row = 0;
  for (; row < 4 * fours; row += 4) rows_by_tables<4, kMost, kGroup, kBeside>(task, row);
  for (; row < task.rows; ++row) rows_by_tables<1, 1, kGroup, kBeside>(task, row);
}

// ------------------------------------------------------------------------------------------------

template <BesideScales kBeside>
void dot_by_tables(const Bf16DotTask& task) {
  task.run.group == 32 ? all_by_tables<32, kBeside>(task) : all_by_tables<kLong, kBeside>(task);
}
[[gnu::noinline]] void dot_fours(const Bf16DotTask& task, float stretch) {
  const std::int64_t group = task.run.group;
  if (task.rounds)
    return task.run.zeros != nullptr     ? dot_by_tables<BesideScales::zeros>(task)
           : task.run.offsets != nullptr ? dot_by_tables<BesideScales::offsets>(task)
                                         : dot_by_tables<BesideScales::nothing>(task);
  if (task.run.offsets != nullptr) return all_by_scales<32, true>(task, stretch);
  group == 16        ? all_by_scales<16>(task, stretch)
  : group == 32      ? all_by_scales<32>(task, stretch)
  : group == kOfHalf ? all_by_scales<kOfHalf>(task, stretch)
                     : all_by_scales<kLong>(task, stretch);
}

// Of all factors in [1, 2) with 12 bits, this one makes the mean square error of the values least:
// 0.4 of what rounding a normal weight to bf16 costs. Thirds of fp4 become exact.
void dot_nf4(const Bf16DotTask& task) noexcept { dot_fours(task, 0x1.6fep+0f); }
void dot_fp4(const Bf16DotTask& task) noexcept { dot_fours(task, 1.5f); }
void dot_exact(const Bf16DotTask& task) noexcept { dot_fours(task, 1.0f); }

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Products of fp8 weights and one to four rows of bf16, in pairs of bf16, where AVX512-VBMI looks
// bytes up: 64 codes become 64 numbers of bf16 by two lookups, of the magnitude's low byte and of
// its high one. bf16 has them exactly; scales multiply the fp32 sums of their groups, of which a
// register of products has one or two where they are short.
#pragma once
#include <array>
#include <bit>

#include "format/table.h"
#include "kernel/cpu/linear_bf16-inl.h"
#include "kernel/cpu/streams-inl.h"

namespace stowage {
namespace {

constexpr std::int64_t kFloat8Step = 64;  // columns

/// Bytes of what the magnitudes of a format are in bf16.
struct alignas(64) Float8Bytes {
  std::array<std::uint8_t, 128> low, high;
};
template <Codes kCodes>
constexpr Float8Bytes kFloat8Bytes = [] {
  const auto& values = table::kFormats[static_cast<std::size_t>(kCodes)].values;
  Float8Bytes made{};
  for (std::size_t i = 0; i < made.low.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    made.low[i] = static_cast<std::uint8_t>(bits >> 16);
    made.high[i] = static_cast<std::uint8_t>(bits >> 24);
  }
  return made;
}();

/// One for all formats: what they differ in is data.
struct Float8Tables {
  __m512i low[2], high[2];
  explicit Float8Tables(const Float8Bytes& bytes) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes.low.data() + 64 * i);
      high[i] = _mm512_load_si512(bytes.high.data() + 64 * i);
    }
  }
  /// The numbers of 64 codes, the first 32 and the last. The sign of NaN is that of its code.
  [[gnu::always_inline]] void look_up(const std::uint8_t* codes, __m512bh& first,
                                      __m512bh& last) const {
    // Unpacking works inside 16 bytes; these qwords are arranged so that the results are in order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    const __m512i lower = _mm512_permutex2var_epi8(low[0], code, low[1]);
    const __m512i above = _mm512_permutex2var_epi8(high[0], code, high[1]);
    // 0x78: the first, turned where both others are set.
    const __m512i upper =
        _mm512_ternarylogic_epi64(above, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0x78);
    first = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(lower, upper));
    last = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(lower, upper));
  }
};

/// Row `row` of kRows streams, and sums with kVectors of x.
template <int kRows, int kVectors, bool kNear>
struct Float8Rows {
  const Bf16DotTask& task;
  const Float8Tables tables;
  const std::int64_t row, apart, ahead;
  const std::uint8_t* codes[kRows];
  std::int64_t group[kRows];
  using Totals = __m512[kVectors][kRows];

  Float8Rows(const Bf16DotTask& of, const Float8Tables& some, std::int64_t from,
             const Streams& streams)
      : task(of),
        tables(some),
        row(from),
        apart(streams.apart),
        ahead(apart == 1 ? kRows * of.row_stride
                         : bytes_ahead<kNear>(from, apart, of.row_stride, of.columns)) {
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t first = task.run.first + (row + r * apart) * task.row_stride;
      codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + first;
      group[r] =
          task.run.scales == nullptr
              ? 0
              : ((task.one_line ? task.run.first : first) - streams.lag_of(r)) / task.run.group;
    }
  }
  [[gnu::always_inline]] static void clear(Totals& totals) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) totals[v][r] = _mm512_setzero_ps();
  }
  /// The numbers of kFloat8Step columns of a row from k on, in two halves.
  [[gnu::always_inline]] void read(int r, std::int64_t k, __m512bh (&w)[2]) const {
    ask_for_line<kNear>(codes[r] + k + ahead);
    if constexpr (!kNear) ask_for_line<true>(codes[r] + k + kNearAhead);
    tables.look_up(codes[r] + k, w[0], w[1]);
  }
  [[gnu::always_inline]] __m512bh x(int v, std::int64_t k) const {
    return load(task.x + v * task.x_stride + k);
  }
  /// Groups of kFloat8Step and multiples of it, or one for all.
  [[gnu::always_inline]] void add_long() {
    constexpr int kChains = kVectors > 2 ? 1 : 2;  // of each sum
    Totals totals;
    clear(totals);
    std::int64_t at[kRows];
    for (int r = 0; r < kRows; ++r) at[r] = group[r];
    for (std::int64_t k = 0; k < task.columns;) {
      const std::int64_t begin = task.run.first + (task.one_line ? 0 : row * task.row_stride) + k;
      const std::int64_t left = task.columns - k;
      const std::int64_t in_group =
          task.run.scales == nullptr ? left : task.run.group - begin % task.run.group;
      const std::int64_t end = k + (in_group < left ? in_group : left);
      Totals sums[kChains];
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) clear(sums[chain]);
      for (; k < end; k += kFloat8Step) {
        __m512bh of_x[kVectors][2];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) of_x[v][half] = x(v, k + 32 * half);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          __m512bh w[2];
          read(r, k, w);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
              __m512& sum = sums[half % kChains][v][r];
              sum = _mm512_dpbf16_ps(sum, w[half], of_x[v][half]);
            }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512 scale =
            _mm512_set1_ps(task.run.scales == nullptr ? 1.0f : task.run.scales[at[r]++]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const __m512 sum =
              kChains == 1 ? sums[0][v][r] : _mm512_add_ps(sums[0][v][r], sums[kChains - 1][v][r]);
          totals[v][r] = _mm512_fmadd_ps(sum, scale, totals[v][r]);
        }
      }
    }
    finish(totals);
  }
  /// Groups of 32 columns, or 16: a register has one or two of them.
  template <int kGroup>
  [[gnu::always_inline]] void add_short() {
    Totals totals;
    clear(totals);
    std::int64_t at[kRows];
    for (int r = 0; r < kRows; ++r) at[r] = group[r];
    for (std::int64_t k = 0; k < task.columns; k += kFloat8Step) {
      for (int r = 0; r < kRows; ++r) {
        __m512bh w[2];
        read(r, k, w);
        const float* next = task.run.scales + at[r];
        for (int half = 0; half < 2; ++half) {
          const float* of_half = next + half * (32 / kGroup);
          __m512 scale = _mm512_set1_ps(of_half[0]);
          if constexpr (kGroup == 16)
            scale = _mm512_mask_blend_ps(kUpper, scale, _mm512_set1_ps(of_half[1]));
          for (int v = 0; v < kVectors; ++v) {
            const __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), w[half], x(v, k + 32 * half));
            totals[v][r] = _mm512_fmadd_ps(sum, scale, totals[v][r]);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) at[r] += kFloat8Step / kGroup;
    }
    finish(totals);
  }
  void finish(const Totals& totals) const {
    for (int v = 0; v < kVectors; ++v) {
      float all[kRows] = {};
      add_totals<kRows>(totals[v], all);
      for (int r = 0; r < kRows; ++r) task.y[v * task.y_stride + row + r * apart] += all[r];
    }
  }
};

/// Not inlined: its numbers would take the place of sums in registers.
template <int kVectors, int kRows, bool kNear, class Add>
[[gnu::noinline]] void float8_rows(const Bf16DotTask& task, const Float8Tables& tables,
                                   std::int64_t row, const Streams& streams, Add add) {
  Float8Rows<kRows, kVectors, kNear> some(task, tables, row, streams);
  add(some);
}

/// Of rows whose groups end at the same columns, in streams if there is one row of x.
template <int kVectors, class Add>
[[gnu::always_inline]] inline void float8_all(const Bf16DotTask& task, const Float8Bytes& bytes,
                                              Add add) {
  const Float8Tables tables(bytes);
  std::int64_t row = 0;
  const auto rows = [&]<int kRows, bool kNear = false>(const Streams& streams) {
    float8_rows<kVectors, kRows, kNear>(task, tables, row, streams, add);
  };
  const bool together = task.run.scales == nullptr || task.one_line ||
                        task.row_stride % task.run.group == 0 ||
                        task.run.group >= task.rows * task.row_stride;
  if (kVectors == 1 && together) {
    const Streams streams = task.streams.apart == 0 ? quarters(task.rows) : task.streams;
    row = streams.begin;
    for (; task.near && row < streams.end; ++row) rows.template operator()<kStreams, true>(streams);
    for (; row < streams.end; ++row) rows.template operator()<kStreams>(streams);
    row = streams.apart * kStreams;
  }
  constexpr Streams kNext{.apart = 1};
  if (together)
    for (; row + 2 <= task.rows; row += 2) rows.template operator()<2>(kNext);
  for (; row < task.rows; ++row) rows.template operator()<1>(kNext);
}

template <int kVectors>
void float8_long(const Bf16DotTask& task, const Float8Bytes& bytes) {
  float8_all<kVectors>(
      task, bytes, [](auto& rows) __attribute__((always_inline)) { rows.add_long(); });
}
/// Up to two rows of x at a time.
template <int kGroup>
void float8_short(Bf16DotTask task, const Float8Bytes& bytes) {
  const auto add = [](auto& rows) __attribute__((always_inline)) {
    rows.template add_short<kGroup>();
  };
  for (std::int64_t left = task.m; left > 0; left -= 2) {
    if (left == 1) float8_all<1>(task, bytes, add);
    if (left >= 2) float8_all<2>(task, bytes, add);
    task.x += 2 * task.x_stride;
    task.y += 2 * task.y_stride;
  }
}

template <Codes kCodes>
void dot_float8(const Bf16DotTask& task) noexcept {
  const Float8Bytes& bytes = kFloat8Bytes<kCodes>;
  if (task.run.scales != nullptr && task.run.group == 16) return float8_short<16>(task, bytes);
  if (task.run.scales != nullptr && task.run.group == 32) return float8_short<32>(task, bytes);
  if (task.m == 1) return float8_long<1>(task, bytes);
  if (task.m == 2) return float8_long<2>(task, bytes);
  if (task.m == 3) return float8_long<3>(task, bytes);
  float8_long<4>(task, bytes);
}

}  // namespace
}  // namespace stowage

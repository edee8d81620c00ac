// SPDX-License-Identifier: Apache-2.0
// As linear_eights-inl.h, by codes of four bits in groups of 16, 32 or multiples of 64. What codes
// of a group stand for is rounded to bf16 once, sixteen numbers, among which 32 codes choose with
// one lookup by words: a byte is widened to a word, whose low end is one code, and the other four
// bits further. So columns come apart, 0 2 .. 62 and 1 3 .. 63, and x is arranged in this order;
// where the first of two codes is in the high half of its byte, the odd ones come first.
//
// A lookup reads five bits of a word, or six. Those above the code are made to say which of the
// groups it is, and the table has the numbers of all.
#pragma once
#include "kernel/cpu/linear_eights-inl.h"

namespace stowage {
namespace {

void arrange_nibbles(const void* x, std::int64_t n, bool odd_first, std::uint16_t* out) noexcept {
  alignas(64) std::uint16_t evens[32];
  for (int i = 0; i < 32; ++i) evens[i] = static_cast<std::uint16_t>(2 * i);
  const __m512i even = _mm512_load_si512(evens), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  const auto* from = static_cast<const std::uint16_t*>(x);
  for (std::int64_t i = 0; i < n; i += kBf16Block) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 32);
    _mm512_storeu_si512(out + i + (odd_first ? 32 : 0), _mm512_permutex2var_epi16(a, even, b));
    _mm512_storeu_si512(out + i + (odd_first ? 0 : 32), _mm512_permutex2var_epi16(a, odd, b));
  }
}

/// The numbers of a row of weight, 64 columns at a time. kFour: groups of 16, else longer ones.
template <bool kFour>
class NibbleRow {
 public:
  NibbleRow(const Bf16DotTask& task, std::int64_t row)
      : run_(task.run),
        values_(_mm512_loadu_ps(task.values)),
        codes_(static_cast<const std::uint8_t*>(run_.codes) + (run_.first + row) / 2),
        group_((run_.first + row) / run_.group),
        steps_(run_.group < kBf16Block ? 1 : run_.group / kBf16Block),
        left_(steps_ - (run_.first + row) % run_.group / kBf16Block) {}

  [[gnu::always_inline]] void next(std::int64_t ahead, __m512bh& even, __m512bh& odd) {
    ask_for_line<true>(codes_ + ahead);
    const __m512i words =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes_)));
    const __m512i above = _mm512_srli_epi16(words, 4);
    codes_ += kBf16Block / 2;
    if constexpr (kFour) {
      const __m512i first = pair(group_, group_ + 1), last = pair(group_ + 2, group_ + 3);
      group_ += 4;
      even = chosen(first, words, last), odd = chosen(first, above, last);
    } else {
      const bool halves = run_.group < kBf16Block;
      const __m512i table = pair(group_, group_ + halves);
      group_ += halves ? 2 : (--left_ == 0);
      if (left_ == 0) left_ = steps_;
      even = look_up_half(words, table), odd = look_up_half(above, table);
    }
  }

 private:
  [[gnu::always_inline]] __m512 made(std::int64_t group) const {
    __m512 numbers = values_;
    if (run_.zeros != nullptr)
      numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(static_cast<float>(run_.zeros[group])));
    numbers = _mm512_mul_ps(numbers, _mm512_set1_ps(run_.scales[group]));
    if (run_.offsets != nullptr)
      numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(run_.offsets[group]));
    return numbers;
  }
  [[gnu::always_inline]] __m512i pair(std::int64_t first, std::int64_t second) const {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(made(second), made(first)));
  }
  [[gnu::always_inline]] static __m512bh chosen(__m512i first, __m512i words, __m512i last) {
    const __m512i kBits = _mm512_set1_epi16(48);
    const __m512i kQuarter =
        _mm512_setr_epi64(0, 0, 0x10001000100010, 0x10001000100010, 0x20002000200020,
                          0x20002000200020, 0x30003000300030, 0x30003000300030);
    // 0xB8: the third where the second is set, else the first.
    const __m512i place = _mm512_ternarylogic_epi32(words, kBits, kQuarter, 0xB8);
    return reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(first, place, last));
  }

  const Run& run_;
  const __m512 values_;
  const std::uint8_t* codes_;
  std::int64_t group_, steps_, left_;
};

/// As add_eights.
template <bool kFour, int kVectors>
void add_nibbles(const Bf16DotTask& task, std::int64_t row, std::int64_t count) {
  NibbleRow<kFour> rows[] = {{task, row * task.row_stride},
                             {task, (row + count - 1) * task.row_stride}};
  const std::int64_t ahead = kRowsAhead * task.row_stride / 2;
  Sums<kVectors> sums;
  clear<kVectors>(sums);
  for (std::int64_t k = 0; k < task.columns; k += kBf16Block) {
    __m512bh w[kRowsOfEights][2];
#pragma GCC unroll 2
    for (int r = 0; r < kRowsOfEights; ++r) rows[r].next(ahead, w[r][0], w[r][1]);
    add_products<kVectors>(sums, w, task, k);
  }
  add_totals_of_eights<kVectors>(sums, task, row, count);
}

void dot_nibbles(const Bf16DotTask& task) noexcept {
  const bool four = task.run.group == 16;
  const auto add = task.m > 6 ? (four ? &add_nibbles<true, 8> : &add_nibbles<false, 8>)
                              : (four ? &add_nibbles<true, 6> : &add_nibbles<false, 6>);
  for (std::int64_t row = 0; row < task.rows; row += kRowsOfEights)
    add(task, row, row + 1 < task.rows ? 2 : 1);
}

}  // namespace
}  // namespace stowage

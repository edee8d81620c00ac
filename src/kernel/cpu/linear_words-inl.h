// SPDX-License-Identifier: Apache-2.0
// The same products of 4-bit codes that stand for the values of a table, nf4 and fp4: these become
// multiples of one number too, but of 13 bits and a sign, of which a product with x takes words.
//
//   w = scale word / kUnits,  |word| <= kUnits < 2^13,  sum x w = scale 2^e (sum X word) / kUnits
//
// The sum in brackets is exact in 32 bits, and rounded to fp32. A load of 32 bytes is a block of 64
// columns. Two lookups make the low and the high bytes of words, which come together in the lower
// and the upper eights of each 16: so a lane of the sum has four neighbors, and the four that lie
// 16 further. These eight share an exponent. x is arranged block by block, as the words lie:
// even columns of lower eights, of upper ones, odd columns likewise; then each lane's 2^e.
#pragma once
#include "kernel/cpu/linear_bytes-inl.h"

namespace stowage {
namespace {

/// Of all numbers of 13 bits, the one whose multiples come nearest to the values, relative to each:
/// 2^-12.7 of nf4, a sixteenth of what rounding to bf16 may cost. Values of fp4 are 1/192 times an
/// integer.
consteval int units_of(Codes c) { return c == Codes::nf4 ? 7854 : 42 * 192; }
consteval bool has_words(Codes c) { return c == Codes::nf4 || c == Codes::fp4; }
consteval int word_of_code(Codes c, int code) {
  const float word =
      format_of(c).values[static_cast<std::size_t>(code)] * static_cast<float>(units_of(c));
  return static_cast<int>(word < 0 ? word - 0.5f : word + 0.5f);
}

struct WordsOfX {
  std::int16_t even[2][16], odd[2][16];  // of lower eights, of upper ones
  float powers[kWidth], unused[kWidth];  // a whole number of cache lines
};
static_assert(sizeof(WordsOfX) == kBytesBlock * kBytesOfX[kForWords]);

template <Dtype kIn>
bool arrange_words(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  for (std::int64_t k = 0; k < n; k += kBytesBlock, out += sizeof(WordsOfX)) {
    WordsOfX block{};
    float values[kBytesBlock];
    for (std::int64_t at = 0; at < kBytesBlock; at += kWidth) {
      const void* eight = from + (k + at) * bytes_of(kIn);
      store_as(values + at, kIn == Dtype::bf16 ? Lanes::load_bf16(eight) : Lanes::load_f16(eight));
    }
    for (int lane = 0; lane < kWidth; ++lane) {
      const float* lower = values + lane / 4 * 32 + lane % 4 * 4;
      I numbers;
      if (!fix_eight(_mm256_loadu2_m128(lower + 16, lower), numbers, block.powers[lane]))
        return false;
      const int word = lane / 4 * 8 + lane % 4 * 2;
      for (int i = 0; i < 8; ++i) {
        auto& to = i % 2 == 0 ? block.even : block.odd;
        to[i / 4][word + i % 4 / 2] = static_cast<std::int16_t>(numbers[i]);
      }
    }
    store_as(out, block);
  }
  return true;
}

/// sums + the products of words, two to each.
[[gnu::always_inline]] inline __m256i add_twos(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__)
  return _mm256_dpwssd_epi32(sums, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

template <Codes kCodes>
struct WordTables {
  __m256i low, high;
  WordTables()
      : low(_mm256_broadcastsi128_si256(bytes<0>(Places{}))),
        high(_mm256_broadcastsi128_si256(bytes<8>(Places{}))) {}

 private:
  template <int... kCode>
  struct Of {};
  using Places = Of<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
  template <int kShift, int... kCode>
  static __m128i bytes(Of<kCode...>) {
    return _mm_setr_epi8(static_cast<char>(word_of_code(kCodes, kCode) >> kShift & 0xFF)...);
  }
};

template <Codes kCodes>
struct Words {
  __m256i even[2], odd[2];
  [[gnu::always_inline]] Words(const std::uint8_t* codes, const WordTables<kCodes>& tables) {
    static_assert(packing_of(kCodes) == Packing::high_first);
    const __m256i pairs = load_as<__m256i>(codes), low = _mm256_set1_epi8(15);
    look_up(tables, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low), even);
    look_up(tables, _mm256_and_si256(pairs, low), odd);
  }
  /// Sums over eight columns.
  [[gnu::always_inline]] F times(const WordsOfX& x) const {
    __m256i sums = _mm256_setzero_si256();
    for (int half = 0; half < 2; ++half) {
      sums = add_twos(sums, even[half], load_as<__m256i>(x.even[half]));
      sums = add_twos(sums, odd[half], load_as<__m256i>(x.odd[half]));
    }
    return _mm256_cvtepi32_ps(sums);
  }

 private:
  [[gnu::always_inline]] static void look_up(const WordTables<kCodes>& tables, __m256i codes,
                                             __m256i (&words)[2]) {
    const __m256i low = _mm256_shuffle_epi8(tables.low, codes);
    const __m256i high = _mm256_shuffle_epi8(tables.high, codes);
    words[0] = _mm256_unpacklo_epi8(low, high);
    words[1] = _mm256_unpackhi_epi8(low, high);
  }
};

template <Codes kCodes, int kOfBlock>
struct WordsWay {
  using Block = WordsOfX;
  static constexpr int kGroups = kOfBlock, kBits = 4;
  static constexpr float kUnit = 1.0f / static_cast<float>(units_of(kCodes));
  WordTables<kCodes> tables;

  template <int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    for (int r = 0; r < kRows; ++r) {
      const Words<kCodes> words(at.codes[r], tables);
      const F scale = spread<kGroups>(at.task.run.scales + at.groups[r]);
      for (int j = 0; j < kM; ++j) {
        const auto& x = at.template block_of_x<WordsOfX>(j);
        sums[r][j] =
            Lanes::multiply_add(words.times(x) * Lanes::load_f32(x.powers), scale, sums[r][j]);
      }
    }
  }
};

template <Codes kCodes>
void words_dot(const BytesDotTask& task) noexcept {
  if (task.run.group == kBytesBlock / 2) return add_rows<WordsWay<kCodes, 2>, 3>(task);
  if (task.run.group == kBytesBlock) return add_rows<WordsWay<kCodes, 1>, 3>(task);
  add_rows<WordsWay<kCodes, kSeveralBlocks>, 3>(task);
}

/// Adds these to a table of the other products in integers.
constexpr BytesKernels with_words(BytesKernels kernels) {
  kernels.arrange[kForWords][2] = &arrange_words<Dtype::bf16>;
  kernels.arrange[kForWords][3] = &arrange_words<Dtype::f16>;
  for_all_codes([&]<Codes kCodes>() {
    if constexpr (has_words(kCodes)) kernels.set(kCodes, &words_dot<kCodes>, kForWords);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage

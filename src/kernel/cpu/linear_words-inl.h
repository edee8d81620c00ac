// SPDX-License-Identifier: Apache-2.0
// The same products of 4-bit codes that stand for the values of a table, nf4 and fp4: these become
// multiples of one number too, but of 13 bits and a sign, of which a product with x takes words.
//
//   w = scale word / kUnits,  |word| <= kUnits < 2^13,  sum x w = scale 2^e (sum X word) / kUnits
//
// The sum in brackets is exact in 32 bits, and rounded to fp32. A register of codes is a block of
// 64 columns, or 128. Two lookups make the low and the high bytes of words, which come together in
// the lower and the upper eights of each 16: so a lane of the sum has four neighbors, and the four
// that lie 16 further. These eight share an exponent. x is arranged block by block, as the words
// lie: even columns of lower eights, of upper ones, odd columns likewise; then each lane's 2^e.
#pragma once
#include "kernel/cpu/linear_bytes-inl.h"
#include "kernel/cpu/words-inl.h"

namespace stowage {
namespace {

struct WordsOfX {
  std::int16_t even[2][2 * kWidth], odd[2][2 * kWidth];  // of lower eights, of upper ones
  float powers[kWidth], unused[kWidth];                  // a whole number of cache lines
};
static_assert(sizeof(WordsOfX) == kPairsBlock * kBytesOfX[kForWords]);

template <Dtype kIn>
bool arrange_words(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  for (std::int64_t k = 0; k < n; k += kPairsBlock, out += sizeof(WordsOfX)) {
    WordsOfX block{};
    float values[kPairsBlock] = {};
    for (std::int64_t at = 0; at < kPairsBlock && k + at < n; at += kNeighbors)
      store_as(values + at, load_eight<kIn>(from + (k + at) * bytes_of(kIn)));
    for (int lane = 0; lane < kWidth; ++lane) {
      const float* lower = values + lane / 4 * 32 + lane % 4 * 4;
      Numbers numbers;
      if (!fix_eight(join_fours(lower, lower + 16), numbers, block.powers[lane])) return false;
      std::int32_t each[kNeighbors];
      store_as(each, numbers);
      const int word = lane / 4 * 8 + lane % 4 * 2;
      for (int i = 0; i < 8; ++i) {
        auto& to = i % 2 == 0 ? block.even : block.odd;
        to[i / 4][word + i % 4 / 2] = static_cast<std::int16_t>(each[i]);
      }
    }
    store_as(out, block);
  }
  return true;
}

template <Codes kCodes>
struct WordTables {
  static constexpr SixteenBytes kLow = bytes_of_words(kCodes, 0), kHigh = bytes_of_words(kCodes, 8);
  Bytes low = repeat(kLow.of), high = repeat(kHigh.of);
};

template <Codes kCodes>
struct Words {
  Bytes even[2], odd[2];
  [[gnu::always_inline]] Words(Bytes pairs, const WordTables<kCodes>& tables) {
    static_assert(packing_of(kCodes) == Packing::high_first);
    look_up_words(tables, high_nibbles(pairs), even);
    look_up_words(tables, low_nibbles(pairs), odd);
  }
  /// Sums over eight columns.
  [[gnu::always_inline]] F times(const WordsOfX& x) const {
    Bytes sums{};
    for (int half = 0; half < 2; ++half) {
      sums = add_twos(sums, even[half], load_as<Bytes>(x.even[half]));
      sums = add_twos(sums, odd[half], load_as<Bytes>(x.odd[half]));
    }
    return to_floats(sums);
  }

 private:
  [[gnu::always_inline]] static void look_up_words(const WordTables<kCodes>& tables, Bytes codes,
                                                   Bytes (&words)[2]) {
    const Bytes low = look_up(tables.low, codes), high = look_up(tables.high, codes);
    words[0] = low_words(low, high);
    words[1] = high_words(low, high);
  }
};

template <Codes kCodes, int kOfBlock>
struct WordsWay {
  using Block = WordsOfX;
  static constexpr std::int64_t kColumns = kPairsBlock;
  static constexpr int kGroups = kOfBlock;
  static constexpr float kUnit = 1.0f / static_cast<float>(units_of(kCodes));
  WordTables<kCodes> tables;

  static constexpr int bits() { return 4; }
  template <bool kWhole, int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    for (int r = 0; r < kRows; ++r) {
      const Words<kCodes> words(load_codes<kWhole>(at.codes[r]), tables);
      const float* scales = at.task.run.scales + at.groups[r];
      const F scale = kWhole ? spread<kGroups>(scales) : spread_half<kGroups>(scales);
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
  if (task.run.group == 32) return add_rows<WordsWay<kCodes, kPairsBlock / 32>, 3>(task);
  if (task.run.group == 64) return add_rows<WordsWay<kCodes, kPairsBlock / 64>, 3>(task);
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

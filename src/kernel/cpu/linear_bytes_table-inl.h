// SPDX-License-Identifier: Apache-2.0
// The same products of 4-bit codes that stand for the values of a table, nf4 and fp4, where bytes
// of either sign multiply each other (NEON): words of 13 bits and a sign, as in linear_words-inl.h,
// are two bytes, as x is.
//
//   w = scale word / kUnits,  word = 256 upper + lower, lower from -128 to 127
//   sum word X = 2^16 sum upper high + 2^8 (sum upper low + sum lower high) + sum lower low
#pragma once
#include "kernel/cpu/words-inl.h"

namespace stowage {
namespace {

consteval SixteenBytes lower_bytes(Codes c) { return bytes_of_words(c, 0); }
consteval SixteenBytes upper_bytes(Codes c) {
  SixteenBytes bytes{};
  for (int code = 0; code < 16; ++code)
    bytes.of[code] =
        static_cast<std::int8_t>((word_of_code(c, code) - lower_bytes(c).of[code]) / 256);
  return bytes;
}

template <Codes kCodes, int kOfBlock>
struct TableWay {
  using Block = BlockOfX;
  static constexpr std::int64_t kColumns = kPairsBlock;
  static constexpr int kGroups = kOfBlock;
  static constexpr float kUnit = 1.0f / static_cast<float>(units_of(kCodes));
  static constexpr SixteenBytes kLower = lower_bytes(kCodes), kUpper = upper_bytes(kCodes);
  Bytes lower = repeat(kLower.of), upper = repeat(kUpper.of);

  static constexpr int bits() { return 4; }
  template <bool kWhole, int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    for (int r = 0; r < kRows; ++r) {
      const Bytes pairs = load_as<Bytes>(at.codes[r]);
      const Bytes codes[2] = {high_nibbles(pairs), low_nibbles(pairs)};
      const Bytes upper_of[2] = {look_up(upper, codes[0]), look_up(upper, codes[1])};
      const Bytes lower_of[2] = {look_up(lower, codes[0]), look_up(lower, codes[1])};
      const F scale = spread<kGroups>(at.task.run.scales + at.groups[r]);
      for (int j = 0; j < kM; ++j) {
        const auto& x = at.template block_of_x<BlockOfX>(j);
        Bytes exact = left_in_lanes<8>(add_both(Bytes{}, upper_of, x.high));
        exact = left_in_lanes<8>(add_both(add_both(exact, upper_of, x.low), lower_of, x.high));
        exact = add_both(exact, lower_of, x.low);
        sums[r][j] =
            Lanes::multiply_add(to_floats(exact) * Lanes::load_f32(x.powers), scale, sums[r][j]);
      }
    }
  }

 private:
  using OfX = std::int8_t[2][kPairsBlock / 2];
  [[gnu::always_inline]] static Bytes add_both(Bytes sums, const Bytes (&words)[2],
                                               const OfX& bytes) {
    return add_fours(add_fours(sums, words[0], load_as<Bytes>(bytes[0])), words[1],
                     load_as<Bytes>(bytes[1]));
  }
};

template <Codes kCodes>
void table_dot(const BytesDotTask& task) noexcept {
  static_assert(packing_of(kCodes) == Packing::high_first);
  if (task.run.group == 32) return add_rows<TableWay<kCodes, kPairsBlock / 32>, 4>(task);
  add_rows<TableWay<kCodes, kSeveralBlocks>, 4>(task);
}

/// Adds these to a table of the other products in integers.
constexpr BytesKernels with_tables(BytesKernels kernels) {
  kernels.arrange[kForWords][2] = kernels.arrange[kForDigits][2];
  kernels.arrange[kForWords][3] = kernels.arrange[kForDigits][3];
  for_all_codes([&]<Codes kCodes>() {
    if constexpr (has_words(kCodes)) kernels.set(kCodes, &table_dot<kCodes>, kForWords);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage

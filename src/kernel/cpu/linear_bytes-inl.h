// SPDX-License-Identifier: Apache-2.0
// Products of 4-bit weights and a few rows of x in integers: values of such formats are small
// multiples of one number, and bytes multiply a register at a time, four to a sum where there is
// VNNI. x is in fixed point, each eight neighbors under a power of two of their own:
//
//   x = X 2^e,  X = 256 high + low, |X| <= 2^14, low from -128 to 127
//   w = scale unit (digit + least), digit from 0 on
//   sum x w = scale unit 2^e (256 sum high digit + sum low digit + least sum X)
//
// The sum in brackets is exact. A register of codes is a block of 64 columns, or of 128 in vectors
// of 512 bits and 32 in those of 128; byte i has columns 2 i and 2 i + 1. x is arranged block by
// block: high bytes of even columns, of odd ones, low bytes likewise; then, for each eight columns,
// sum X and 2^e.
#pragma once
#include "kernel/cpu/bytes-inl.h"
#include "kernel/cpu/fixed-inl.h"
#include "kernel/cpu/linear_together-inl.h"

namespace stowage {
namespace {

/// The largest power of two, from 1/8 to 1, that all values of a format are multiples of; 0: none.
consteval float unit_of(Codes c) {
  for (const float unit : {1.0f, 0.5f, 0.25f, 0.125f}) {
    bool all = true;
    for (const float value : format_of(c).values)
      all = all && value / unit == static_cast<float>(static_cast<int>(value / unit));
    if (all) return unit;
  }
  return 0;
}
/// The least value in units.
consteval int least_digit(Codes c) {
  float least = 0;
  for (const float value : format_of(c).values) least = value < least ? value : least;
  return static_cast<int>(least / unit_of(c));
}
consteval int digit_of(Codes c, int code) {
  return static_cast<int>(format_of(c).values[static_cast<std::size_t>(code)] / unit_of(c)) -
         least_digit(c);
}
consteval int largest_digit(Codes c) {
  int most = 0;
  for (int code = 0; code < 16; ++code) most = digit_of(c, code) > most ? digit_of(c, code) : most;
  return most;
}
struct SixteenBytes {
  alignas(16) std::int8_t of[16];
};
consteval SixteenBytes digits_of(Codes c) {
  SixteenBytes digits{};
  for (int code = 0; code < 16; ++code)
    digits.of[code] = static_cast<std::int8_t>(digit_of(c, code));
  return digits;
}
/// Whether four products of a digit and a byte fit 16 bits.
consteval bool has_digits(Codes c) {
  return is_four_bit(c) && packing_of(c) == Packing::low_first && unit_of(c) != 0 &&
         largest_digit(c) * 128 * 4 <= 0x7FFF;
}
consteval bool are_codes_digits(Codes c) {
  for (int code = 0; code < 16; ++code)
    if (digit_of(c, code) != code) return false;
  return true;
}

constexpr std::int64_t kPairsBlock = kNeighbors * kWidth;  // columns of a register of codes

struct BlockOfX {
  std::int8_t high[2][kPairsBlock / 2], low[2][kPairsBlock / 2];  // of even columns, odd ones
  std::int32_t sums[kWidth];
  float powers[kWidth];
};
static_assert(sizeof(BlockOfX) == kPairsBlock * kBytesOfX[kForDigits]);

inline bool arrange_eight(Floats x, std::int64_t at, BlockOfX& block) {
  const auto eight = static_cast<std::size_t>(at / kNeighbors);
  Numbers numbers;
  if (!fix_eight(x, numbers, block.powers[eight])) return false;
  block.sums[eight] = total(numbers);
  const Numbers parted = part(numbers), high = high_of(parted);
  put_bytes(high, block.high[0] + at / 2, block.high[1] + at / 2);
  put_bytes(low_of(parted, high), block.low[0] + at / 2, block.low[1] + at / 2);
  return true;
}

/// Blocks of kColumns; zeros fill the last.
template <Dtype kIn, class Block, std::int64_t kColumns>
bool arrange_bytes(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  for (std::int64_t k = 0; k < n; k += kColumns, out += sizeof(Block)) {
    Block block{};
    for (std::int64_t at = 0; at < kColumns && k + at < n; at += kNeighbors)
      if (!arrange_eight(load_eight<kIn>(from + (k + at) * bytes_of(kIn)), at, block)) return false;
    store_as(out, block);
  }
  return true;
}

/// What a block of x has but its bytes: sums, so many times each, and as floats; powers.
struct RestOfX {
  Bytes times;
  F sums, powers;
  template <class Block>
  [[gnu::always_inline]] RestOfX(const Block& x, int many)
      : times(reinterpret_cast<Bytes>(load_as<I>(x.sums) * many)),
        sums(__builtin_convertvector(load_as<I>(x.sums), F)),
        powers(Lanes::load_f32(x.powers)) {}
};

/// What stands for the scales of a block, or of the first half of one: digits are less by `from`,
/// products by `offset`.
template <Zero kZero, int kGroups, bool kWhole>
struct BlockScales {
  F scale, from = {}, offset = {};
  BlockScales(const Run& run, std::int64_t g) : scale(of(run.scales + g)) {
    if constexpr (kZero == Zero::offset) offset = of(run.offsets + g);
    if constexpr (kZero == Zero::code) from = of(run.zeros + g);
  }
  /// sum += what exact sums of digits and bytes stand for.
  [[gnu::always_inline]] void add(F exact, const RestOfX& x, F& sum) const {
    if constexpr (kZero == Zero::code) exact = less_product(from, x.sums, exact);  // below 2^24
    sum = Lanes::multiply_add(exact * x.powers, scale, sum);
    if constexpr (kZero == Zero::offset) sum = less_product(x.sums * x.powers, offset, sum);
  }

 private:
  template <class T>
  static F of(const T* numbers) {
    return kWhole ? spread<kGroups>(numbers) : spread_half<kGroups>(numbers);
  }
};

/// A register of codes, or half of one and zeros.
template <bool kWhole>
[[gnu::always_inline]] inline Bytes load_codes(const std::uint8_t* codes) {
  if constexpr (kWhole) return load_as<Bytes>(codes);
  Bytes half{};
  __builtin_memcpy(&half, codes, sizeof half / 2);
  return half;
}

template <Codes kCodes>
struct Digits {
  Bytes even, odd;
  Digits() = default;
  [[gnu::always_inline]] explicit Digits(Bytes pairs) {
    if constexpr (are_codes_digits(kCodes)) {
      even = low_nibbles(pairs);
      odd = high_nibbles(pairs);
    } else {
      static constexpr SixteenBytes kDigits = digits_of(kCodes);
      look_up_both(repeat(kDigits.of), pairs, even, odd);
    }
  }
  /// Sums over each eight columns, and `more`.
  [[gnu::always_inline]] F times(const BlockOfX& x, Bytes more) const {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    return to_floats(add_words<256>(add_words<1>(more, products(x.low)), products(x.high)));
#else
    const Bytes high = left_in_lanes<8>(add_products(x.high, Bytes{}));
    return to_floats(add_lanes(add_products(x.low, more), high));
#endif
  }

 private:
  using OfX = std::int8_t[2][kPairsBlock / 2];
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  [[gnu::always_inline]] Bytes products(const OfX& bytes) const {
    return products_in_words(even, load_as<Bytes>(bytes[0]), odd, load_as<Bytes>(bytes[1]));
  }
#else
  [[gnu::always_inline]] Bytes add_products(const OfX& bytes, Bytes sums) const {
    return add_fours(add_fours(sums, even, load_as<Bytes>(bytes[0])), odd,
                     load_as<Bytes>(bytes[1]));
  }
#endif
};

/// Scales of kOfBlock groups of a block that lie in the run, and what stands beside them.
template <Zero kZero, int kOfBlock>
struct ScalesOfRun {
  static constexpr int kGroups = kOfBlock;
  explicit ScalesOfRun(const BytesDotTask& /*task*/) {}
  /// sum += what exact sums of row r stand for.
  template <bool kWhole, int kRows>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, int r, F exact, const RestOfX& x,
                                  F& sum) const {
    BlockScales<kZero, kGroups, kWhole>(at.task.run, at.groups[r]).add(exact, x, sum);
  }
  void end_block() const {}
};

template <Codes kCodes, class SomeScales>
struct BytesWay {
  using Block = BlockOfX;
  using Scales = SomeScales;
  static constexpr std::int64_t kColumns = kPairsBlock;
  static constexpr int kGroups = Scales::kGroups;
  static constexpr float kUnit = unit_of(kCodes);
  Scales scales;
  explicit BytesWay(const BytesDotTask& task) : scales(task) {}
  static constexpr int bits() { return 4; }
  template <bool kWhole, int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) {
    Digits<kCodes> digits[kRows];
    for (int r = 0; r < kRows; ++r) digits[r] = Digits<kCodes>(load_codes<kWhole>(at.codes[r]));
    for (int j = 0; j < kM; ++j) {
      const auto& x = at.template block_of_x<BlockOfX>(j);
      const RestOfX rest(x, least_digit(kCodes));
      F exact[kRows];
      for (int r = 0; r < kRows; ++r) exact[r] = digits[r].times(x, rest.times);
      for (int r = 0; r < kRows; ++r)
        scales.template add<kWhole>(at, r, exact[r], rest, sums[r][j]);
    }
    scales.end_block();
  }
};

template <Codes kCodes, Zero kZero>
void bytes_groups(const BytesDotTask& task) {
  const auto rows = [&]<int kGroups>() {
    add_rows<BytesWay<kCodes, ScalesOfRun<kZero, kGroups>>, 4>(task);
  };
  if (task.run.group == 16) return rows.template operator()<kPairsBlock / 16>();
  if (task.run.group == 32) return rows.template operator()<kPairsBlock / 32>();
  if (task.run.group == 64) return rows.template operator()<kPairsBlock / 64>();
  rows.template operator()<kSeveralBlocks>();
}

template <Codes kCodes>
void bytes_dot(const BytesDotTask& task) noexcept {
  if constexpr (may_have_zeros(kCodes))
    if (task.run.zeros != nullptr) return bytes_groups<kCodes, Zero::code>(task);
  if constexpr (may_have_offsets(kCodes) || may_be_rounded(kCodes))
    if (task.run.offsets != nullptr) return bytes_groups<kCodes, Zero::offset>(task);
  bytes_groups<kCodes, Zero::none>(task);
}

constexpr BytesKernels bytes_kernels() {
  BytesKernels kernels{};
  kernels.block[kForDigits] = kernels.block[kForWords] = kPairsBlock;
  kernels.arrange[kForDigits][2] = &arrange_bytes<Dtype::bf16, BlockOfX, kPairsBlock>;
  kernels.arrange[kForDigits][3] = &arrange_bytes<Dtype::f16, BlockOfX, kPairsBlock>;
  for_all_codes([&]<Codes kCodes>() {
    if constexpr (has_digits(kCodes)) kernels.set(kCodes, &bytes_dot<kCodes>, kForDigits);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage

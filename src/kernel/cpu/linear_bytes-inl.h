// SPDX-License-Identifier: Apache-2.0
// Products of 4-bit weights and a few rows of x in integers, in vectors of AVX2: values of such
// formats are small multiples of one number, and bytes multiply 32 at a time, four to a sum where
// there is VNNI. x is in fixed point, each eight neighbors under a power of two of their own:
//
//   x = X 2^e,  X = 256 high + low, |X| <= 2^14, low from -128 to 127
//   w = scale unit (digit + least), digit from 0 on
//   sum x w = scale unit 2^e (256 sum high digit + sum low digit + least sum X)
//
// The sum in brackets is exact. A load of 32 bytes is a block of 64 columns; byte i has columns 2 i
// and 2 i + 1. x is arranged block by block: high bytes of even columns, of odd ones, low bytes
// likewise; then, for each eight columns, sum X and 2^e.
#pragma once
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

constexpr std::int64_t kNeighbors = 8;  // neighbors that share an exponent
constexpr int kFraction = 13;           // bits of the largest of them behind its first one

struct BlockOfX {
  std::int8_t high[2][kBytesBlock / 2], low[2][kBytesBlock / 2];  // of even columns, odd ones
  float sums[kBytesBlock / kNeighbors], powers[kBytesBlock / kNeighbors];
};
static_assert(sizeof(BlockOfX) == kBytesBlock * kBytesOfX[kForDigits] && kWidth == kNeighbors);

/// The exponents that x may have, so that powers and their products with sums are normal numbers.
constexpr std::uint32_t kLeastExponent = 27, kMostExponent = 227;

/// Low bytes: the first four of even columns, then those of odd ones.
inline void put_bytes(I numbers, std::int64_t at, std::int8_t (&to)[2][kBytesBlock / 2]) {
  std::int8_t bytes[kNeighbors];
  Lanes::store_u8(bytes, numbers);
  __builtin_memcpy(to[0] + at, bytes, kNeighbors / 2);
  __builtin_memcpy(to[1] + at, bytes + kNeighbors / 2, kNeighbors / 2);
}
inline std::int32_t total(__m256i numbers) {
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
  const __m128i two = _mm_hadd_epi32(four, four);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
}

/// Eight neighbors in fixed point, X, and their 2^e; or false.
template <int kBits = kFraction>
inline bool fix_eight(F x, I& numbers, float& power) {
  const std::uint32_t most = Lanes::largest(magnitude(x)), exponent = most >> 23;
  numbers = I{}, power = 1;
  if (most == 0) return true;
  if (exponent < kLeastExponent || exponent > kMostExponent) return false;
  power = __builtin_bit_cast(float, (exponent - kBits) << 23);
  const float inverse = __builtin_bit_cast(float, (254 - (exponent - kBits)) << 23);
  numbers = reinterpret_cast<I>(_mm256_cvtps_epi32(x * splat(inverse)));
  return true;
}

inline bool arrange_eight(F x, std::int64_t at, BlockOfX& block) {
  const auto eight = static_cast<std::size_t>(at / kNeighbors);
  I number;
  if (!fix_eight(x, number, block.powers[eight])) return false;
  const __m256i parted = _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(number),
                                                     _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  const I ordered = reinterpret_cast<I>(parted), high = (ordered + 128) >> 8;
  put_bytes(high, at / 2, block.high);
  put_bytes(ordered - (high << 8), at / 2, block.low);
  block.sums[eight] = static_cast<float>(total(parted));
  return true;
}

template <Dtype kIn, class Block>
bool arrange_bytes(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  for (std::int64_t k = 0; k < n; k += kBytesBlock, out += sizeof(Block)) {
    Block block;
    for (std::int64_t at = 0; at < kBytesBlock; at += kNeighbors) {
      const void* eight = from + (k + at) * bytes_of(kIn);
      const F values = kIn == Dtype::bf16 ? Lanes::load_bf16(eight) : Lanes::load_f16(eight);
      if (!arrange_eight(values, at, block)) return false;
    }
    store_as(out, block);
  }
  return true;
}

/// A number of each group of a block, in the lanes of its columns; `both` has them in each half.
template <int kGroups>
F spread(__m256 both) {
  const __m256i which = kGroups == 2 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)
                                     : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  return _mm256_permutevar_ps(both, which);
}
template <int kGroups>
F spread(const float* numbers) {
  if constexpr (kGroups <= 1) return _mm256_broadcast_ss(numbers);
  if constexpr (kGroups == 2)
    return spread<2>(_mm256_castpd_ps(_mm256_set1_pd(load_as<double>(numbers))));
  if constexpr (kGroups == 4)
    return spread<4>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(numbers)));
}
/// The same of integers.
template <int kGroups>
F spread(const std::int8_t* numbers) {
  if constexpr (kGroups <= 1) return splat(static_cast<float>(*numbers));
  std::int32_t some = 0;
  __builtin_memcpy(&some, numbers, kGroups);
  const __m128 made = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(some)));
  return spread<kGroups>(_mm256_set_m128(made, made));
}

/// What stands for the scales of a block: digits are less by `from`, products by `offset`.
template <Codes kCodes, Zero kZero, int kGroups>
struct BlockScales {
  F scale, from, offset = {};
  BlockScales(const Run& run, std::int64_t g)
      : scale(spread<kGroups>(run.scales + g)),
        from(splat(static_cast<float>(-least_digit(kCodes)))) {
    if constexpr (kZero == Zero::offset) offset = spread<kGroups>(run.offsets + g);
    if constexpr (kZero == Zero::code) from += spread<kGroups>(run.zeros + g);
  }
  /// sum += what exact sums of digits and bytes stand for.
  [[gnu::always_inline]] void add(F exact, const BlockOfX& x, F& sum) const {
    const F sums = Lanes::load_f32(x.sums), powers = Lanes::load_f32(x.powers);
    const bool same = kZero != Zero::code && least_digit(kCodes) == 0;
    const F number = same ? exact : _mm256_fnmadd_ps(from, sums, exact);  // exact: below 2^24
    sum = Lanes::multiply_add(number * powers, scale, sum);
    if constexpr (kZero == Zero::offset) sum = _mm256_fnmadd_ps(sums * powers, offset, sum);
  }
};

#if defined(__AVX512VNNI__)
/// To each of the sums: four digits times four bytes.
inline __m256i add_fours(__m256i sums, __m256i digits, __m256i bytes) {
  return _mm256_dpbusd_epi32(sums, digits, bytes);
}
#elif defined(__AVXVNNI__)
inline __m256i add_fours(__m256i sums, __m256i digits, __m256i bytes) {
  return _mm256_dpbusd_avx_epi32(sums, digits, bytes);
}
#endif

template <Codes kCodes>
struct Digits {
  __m256i even, odd;
  Digits() = default;
  [[gnu::always_inline]] explicit Digits(const std::uint8_t* codes) {
    const __m256i pairs = load_as<__m256i>(codes), low = _mm256_set1_epi8(15);
    even = _mm256_and_si256(pairs, low);
    odd = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
    if constexpr (!are_codes_digits(kCodes)) {
      const __m256i table = _mm256_broadcastsi128_si256(digits());
      even = _mm256_shuffle_epi8(table, even);
      odd = _mm256_shuffle_epi8(table, odd);
    }
  }
  /// Sums over each eight columns.
  [[gnu::always_inline]] F times(const BlockOfX& x) const {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    const __m256i high = _mm256_slli_epi32(add_products(x.high, _mm256_setzero_si256()), 8);
    return _mm256_cvtepi32_ps(add_products(x.low, high));
#else
    const __m256i high = products(x.high), low = products(x.low);
    const __m256i sums = _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)),
                                          _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
    return _mm256_cvtepi32_ps(sums);
#endif
  }

 private:
  static __m128i digits() {
    return []<int... kCode>(Places<kCode...>) {
      return _mm_setr_epi8(static_cast<char>(digit_of(kCodes, kCode))...);
    }
    (Places<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>{});
  }
  template <int... kCode>
  struct Places {};
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  [[gnu::always_inline]] __m256i add_products(const std::int8_t (&bytes)[2][kBytesBlock / 2],
                                              __m256i sums) const {
    sums = add_fours(sums, even, load_as<__m256i>(bytes[0]));
    return add_fours(sums, odd, load_as<__m256i>(bytes[1]));
  }
#else
  [[gnu::always_inline]] __m256i products(const std::int8_t (&bytes)[2][kBytesBlock / 2]) const {
    return _mm256_add_epi16(_mm256_maddubs_epi16(even, load_as<__m256i>(bytes[0])),
                            _mm256_maddubs_epi16(odd, load_as<__m256i>(bytes[1])));
  }
#endif
};

template <Codes kCodes, Zero kZero, int kOfBlock>
struct BytesWay {
  using Block = BlockOfX;
  static constexpr int kGroups = kOfBlock, kBits = 4;
  static constexpr float kUnit = unit_of(kCodes);
  template <int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    Digits<kCodes> digits[kRows];
    for (int r = 0; r < kRows; ++r) digits[r] = Digits<kCodes>(at.codes[r]);
    for (int j = 0; j < kM; ++j) {
      const auto& x = at.template block_of_x<BlockOfX>(j);
      F exact[kRows];
      for (int r = 0; r < kRows; ++r) exact[r] = digits[r].times(x);
      for (int r = 0; r < kRows; ++r)
        BlockScales<kCodes, kZero, kGroups>(at.task.run, at.groups[r]).add(exact[r], x, sums[r][j]);
    }
  }
};

template <Codes kCodes, Zero kZero, int kGroups>
void bytes_rows(const BytesDotTask& task) {
#if defined(__AVX512VNNI__)
  constexpr int kMost = 3;  // quick enough that two rows twice are quicker than four
#else
  constexpr int kMost = 4;
#endif
  add_rows<BytesWay<kCodes, kZero, kGroups>, kMost>(task);
}

template <Codes kCodes, Zero kZero>
void bytes_groups(const BytesDotTask& task) {
  if (task.run.group == kBytesBlock / 4) return bytes_rows<kCodes, kZero, 4>(task);
  if (task.run.group == kBytesBlock / 2) return bytes_rows<kCodes, kZero, 2>(task);
  if (task.run.group == kBytesBlock) return bytes_rows<kCodes, kZero, 1>(task);
  bytes_rows<kCodes, kZero, kSeveralBlocks>(task);
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
  kernels.arrange[kForDigits][2] = &arrange_bytes<Dtype::bf16, BlockOfX>;
  kernels.arrange[kForDigits][3] = &arrange_bytes<Dtype::f16, BlockOfX>;
  for_all_codes([&]<Codes kCodes>() {
    if constexpr (has_digits(kCodes)) kernels.set(kCodes, &bytes_dot<kCodes>, kForDigits);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// The same products of integers of 2 to 8 bits, a byte each or densely packed: they become words as
// they are read, and multiply x in words.
//
//   w = scale code,  sum x w = scale 2^e sum X code,  |X| < 2^15
//
// The sum is exact in 32 bits, and rounded to fp32. Half a block is 32 columns, of which a lane of
// the sum has four neighbors; sixteen of them, a string of dense codes that begins with a byte, are
// half a register. x is arranged half by half: even columns, odd ones, then each lane's 2^e.
#pragma once
#include "kernel/cpu/linear_words-inl.h"

namespace stowage {
namespace {

struct HalfOfX {
  std::int16_t even[16], odd[16];
  float powers[kWidth];
};
constexpr int kFractionOfWords = 14;  // bits of X behind its first one; x has 11 bits at most
constexpr std::int64_t kHalfBlock = kBytesBlock / 2;
static_assert(sizeof(HalfOfX) == kHalfBlock * kBytesOfX[kForIntegers]);

template <Dtype kIn>
bool arrange_halves(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  for (std::int64_t k = 0; k < n; k += kHalfBlock, out += sizeof(HalfOfX)) {
    HalfOfX half;
    for (int at = 0; at < kHalfBlock; at += kNeighbors) {
      const void* eight = from + (k + at) * bytes_of(kIn);
      Numbers numbers;
      float power = 1;
      if (!fix_eight<kFractionOfWords>(load_eight<kIn>(eight), numbers, power)) return false;
      std::int32_t each[kNeighbors];
      store_as(each, numbers);
      for (int i = 0; i < kNeighbors; ++i)
        (i % 2 == 0 ? half.even : half.odd)[(at + i) / 2] = static_cast<std::int16_t>(each[i]);
      half.powers[at / 4] = half.powers[at / 4 + 1] = power;
    }
    store_as(out, half);
  }
  return true;
}

/// Half a block of codes as words: even columns, odd ones.
struct Integers {
  __m256i even, odd;
  [[gnu::always_inline]] F times(const HalfOfX& x) const {
    const __m256i sums = _mm256_madd_epi16(even, load_as<__m256i>(x.even));
    return _mm256_cvtepi32_ps(add_twos(sums, odd, load_as<__m256i>(x.odd)));
  }
  [[gnu::always_inline]] void less(__m256i zeros) {
    even = _mm256_sub_epi16(even, zeros);
    odd = _mm256_sub_epi16(odd, zeros);
  }
};

template <Codes kCodes>
struct IntegerReader {
  static_assert(kCodes == Codes::int8);
  static constexpr int kBits = 8;
  template <int kHalf>
  [[gnu::always_inline]] static Integers read(const std::uint8_t* block) {
    const __m256i pairs = load_as<__m256i>(block + kHalf * kHalfBlock);
    return {_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 8), _mm256_srai_epi16(pairs, 8)};
  }
};

/// Of a string of sixteen codes each word takes the two bytes that hold a pair, or, where pairs
/// reach over three, one code: what is in front is moved off at its end, then the rest to its
/// place. Bits that follow in a string read as zero, or are moved off.
template <Codes kCodes>
requires(is_dense(kCodes)) struct IntegerReader<kCodes> {
  static constexpr int kBits = bits_of(kCodes);

  template <int kHalf>
  [[gnu::always_inline]] static Integers read(const std::uint8_t* block) {
    const __m256i strings =
        _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(block + begin_of(2 * kHalf + 1)),
                            reinterpret_cast<const __m128i*>(block + begin_of(2 * kHalf)));
    if constexpr (kPairs) {
      constexpr int kOfFirst = 1 << (15 - kBits);  // the top bit of a pair's first code
      const __m256i pairs =
          _mm256_xor_si256(words<kHalf, 2 * kBits, 0>(strings),
                           _mm256_set1_epi16(static_cast<std::int16_t>(0x8000 | kOfFirst)));
      return {_mm256_srai_epi16(_mm256_slli_epi16(pairs, kBits), 16 - kBits),
              _mm256_srai_epi16(pairs, 16 - kBits)};
    } else {
      const __m256i half = _mm256_set1_epi16(-0x8000);
      const __m256i even = _mm256_xor_si256(words<kHalf, kBits, 0>(strings), half);
      const __m256i odd = _mm256_xor_si256(words<kHalf, kBits, kBits>(strings), half);
      return {_mm256_srai_epi16(even, 16 - kBits), _mm256_srai_epi16(odd, 16 - kBits)};
    }
  }

 private:
  static constexpr int kString = 2 * kBits;    // bytes
  static constexpr bool kPairs = kBits <= 6;   // which begin at even bits
  static constexpr int begin_of(int string) {  // where 16 bytes are read
    constexpr int kLast = 4 * kString - 16;
    return string * kString < kLast ? string * kString : kLast;
  }
  struct Places {
    alignas(32) std::int8_t bytes[32];
    alignas(32) std::int16_t up[16];
  };
  /// kTaken bits of each pair from kSkipped on, as the upper bits of words; what is below is not 0.
  template <int kHalf, int kTaken, int kSkipped>
  [[gnu::always_inline]] static __m256i words(__m256i strings) {
    static constexpr Places kPlaces = [] {
      Places made{};
      for (int i = 0; i < 16; ++i) {
        const int string = 2 * kHalf + i / 8, bit = i % 8 * 2 * kBits + kSkipped;
        const int byte = string * kString - begin_of(string) + bit / 8;
        made.bytes[2 * i] = static_cast<std::int8_t>(byte);
        made.bytes[2 * i + 1] = static_cast<std::int8_t>(byte < 15 ? byte + 1 : -1);
        made.up[i] = static_cast<std::int16_t>(1 << (16 - kTaken - bit % 8));
      }
      return made;
    }();
    const __m256i held = _mm256_shuffle_epi8(strings, load_as<__m256i>(kPlaces.bytes));
    return _mm256_mullo_epi16(held, load_as<__m256i>(kPlaces.up));
  }
};

/// What all codes of half a block share with their group, or its two groups with their own.
template <Zero kZero, int kGroups>
struct GroupsOfHalf {
  F scale;
  __m256i zeros;  // in the words of their columns
  GroupsOfHalf(const Run& run, std::int64_t g) : scale(spread<kGroups>(run.scales + g)) {
    if constexpr (kZero != Zero::code) return;
    if constexpr (kGroups == 2)
      zeros = _mm256_set_m128i(_mm_set1_epi16(run.zeros[g + 1]), _mm_set1_epi16(run.zeros[g]));
    else
      zeros = _mm256_set1_epi16(run.zeros[g]);
  }
};

template <Codes kCodes, Zero kZero, int kOfHalf>
struct IntegersWay {
  using Reader = IntegerReader<kCodes>;
  using Groups = GroupsOfHalf<kZero, kOfHalf>;
  using Block = HalfOfX[2];
  static constexpr std::int64_t kColumns = kBytesBlock;
  static constexpr int kGroups = 2 * kOfHalf;
  static constexpr float kUnit = 1;

  static constexpr int bits() { return Reader::kBits; }
  template <bool kWhole, int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    add_half<0>(at, sums);
    add_half<1>(at, sums);
  }

 private:
  template <int kHalf, int kRows, int kM>
  [[gnu::always_inline]] static void add_half(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) {
    Integers integers[kRows];
    F products[kRows], scales[kRows];
    for (int r = 0; r < kRows; ++r) {
      const Groups all(at.task.run, at.groups[r] + kHalf * kOfHalf);
      integers[r] = Reader::template read<kHalf>(at.codes[r]);
      if constexpr (kZero == Zero::code) integers[r].less(all.zeros);
      scales[r] = all.scale;
    }
    for (int j = 0; j < kM; ++j) {
      const auto& x = at.template block_of_x<Block>(j)[kHalf];
      for (int r = 0; r < kRows; ++r) products[r] = integers[r].times(x);
      for (int r = 0; r < kRows; ++r) products[r] *= Lanes::load_f32(x.powers);
      for (int r = 0; r < kRows; ++r)
        sums[r][j] = Lanes::multiply_add(products[r], scales[r], sums[r][j]);
    }
  }
};

/// Rarer ones have less code.
template <Codes kCodes, Zero kZero, int kOfHalf>
void integers_rows(const BytesDotTask& task) {
  using Way = IntegersWay<kCodes, kZero, kOfHalf>;
  if constexpr (kZero == Zero::code) return add_rows<Way, 2, 1>(task);
  add_rows<Way, 3>(task);
}

template <Codes kCodes, Zero kZero>
void integers_groups(const BytesDotTask& task) {
  if (task.run.group == kBytesBlock / 4) return integers_rows<kCodes, kZero, 2>(task);
  if (task.run.group == kBytesBlock / 2) return integers_rows<kCodes, kZero, 1>(task);
  integers_rows<kCodes, kZero, kSeveralBlocks>(task);
}

template <Codes kCodes>
void integers_dot(const BytesDotTask& task) noexcept {
  if (task.run.zeros != nullptr) return integers_groups<kCodes, Zero::code>(task);
  integers_groups<kCodes, Zero::none>(task);
}

/// Adds these to a table of products in integers: of dense codes, and, if nothing else has them, of
/// those of a byte.
constexpr BytesKernels with_integers(BytesKernels kernels) {
  // Words take more rows than four products of bytes to a sum do.
  if (kernels.dot[static_cast<int>(Codes::int8)] == nullptr) kernels.most_whole = kMostBytesRows;
  kernels.arrange[kForIntegers][2] = &arrange_halves<Dtype::bf16>;
  kernels.arrange[kForIntegers][3] = &arrange_halves<Dtype::f16>;
  for_every_codes([&]<Codes kCodes>() {
    if constexpr (kCodes == Codes::int8 || is_dense(kCodes))
      if (kernels.dot[static_cast<int>(kCodes)] == nullptr)
        kernels.set(kCodes, &integers_dot<kCodes>, kForIntegers);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Steps of dequantizing to bf16 in short groups whose results are all numbers that are normal or 0:
// a processor's own rounding does for those.
#pragma once
#include "kernel/cpu/widen-inl.h"

namespace stowage {
namespace {

/// Whether products of codes and the scale are normal numbers, those that are not 0.
constexpr std::uint32_t kLeastCommon = word_of(0x1p-100f), kMostCommon = word_of(0x1p100f);
inline bool is_common(float scale) {
  const std::uint32_t size = __builtin_bit_cast(std::uint32_t, scale) & ~kSign;
  return size - kLeastCommon <= kMostCommon - kLeastCommon;
}
/// The same of n scales, of which some may be 0. Differences of such products and such numbers are
/// multiples of 2^-123.
inline bool are_common(const float* scales, std::int64_t n) {
  I others{};
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const I size = magnitude(Lanes::load_f32(scales + i));
    others |= (size > static_cast<std::int32_t>(kMostCommon)) |
              ((size < static_cast<std::int32_t>(kLeastCommon)) & (size != 0));
  }
  bool common = Lanes::largest(others & 1) == 0;
  for (; i < n; ++i) common &= scales[i] == 0 || is_common(scales[i]);
  return common;
}

/// Codes of 4 bits to bf16 in groups of whole or half steps, whose results are numbers that are
/// normal or 0.
template <Codes kCodes, Zero kZero, class L = Lanes>
class WidenCommon {
 public:
  static constexpr std::int64_t kStep = L::kNibbleStep;
  /// Groups from number g on, of which half ones come in twos.
  [[gnu::always_inline]] WidenCommon(const CodeValues<kCodes>& values, const Run& run,
                                     std::int64_t g)
      : values_(values), scales_(run.scales + g) {
    if constexpr (kZero == Zero::code) zeros_ = run.zeros + g;
    if constexpr (kZero == Zero::offset) offsets_ = run.offsets + g;
  }
  [[gnu::always_inline]] bool fits(std::int64_t groups) const {
    return are_common(scales_, groups) && (kZero != Zero::offset || are_common(offsets_, groups));
  }
  [[gnu::always_inline]] void widen(const std::uint8_t* codes, std::int64_t groups,
                                    std::int64_t each, char* out) const {
    if (each < kStep) {
      for (std::int64_t i = 0; i < groups; i += 2, codes += kStep / 2, out += 2 * kStep)
        L::template store_looked_up<packing_of(kCodes)>(
            out, L::normal_two_tables(group(i).all, group(i + 1).all), codes);
      return;
    }
    for (std::int64_t i = 0; i < groups; ++i) {
      const auto table = L::normal_word_table(group(i).all);
      for (std::int64_t at = 0; at < each; at += kStep, codes += kStep / 2, out += 2 * kStep)
        L::template store_looked_up<packing_of(kCodes)>(out, table, codes);
    }
  }

 private:
  [[gnu::always_inline]] CodeValues<kCodes> group(std::int64_t i) const {
    CodeValues<kCodes> of = values_;
    if constexpr (kZero == Zero::code) of = of.less(zeros_[i]);
    of = of.times(scales_[i]);
    if constexpr (kZero == Zero::offset) of = of.less(offsets_[i]);
    return of;
  }

  CodeValues<kCodes> values_;
  const float *scales_, *offsets_ = nullptr;
  const std::int8_t* zeros_ = nullptr;
};

/// Codes of 8 bits to bf16 in short groups, for which no table pays: through fp32, if all results
/// are numbers, and no subnormal ones.
template <Codes kCodes, class L = Lanes>
struct WidenNumbers {
  static constexpr int kStep = 32, kMantissa = mantissa_of(kCodes);
  static constexpr std::int64_t kWorthwhile = is_integer(kCodes) ? 1024 : 128;  // that pay for one
  /// n codes, a multiple of kStep, under one scale; or false, and nothing is written.
  [[gnu::always_inline]] static bool widen(const std::uint8_t* codes, float scale, std::int64_t n,
                                           char* out) {
    if (!is_common(scale)) return false;
    for (std::int64_t i = 0; i < n; i += kStep)
      if (!L::template are_numbers<kMantissa>(codes + i)) return false;
    const F factor = splat(scale * L::template kUnit<kMantissa>);
    if (!L::kRoundsQuickly && is_exact(scale))
      for_each_pair(codes, n, out, [&](void* to, F a, F b, int) {
        L::store_high_halves(to, a * factor, b * factor);
      });
    else
      for_each_pair(codes, n, out, [&](void* to, F a, F b, int) {
        L::store_normal_pair(to, a * factor, b * factor);
      });
    return true;
  }
  /// Integers of whole groups, of half a step in twos, or of whole steps, under scales for which
  /// are_common() holds.
  [[gnu::always_inline]] static void widen_common(const std::uint8_t* codes, const float* scales,
                                                  std::int64_t groups, std::int64_t each,
                                                  char* out) {
    static_assert(is_integer(kCodes));
    const std::int64_t together = each < kStep ? 2 : 1, n = together * each;
    for (std::int64_t i = 0; i < groups; i += together, codes += n, out += 2 * n) {
      const F first = splat(scales[i]), last = splat(scales[i + together - 1]);
      for_each_pair(codes, n, out, [&](void* to, F a, F b, int v) {
        const bool second = kWidth == kStep / 2 || 2 * v >= kStep;
        L::store_normal_pair(to, a * (v == 0 ? first : last), b * (second ? last : first));
      });
    }
  }
  /// The same of kStep codes, each half of them under a scale of its own.
  [[gnu::always_inline]] static bool widen_halves(const std::uint8_t* codes, const float* scales,
                                                  char* out) {
    if (!is_common(scales[0]) || !is_common(scales[1])) return false;
    if (!L::template are_numbers<kMantissa>(codes)) return false;
    const F factors[2] = {splat(scales[0] * L::template kUnit<kMantissa>),
                          splat(scales[1] * L::template kUnit<kMantissa>)};
    for_each_pair(codes, kStep, out, [&](void* to, F a, F b, int v) {
      L::store_normal_pair(to, a * factors[2 * v / kStep], b * factors[2 * (v + kWidth) / kStep]);
    });
    return true;
  }

 private:
  /// Whether they are numbers of bf16, as under powers of two, by the fraction of the scale.
  static bool is_exact(float scale) {
    constexpr int kRoom = is_integer(kCodes) ? 0 : 6 - kMantissa;
    constexpr std::uint32_t kBelow = (1u << (23 - kRoom)) - 1;
    return (__builtin_bit_cast(std::uint32_t, scale) & kBelow) == 0;
  }
  template <class Store>
  [[gnu::always_inline]] static void for_each_pair(const std::uint8_t* codes, std::int64_t n,
                                                   char* out, Store store) {
    for (std::int64_t i = 0; i < n; i += kStep)
      for (int v = 0; v < kStep; v += 2 * kWidth) {
        F a, b;
        L::template load_numbers<kMantissa>(codes + i + v, a, b);
        store(out + 2 * (i + v), a, b, v);
      }
  }
};

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Codes of 8 bits to 16 through a table of all results: scaled and rounded once for a group; and of
// fp8 under powers of two one table for all groups.
#pragma once
#include <array>
#include <bit>

#include "kernel/cpu/widen_common-inl.h"

namespace stowage {
namespace {

/// What codes 0 to 127 of fp8 stand for.
template <Codes kCodes>
struct Magnitudes {
  static constexpr auto kEach = format_of(kCodes).values;
  alignas(64) static constexpr std::array<float, 128> kValues = [] {
    std::array<float, 128> values{};
    for (std::size_t code = 0; code < 128; ++code) values[code] = kEach[code];
    return values;
  }();
  alignas(64) static constexpr std::array<std::uint16_t, 128> kInBf16 = [] {
    std::array<std::uint16_t, 128> values{};
    for (std::size_t code = 0; code < 128; ++code)
      values[code] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(kEach[code]) >> 16);
    return values;
  }();
};

/// Codes under a finite scale: multiply and round all magnitudes, then look up.
template <Codes kCodes, Dtype kOut, class L = Lanes>
struct WidenByTable {
  static constexpr int kStep = 64;
  static constexpr bool kQuick = L::kRoundsQuickly && is_float8(kCodes) && kOut == Dtype::bf16;
  static constexpr std::int64_t kWorthwhile = kQuick ? 128 : 1024;  // elements that pay for it
  WidenByTable(const CodeValues<kCodes>& values, float scale) : plain_(values, scale) {
    std::uint16_t rounded[kEntries];
    if constexpr (kQuick)
      if (is_common(scale)) {
        for (int i = 0; i < kEntries; i += 2 * kWidth) {
          const float* from = Magnitudes<kCodes>::kValues.data() + i;
          L::store_normal_pair(rounded + i, Lanes::load_f32(from) * splat(scale),
                               Lanes::load_f32(from + kWidth) * splat(scale));
        }
        table_ = L::template load_byte_table<mantissa_of(kCodes)>(rounded);
        return;
      }
    std::uint8_t codes[kEntries];
    for (int i = 0; i < kEntries; ++i) codes[i] = static_cast<std::uint8_t>(i);
    for (int i = 0; i < kEntries; i += plain_.kStep) plain_(codes + i, rounded + i);
    table_ = L::template load_byte_table<mantissa_of(kCodes)>(rounded);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    if (L::template store_looked_up<mantissa_of(kCodes)>(out, table_, codes)) return;
    for (int i = 0; i < kStep; i += plain_.kStep)
      plain_(codes + i, static_cast<std::uint16_t*>(out) + i);
  }

 private:
  static constexpr int kEntries = 128 + (is_integer(kCodes) ? 2 * kWidth : 0);  // -128 has its own

  Widen<kCodes, kOut> plain_;
  typename L::ByteTable table_;
};

/// fp8 to bf16 under powers of two, which are added to the exponents of values.
template <Codes kCodes, class L = Lanes>
class WidenByPowers {
 public:
  static constexpr int kStep = 64;
  WidenByPowers()
      : table_(
            L::template load_byte_table<mantissa_of(kCodes)>(Magnitudes<kCodes>::kInBf16.data())) {}
  /// Each half of the step has a scale of its own. False, and nothing is written, where one is no
  /// power, or products may not be numbers that are normal or 0.
  [[gnu::always_inline]] bool operator()(const std::uint8_t* codes, float first, float second,
                                         char* out) const {
    if (!is_power(first) || !is_power(second)) return false;
    return L::template store_moved<mantissa_of(kCodes)>(out, table_, codes,
                                                        {moved(first), moved(second)});
  }
  static bool is_power(float scale) {
    return is_common(scale) && (__builtin_bit_cast(std::uint32_t, scale) & ~kInfinity) == 0;
  }

 private:
  static std::int16_t moved(float scale) {
    constexpr std::uint32_t kOne = word_of(1.0f);
    return static_cast<std::int16_t>((__builtin_bit_cast(std::uint32_t, scale) - kOne) >> 16);
  }

  typename L::ByteTable table_;
};

}  // namespace
}  // namespace stowage

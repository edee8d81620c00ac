// SPDX-License-Identifier: Apache-2.0
// What kernels ask of formats, answered from the table while they are compiled: how wide codes are
// and how they lie, and by which arithmetic values are made of codes and codes of values. Sixteen
// values that no arithmetic gives are looked up.
#pragma once
#include <cstddef>
#include <cstdint>

#include "format/table.h"

namespace stowage {
namespace {

consteval const FormatTrait& format_of(Codes c) {
  return table::kFormats[static_cast<std::size_t>(c)];
}
consteval const FormRow& form_of(Codes c) { return table::kForms[static_cast<std::size_t>(c)]; }

consteval int bits_of(Codes c) { return format_of(c).bits; }
/// Formats of sixteen values: these, and what else the kernels need of them, come from the table.
consteval bool is_four_bit(Codes c) { return format_of(c).values.size() == 16; }
consteval Packing packing_of(Codes c) { return form_of(c).packing; }
consteval bool is_dense(Codes c) { return packing_of(c) == Packing::dense; }
/// Codes of bitsandbytes, which blocks of its own rule make.
consteval bool is_blockwise(Codes c) { return form_of(c).codec == Codec::bitsandbytes; }
/// Whether values are scaled to a largest one.
consteval bool is_scaled(Codes c) {
  return form_of(c).codec == Codec::amax || form_of(c).codec == Codec::ggml;
}
consteval bool has_casts(Codes c) {
  return (form_of(c).legal.kinds >> static_cast<int>(Scaling::Kind::none) & 1) != 0;
}
/// Whether weights of these codes may have zeros, or scales that are products.
consteval bool may_have_zeros(Codes c) { return form_of(c).legal.zero; }
consteval bool may_be_named(Codes c) { return form_of(c).legal.named; }
/// Whether they may have numbers beside their scales, which are taken off products, or off codes.
consteval bool may_have_offsets(Codes c) { return form_of(c).legal.super || form_of(c).legal.sum; }
consteval bool may_be_rounded(Codes c) { return form_of(c).legal.rounded; }
/// Whether products with their scales may have a factor.
consteval bool may_have_factor(Codes c) { return form_of(c).legal.absmax; }
consteval bool may_have_products(Codes c) { return form_of(c).legal.product; }
consteval float largest_value(Codes c) { return format_of(c).largest; }

/// Calls body.operator()<codes>() for each format.
template <int kNext = 0, class Body>
constexpr void for_every_codes(Body body) {
  body.template operator()<Codes{kNext}>();
  if constexpr (kNext + 1 < kCodesCount) for_every_codes<kNext + 1>(body);
}
/// The same for those whose codes all kernels read as they lie: one without kernels does not
/// compile.
template <class Body>
constexpr void for_all_codes(Body body) {
  for_every_codes([&]<Codes kCodes>() {
    if constexpr (!is_dense(kCodes)) body.template operator()<kCodes>();
  });
}
consteval bool is_own_type(Codes c, Dtype d) {
  return format_of(c).values.empty() && format_of(c).disk == d;
}
constexpr int bytes_of(Dtype d) { return d == Dtype::f64 ? 8 : d == Dtype::f32 ? 4 : 2; }

consteval std::uint32_t word_of(float x) { return std::bit_cast<std::uint32_t>(x); }
consteval bool is_finite(float x) { return (word_of(x) & kInfinity) != kInfinity; }
/// Whether the upper half of the codes stands for the negatives of the lower one.
consteval bool has_sign(Codes c) {
  const auto values = format_of(c).values;
  const std::size_t half = values.size() / 2;
  for (std::size_t code = 0; code < half; ++code)
    if (is_finite(values[code]) && (word_of(values[code]) ^ kSign) != word_of(values[code + half]))
      return false;
  return half != 0;
}

/// Whether code 0 stands for an integer and each code for one more than the code before it, the
/// one beyond the largest value for the least.
consteval bool is_integer(Codes c) {
  const FormatTrait& format = format_of(c);
  const auto count = static_cast<float>(format.values.size());
  float expected = format.values.empty() ? 0 : format.values[0];
  for (const float value : format.values) {
    if (value != expected || value != static_cast<float>(static_cast<int>(value))) return false;
    expected = value == format.largest ? value + 1 - count : value + 1;
  }
  return count != 0;
}
/// The least number that integers stand for.
consteval int least_integer(Codes c) {
  float least = 0;
  for (const float value : format_of(c).values) least = value < least ? value : least;
  return static_cast<int>(least);
}
/// What code 0 of integers stands for.
consteval int first_integer(Codes c) { return static_cast<int>(format_of(c).values[0]); }

/// Whether codes of 8 bits at most are a sign, an exponent and so many bits of mantissa, subnormal
/// numbers among them; whatever the largest exponent stands for that is no finite number.
consteval bool has_mantissa(Codes c, int mantissa) {
  const auto values = format_of(c).values;
  const std::size_t half = values.size() / 2, one = std::size_t{1} << mantissa;
  if (half <= one || values[0] != 0 || !has_sign(c)) return false;
  float unit = values[1];  // of the subnormal and the least normal numbers
  for (std::size_t code = 0; code < half; ++code) {
    if (code >= 2 * one && code % one == 0) unit *= 2;
    const float value = values[code];
    const std::size_t units = code < one ? code : one + code % one;
    if (is_finite(value) && value != static_cast<float>(units) * unit) return false;
  }
  return true;
}
/// Bits of mantissa; -1 for what is no such number. Without any, ties cannot go to the even one.
consteval int mantissa_of(Codes c) {
  for (int mantissa = 1; mantissa < 7; ++mantissa)
    if (has_mantissa(c, mantissa)) return mantissa;
  return -1;
}
/// The exponent field that the least normal number has in fp32.
consteval int least_exponent(Codes c) {
  return static_cast<int>(word_of(format_of(c).values[1]) >> 23) + mantissa_of(c);
}
consteval bool is_float8(Codes c) { return bits_of(c) == 8 && mantissa_of(c) >= 0; }

/// Whether code and rank are the same, and no two thresholds of values are closer than 1/15.
consteval bool is_spread(Codes c) {
  const auto values = format_of(c).values;
  for (std::size_t code = 2; code < values.size(); ++code)
    if (!(values[code - 2] < values[code - 1] && values[code] - values[code - 2] >= 2.0f / 15))
      return false;
  return is_four_bit(c);
}
/// Whether codes of values are found by comparing with thresholds.
consteval bool is_ranked(Codes c) {
  return is_four_bit(c) && is_scaled(c) && !is_integer(c) && mantissa_of(c) < 0;
}

/// The code of an infinity and of a NaN, without their sign; of infinity that of NaN where there is
/// none.
consteval std::int32_t nan_code(Codes c) {
  const auto values = format_of(c).values;
  for (std::size_t code = values.size() / 2; code-- > 0;)
    if (values[code] != values[code]) return static_cast<std::int32_t>(code);
  return c == Codes::bf16  ? 0x7FC0
         : c == Codes::f16 ? 0x7E00
                           : static_cast<std::int32_t>(kQuietNan);
}
consteval std::int32_t infinity_code(Codes c) {
  const auto values = format_of(c).values;
  for (std::size_t code = 0; code < values.size() / 2; ++code)
    if (word_of(values[code]) == kInfinity) return static_cast<std::int32_t>(code);
  if (!values.empty()) return nan_code(c);
  return c == Codes::bf16  ? 0x7F80
         : c == Codes::f16 ? 0x7C00
                           : static_cast<std::int32_t>(kInfinity);
}

}  // namespace
}  // namespace stowage

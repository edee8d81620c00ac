// SPDX-License-Identifier: Apache-2.0
// The values of nf4 and fp4 as words, multiples of one number: 13 bits and a sign.
//
//   value = word / kUnits,  |word| <= kUnits < 2^13
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

/// The bytes of words from a bit on.
consteval SixteenBytes bytes_of_words(Codes c, int shift) {
  SixteenBytes bytes{};
  for (int code = 0; code < 16; ++code)
    bytes.of[code] = static_cast<std::int8_t>(word_of_code(c, code) >> shift & 0xFF);
  return bytes;
}

}  // namespace
}  // namespace stowage

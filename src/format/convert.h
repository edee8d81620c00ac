// SPDX-License-Identifier: Apache-2.0
// bf16 and f16 against f32, one value at a time, round to nearest even, by integer arithmetic. NaN
// stays NaN: sign and upper payload bits are kept and the quiet bit is set, as F16C does it.
// `static` on purpose: each instruction set compiles its own copy.
#pragma once
#include <cstdint>

namespace stowage {

[[maybe_unused]] static inline std::uint32_t bits_of(float x) noexcept {
  return __builtin_bit_cast(std::uint32_t, x);
}
[[maybe_unused]] static inline float float_of(std::uint32_t bits) noexcept {
  return __builtin_bit_cast(float, bits);
}

[[maybe_unused]] static inline float bf16_to_f32(std::uint16_t h) noexcept {
  return float_of(static_cast<std::uint32_t>(h) << 16);
}

[[maybe_unused]] static inline std::uint16_t f32_to_bf16(float x) noexcept {
  const std::uint32_t b = bits_of(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(b >> 16 | 0x40u);
  return static_cast<std::uint16_t>((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
}

// f16: sign | 5 exponent bits, bias 15 | 10 mantissa bits. f32's bias is 112 more.
[[maybe_unused]] static inline float f16_to_f32(std::uint16_t h) noexcept {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31u)
    return float_of(sign | 0x7f800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u));
  if (exponent == 0u)  // subnormal: mantissa * 2^-24, exact
    return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | (exponent + 112u) << 23 | mantissa << 13);
}

[[maybe_unused]] static inline std::uint16_t f32_to_f16(float x) noexcept {
  const std::uint32_t b = bits_of(x), sign = b >> 16 & 0x8000u, a = b & 0x7fffffffu;
  std::uint32_t h = 0;
  if (a > 0x7f800000u)
    h = 0x7e00u | (a >> 13 & 0x3ffu);
  else if (a >= 0x477ff000u)  // 65520 is half way from the largest to the next: it rounds to inf
    h = 0x7c00u;
  else if (a < 0x38800000u)  // below 2^-14: units of 2^-24, which are the units of floats near 0.5
    h = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  else
    h = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
  return static_cast<std::uint16_t>(sign | h);
}

/// The e4m3 code of a number from 2^-9 to 448.
[[maybe_unused]] static inline std::uint8_t f32_to_e4m3(float x) noexcept {
  const std::uint32_t b = bits_of(x);
  if (x < 0x1p-6f)  // subnormal: units of 2^-9, which are those of floats near 2^14
    return static_cast<std::uint8_t>(bits_of(x + 0x1p14f) - bits_of(0x1p14f));
  return static_cast<std::uint8_t>((b - 0x3c000000u + 0x7ffffu + (b >> 20 & 1u)) >> 20);
}

/// Rounded to odd: the last bit also stands for everything below it, so that rounding the result
/// to bf16, f16 or 8 bits rounds the f64 value once.
[[maybe_unused]] static inline float f64_to_f32_odd(double x) noexcept {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || x != x) return nearest;
  const std::uint32_t b = bits_of(nearest);
  const bool beyond = x < 0 ? static_cast<double>(nearest) < x : static_cast<double>(nearest) > x;
  return float_of((beyond ? b - 1u : b) | 1u);
}

}  // namespace stowage

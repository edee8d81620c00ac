// SPDX-License-Identifier: Apache-2.0
// From values to codes: the arithmetic of docs/numbers.md, one operation of fp32 at a time.
#pragma once
#include "kernel/cuda/values.cuh"

namespace stowage::cuda {

inline float clamped(float x, float least, float most) {
  return x < least ? least : most < x ? most : x;
}
/// The nearest integer, of two the even one, of a number up to 2^22.
inline float nearest_integer(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/// The code of a finite number that the format holds, or that rounds to its largest: so many bits
/// of mantissa, and so much less than an exponent counts.
inline std::uint32_t minifloat(float x, int mantissa, int bias) {
  const std::uint32_t b = bits_of(x), size = b & 0x7FFFFFFFu, sign = b >> 31 << (form.bits - 1);
  const float least = float_of(static_cast<std::uint32_t>(128 - bias) << 23);
  if (float_of(size) < least) {  // subnormal: in units of fp32 numbers near this one
    const float near = float_of(static_cast<std::uint32_t>(151 - bias - mantissa) << 23);
    return sign | (bits_of(float_of(size) + near) - bits_of(near));
  }
  const int shift = 23 - mantissa;
  const std::uint32_t down = (1u << (shift - 1)) - 1u + (size >> shift & 1u);
  return sign | (size - (static_cast<std::uint32_t>(127 - bias) << 23) + down) >> shift;
}

/// The code of a number over its scale.
inline std::uint32_t code_of_scaled(float x) {
  const float in = clamped(x, form.least, form.most);
  switch (form.element) {
    case Element::e4m3:
      return minifloat(in, 3, 7);
    case Element::e5m2:
      return minifloat(in, 2, 15);
    case Element::e2m1:
      return minifloat(in, 1, 1);
    case Element::int8:
      return static_cast<std::uint32_t>(static_cast<int>(nearest_integer(in))) & 0xFFu;
    default:
      return static_cast<std::uint32_t>(static_cast<int>(nearest_integer(in)) + form.bias);
  }
}

/// How many thresholds are below x, of those in order; NaN is above all.
inline int thresholds_below(float x) {
  const float(&t)[15] = form.thresholds;
  const auto below = [x](float threshold) { return !(threshold >= x); };
  const bool a = below(t[7]);
  const bool b = below(a ? t[11] : t[3]);
  const bool c = below(a ? (b ? t[13] : t[9]) : (b ? t[5] : t[1]));
  const bool d = below(a ? (b ? (c ? t[14] : t[12]) : (c ? t[10] : t[8]))
                         : (b ? (c ? t[6] : t[4]) : (c ? t[2] : t[0])));
  return (a ? 8 : 0) + (b ? 4 : 0) + (c ? 2 : 0) + (d ? 1 : 0);
}
/// bitsandbytes' code of a number from -1 to 1.
inline std::uint32_t code_of_fraction(float x) {
  return static_cast<std::uint32_t>(order[thresholds_below(x)]);
}
/// torchao's: the first value that is nearest, distances rounded to the type of the parts.
inline std::uint32_t code_of_nearest(float x) {
  std::uint32_t best = 0;
  float least = rounded(x < form.values16[0] ? form.values16[0] - x : x - form.values16[0]);
  for (std::uint32_t k = 1; k < 16; ++k) {
    const float value = form.values16[k];
    const float distance = rounded(x < value ? value - x : x - value);
    if (distance < least) best = k, least = distance;
  }
  return best;
}

/// The code of a plain cast: what is beyond the largest number is that; infinity is NaN where there
/// is none.
inline std::uint32_t code_of_value(float x) {
  const std::uint32_t sign = bits_of(x) >> 31;
  const std::uint32_t size = bits_of(x) & 0x7FFFFFFFu;
  if (size >= 0x7F800000u) {
    const bool nan = size > 0x7F800000u;
    switch (form.element) {
      case Element::f32:
        return sign << 31 | (nan ? 0x7FC00000u : 0x7F800000u);
      case Element::bf16:
        return sign << 15 | (nan ? 0x7FC0u : 0x7F80u);
      case Element::f16:
        return sign << 15 | (nan ? 0x7E00u : 0x7C00u);
      case Element::e5m2:
        return sign << 7 | (nan ? 0x7Fu : 0x7Cu);
      default:
        return sign << 7 | 0x7Fu;
    }
  }
  const float in = clamped(x, -form.largest, form.largest);
  switch (form.element) {
    case Element::f32:
      return bits_of(in);
    case Element::bf16:
      return f32_to_bf16(in);
    case Element::f16:
      return f32_to_f16(in);
    case Element::e5m2:
      return minifloat(in, 2, 15);
    default:
      return minifloat(in, 3, 7);
  }
}

/// Puts the codes of n elements from a place on that is a multiple of together(); of all of them by
/// 16 bytes at once, where that is how they lie.
inline void put_codes(std::uint8_t* codes, Index first, int n,
                      const std::uint32_t (&in)[kMostTogether]) {
  std::uint32_t words[2 * 4] = {};
  STOWAGE_UNROLL
  for (int k = 0; k < together(); ++k) {
    const int bit = k * form.bits, at = form.packing == Packing::high_first ? bit ^ 4 : bit;
    words[at / 32] |= in[k] << (at % 32);
    if (at % 32 + form.bits > 32) words[at / 32 + 1] |= in[k] >> (32 - at % 32);
  }
  std::uint8_t* const to = codes + static_cast<long long>(first) * form.bits / 8;
  if (form.packing != Packing::dense && (form.whole || (n == together() && is_aligned(to)))) {
    STOWAGE_UNROLL
    for (int at = 0; at < together() * form.bits / 128; ++at)
      reinterpret_cast<Words*>(to)[at] = {
          {words[4 * at], words[4 * at + 1], words[4 * at + 2], words[4 * at + 3]}};
    return;
  }
  STOWAGE_UNROLL
  for (int byte = 0; byte < 32; ++byte)
    if (byte * 8 < n * form.bits)
      to[byte] = static_cast<std::uint8_t>(words[byte / 4] >> (byte % 4 * 8));
}

}  // namespace stowage::cuda

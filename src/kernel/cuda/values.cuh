// SPDX-License-Identifier: Apache-2.0
// Values of the dtype that a program is made for: read into fp32, and written from it.
#pragma once
#include "kernel/cuda/decode.cuh"

namespace stowage::cuda {

inline int width() { return form.values == Number::f64 ? 8 : form.values == Number::f32 ? 4 : 2; }
inline bool is_nan(float x) { return x != x; }

// --- written: rounded once, to nearest even; each NaN is the positive quiet one ------------------

inline std::uint16_t narrowed(float x) {
  if (form.values == Number::bf16) return is_nan(x) ? std::uint16_t{0x7FC0} : f32_to_bf16(x);
  return is_nan(x) ? std::uint16_t{0x7E00} : f32_to_f16(x);
}
/// Two of them in a word, the first in its lower half; what is no number in any form of none.
inline std::uint32_t rounded_pair(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t made = 0;  // the device rounds alike
  if (form.values == Number::bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(b), "f"(a));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(b), "f"(a));
  return made;
#else
  return narrowed(a) | static_cast<std::uint32_t>(narrowed(b)) << 16;
#endif
}
/// Likewise, with our NaN.
inline std::uint32_t narrowed_pair(float a, float b) {
  const std::uint32_t made = rounded_pair(a, b);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // The device's is 7FFF, from which 1 more is the next sign.
  const std::uint32_t nan = (made + 0x00010001u) & ~made & 0x80008000u;
  return made - (nan >> 15) * (form.values == Number::bf16 ? 0x3Fu : 0x1FFu);
#else
  return made;
#endif
}
inline void put(void* out, Index i, float value) {
  const float x = is_nan(value) ? nan_value() : value;
  switch (form.values) {
    case Number::f64:
      static_cast<double*>(out)[i] = static_cast<double>(x);
      break;
    case Number::f32:
      static_cast<float*>(out)[i] = x;
      break;
    default:
      static_cast<std::uint16_t*>(out)[i] = narrowed(value);
  }
}
/// n values from place `first` on; of together() ones 16 bytes at a time.
inline void put_some(void* out, Index first, int n, const float (&values)[kMostTogether]) {
  char* const to = static_cast<char*>(out) + static_cast<long long>(first) * width();
  if (width() == 8 || !(form.whole || (n == together() && is_aligned(to)))) {
    STOWAGE_UNROLL
    for (int k = 0; k < together(); ++k)
      if (k < n) put(out, first + k, values[k]);
    return;
  }
  constexpr int kWords = 4;
  const int each = 4 / width();  // values of a word
  STOWAGE_UNROLL
  for (int from = 0; from < together(); from += kWords * each) {
    Words some;
    STOWAGE_UNROLL
    for (int k = 0; k < kWords; ++k) {
      const int at = from + k * each;
      some.word[k] = each == 1 ? bits_of(is_nan(values[at]) ? nan_value() : values[at])
                               : narrowed_pair(values[at], values[at + 1]);
    }
    reinterpret_cast<Words*>(to)[from / (kWords * each)] = some;
  }
}

// --- read ----------------------------------------------------------------------------------------

/// A value in fp32; of f64 rounded to nearest.
inline float value_in(const void* values, Index i) {
  switch (form.values) {
    case Number::f64:
      return static_cast<float>(static_cast<const double*>(values)[i]);
    case Number::f32:
      return static_cast<const float*>(values)[i];
    case Number::bf16:
      return bf16_to_f32(half_at(values, i));
    default:
      return f16_to_f32(half_at(values, i));
  }
}
/// For casts, which round once: of f64 to nearest if fp32 is what they make, else to odd, since
/// they round again; what is beyond the largest number to that.
inline float exact_in(const void* values, Index i, bool makes_fp32) {
  if (form.values != Number::f64) return value_in(values, i);
  const double x = static_cast<const double*>(values)[i];
  const float odd = f64_to_f32_odd(x), nearest = static_cast<float>(x);
  const bool beyond = (bits_of(nearest) & 0x7FFFFFFFu) == 0x7F800000u;
  return makes_fp32 && !beyond ? nearest : odd;
}
/// `count` of them from `first` on, 16 bytes at a time; those from n on are 0.
inline void values_in(const void* values, Index first, int n, int count,
                      float (&out)[kMostTogether]) {
  const char* const from =
      static_cast<const char*>(values) + static_cast<long long>(first) * width();
  if (width() == 8 || !(form.whole || (n >= count && is_aligned(from)))) {
    STOWAGE_UNROLL
    for (int k = 0; k < count; ++k) out[k] = k < n ? value_in(values, first + k) : 0.0f;
    return;
  }
  const int each = 4 / width();
  STOWAGE_UNROLL
  for (int at = 0; at < count; at += 4 * each) {
    const Words some = reinterpret_cast<const Words*>(from)[at / (4 * each)];
    STOWAGE_UNROLL
    for (int k = 0; k < 4 * each; ++k) {
      const std::uint32_t word = some.word[k / each] >> (k % each * 16);
      const auto half = static_cast<std::uint16_t>(word);
      out[at + k] = each == 1                     ? float_of(word)
                    : form.values == Number::bf16 ? bf16_to_f32(half)
                                                  : f16_to_f32(half);
    }
  }
}

}  // namespace stowage::cuda

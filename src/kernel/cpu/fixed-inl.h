// SPDX-License-Identifier: Apache-2.0
// x in fixed point, each eight neighbors under a power of two of their own: x = X 2^e, X of 16
// bits.
#pragma once
#if defined(__aarch64__)
#include "kernel/cpu/fixed_neon-inl.h"
#else
#include "kernel/cpu/fixed_x86-inl.h"
#endif

namespace stowage {
namespace {

constexpr std::int64_t kNeighbors = 8;  // neighbors that share an exponent
constexpr int kFraction = 13;           // bits of the largest of them behind its first one

/// The exponents that x may have, so that powers and their products with sums are normal numbers.
constexpr std::uint32_t kLeastExponent = 27, kMostExponent = 227;

/// X of eight neighbors, and their 2^e; or false.
template <int kBits = kFraction>
inline bool fix_eight(Floats x, Numbers& numbers, float& power) {
  const std::uint32_t most = largest_magnitude(x), exponent = most >> 23;
  numbers = Numbers{}, power = 1;
  if (most == 0) return true;
  if (exponent < kLeastExponent || exponent > kMostExponent) return false;
  power = __builtin_bit_cast(float, (exponent - kBits) << 23);
  numbers = integers_of(x, __builtin_bit_cast(float, (254 - (exponent - kBits)) << 23));
  return true;
}

}  // namespace
}  // namespace stowage

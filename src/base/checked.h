// SPDX-License-Identifier: Apache-2.0
// Size arithmetic that says so when it overflows. Every size that comes from outside (a file, a
// shape, an argument) goes through here before it is used.
#pragma once
#include <concepts>
#include <optional>

namespace stowage {

template <std::integral T>
[[nodiscard]] constexpr std::optional<T> checked_add(T a, T b) noexcept {
  T sum{};
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

template <std::integral T>
[[nodiscard]] constexpr std::optional<T> checked_mul(T a, T b) noexcept {
  T product{};
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

/// The value in another integer type, if it fits there.
template <std::integral To, std::integral From>
[[nodiscard]] constexpr std::optional<To> checked_cast(From value) noexcept {
  To result{};
  if (__builtin_add_overflow(value, From{0}, &result)) return std::nullopt;
  return result;
}

/// ceil(n / d) for n >= 0 and d > 0, without the overflow of (n + d - 1) / d.
template <std::integral T>
[[nodiscard]] constexpr T ceil_div(T n, T d) noexcept {
  return static_cast<T>(n / d + (n % d != 0 ? 1 : 0));
}

}  // namespace stowage

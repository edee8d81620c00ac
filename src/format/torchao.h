// SPDX-License-Identifier: Apache-2.0
// The rules of nf4:torchao (NF4Tensor of torchao 0.18, nf4_tensor.py): everything is computed in
// the dtype D of the values, one operation at a time, each result rounded to D. 16-bit types
// compute in fp32 and round, as torch does.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "format/convert.h"
#include "stowage/storage.h"

namespace stowage::torchao {

/// The table of values, to be rounded to D: torchao's four decimals, not QLoRA's digits.
inline constexpr std::array<double, 16> kValues{
    -1.0,   -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609,  0.2461,  0.3379,  0.4407,  0.5626,  0.7230,  1.0};

/// Of two numbers by a mask: where one is a float sum, compilers make a branch of `?:`.
inline std::uint32_t either(bool first, std::uint32_t a, std::uint32_t b) noexcept {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// D: what its elements are kept as, what they compute in, and the rounding of a result: round(x) is
// widen(narrow(x)) without branches, so that compilers take several at a time.
struct F32 {
  using Bits = float;
  using Work = float;
  static float widen(float x) noexcept { return x; }
  static float narrow(float x) noexcept { return x; }
  static float round(float x) noexcept { return x; }
};
struct F64 {
  using Bits = double;
  using Work = double;
  static double widen(double x) noexcept { return x; }
  static double narrow(double x) noexcept { return x; }
  static double round(double x) noexcept { return x; }
};
struct Bf16 {
  using Bits = std::uint16_t;
  using Work = float;
  static float widen(std::uint16_t x) noexcept { return bf16_to_f32(x); }
  static std::uint16_t narrow(float x) noexcept { return f32_to_bf16(x); }
  static float round(float x) noexcept {
    const std::uint32_t b = bits_of(x), nearest = b + 0x7fffu + (b >> 16 & 1u);
    const bool nan = static_cast<std::int32_t>(b & 0x7fffffffu) > 0x7f800000;
    return float_of(either(nan, b | 0x400000u, nearest) & 0xffff0000u);
  }
};
struct F16 {
  using Bits = std::uint16_t;
  using Work = float;
  static float widen(std::uint16_t x) noexcept { return f16_to_f32(x); }
  static std::uint16_t narrow(float x) noexcept { return f32_to_f16(x); }
  static float round(float x) noexcept {
    const std::uint32_t b = bits_of(x), sign = b & 0x80000000u, a = b & 0x7fffffffu;
    const auto size = static_cast<std::int32_t>(a);  // signed compares are one instruction
    // Units of 2^-24 below 2^-14 are the units of floats near 0.5; 65520 rounds to infinity.
    const std::uint32_t tiny = bits_of((float_of(a) + 0.5f) - 0.5f);
    const std::uint32_t nearest = (a + 0xfffu + (a >> 13 & 1u)) & ~0x1fffu;
    std::uint32_t r = either(size < 0x38800000, tiny, nearest);
    r = either(size >= 0x477ff000, 0x7f800000u, r);
    r = either(size > 0x7f800000, (a | 0x400000u) & ~0x1fffu, r);
    return float_of(sign | r);
  }
};

/// body(D) for the D of a storage that has one.
template <class Body>
decltype(auto) with_type(ScaleType type, Body&& body) {
  switch (type) {
    case ScaleType::bf16:
      return body(Bf16{});
    case ScaleType::f16:
      return body(F16{});
    case ScaleType::f64:
      return body(F64{});
    default:
      return body(F32{});
  }
}

template <class D>
typename D::Work rounded(typename D::Work x) noexcept {
  return D::round(x);
}
/// Element i of an array of D, at any address.
template <class D>
typename D::Work load(const void* from, std::int64_t i) noexcept {
  typename D::Bits bits;
  std::memcpy(&bits, static_cast<const char*>(from) + i * std::int64_t{sizeof bits}, sizeof bits);
  return D::widen(bits);
}
template <class D>
void store(void* to, std::int64_t i, typename D::Work x) noexcept {
  const typename D::Bits bits = D::narrow(x);
  std::memcpy(static_cast<char*>(to) + i * std::int64_t{sizeof bits}, &bits, sizeof bits);
}

template <class D>
typename D::Work value(std::size_t code) noexcept {
  return rounded<D>(static_cast<typename D::Work>(kValues[code]));
}

/// The code of s = r(x / absmax): the first that makes r(|s - value|) least; 0 for NaN.
template <class D>
std::uint8_t encode(typename D::Work s) noexcept {
  std::size_t best = 0;
  auto least = rounded<D>(std::fabs(s - value<D>(0)));
  for (std::size_t k = 1; k < kValues.size(); ++k) {
    const auto distance = rounded<D>(std::fabs(s - value<D>(k)));
    if (distance < least) best = k, least = distance;
  }
  return static_cast<std::uint8_t>(best);
}

/// The scale of a block: r(r(q / factor) + mean).
template <class D>
typename D::Work scale(std::int8_t q, typename D::Work factor, typename D::Work mean) noexcept {
  return rounded<D>(rounded<D>(static_cast<typename D::Work>(q) / factor) + mean);
}

/// Parts 1 to 4 of a weight, from the absmax of each block (numbers of D). The mean is the fp64 sum
/// in index order, divided and rounded once; torch's own sum depends on threads and vector width.
template <class D>
void nest(std::span<const typename D::Work> absmax, std::int64_t scaler_block,
          std::span<void* const> parts) noexcept {
  using Work = typename D::Work;
  double sum = 0;
  for (const Work a : absmax) sum += static_cast<double>(a);
  const double mean64 = absmax.empty() ? 0 : sum / static_cast<double>(absmax.size());
  const Work narrow = sizeof(typename D::Bits) == 2 ? static_cast<Work>(f64_to_f32_odd(mean64))
                                                    : static_cast<Work>(mean64);
  store<D>(parts[3], 0, narrow);
  const Work mean = rounded<D>(narrow);
  for (std::size_t k = 0; k < kValues.size(); ++k)
    store<D>(parts[4], static_cast<std::int64_t>(k), value<D>(k));
  auto* codes = static_cast<std::int8_t*>(parts[1]);
  const auto count = static_cast<std::int64_t>(absmax.size());
  for (std::int64_t first = 0; first < count; first += scaler_block) {
    const auto some =
        absmax.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(scaler_block));
    Work most = 0;
    for (const Work a : some) most = std::fmax(most, std::fabs(rounded<D>(a - mean)));
    const Work factor = rounded<D>(256 / rounded<D>(2 * most));
    store<D>(parts[2], first / scaler_block, factor);
    for (const Work a : some) {
      const Work q = std::nearbyint(rounded<D>(rounded<D>(a - mean) * factor));
      // 0 times an infinite factor, where all scales are the mean: its cast to int8 gives 0.
      *codes++ = std::isnan(q) ? std::int8_t{0}
                               : static_cast<std::int8_t>(std::fmin(std::fmax(q, -128), 127));
    }
  }
}

}  // namespace stowage::torchao

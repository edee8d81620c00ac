// SPDX-License-Identifier: Apache-2.0
// All 65,536 halves both ways, and the rounding of every midpoint between two of them.
#include "format/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "format/reference.h"

namespace stowage {
namespace {

constexpr int kHalves = 1 << 16;

double bf16_value(int h) {  // by the definition
  const int exponent = h >> 7 & 255, mantissa = h & 127;
  const double v =
      exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 127 - 7);
  return h >> 15 != 0 ? -v : v;
}

double f16_value(int h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double v =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 15 - 10);
  return h >> 15 != 0 ? -v : v;
}

bool bf16_is_finite(int h) { return (h & 0x7f80) != 0x7f80; }
bool f16_is_finite(int h) { return (h & 0x7c00) != 0x7c00; }

TEST(Convert, WidensAllHalvesExactly) {
  for (int h = 0; h < kHalves; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    if (bf16_is_finite(h)) {
      EXPECT_EQ(bf16_to_f32(half), bf16_value(h)) << h;
      EXPECT_EQ(std::signbit(bf16_to_f32(half)), h >> 15 != 0);
    }
    if (f16_is_finite(h)) {
      EXPECT_EQ(f16_to_f32(half), f16_value(h)) << h;
      EXPECT_EQ(std::signbit(f16_to_f32(half)), h >> 15 != 0);
    }
  }
}

TEST(Convert, NarrowingGivesEveryHalfBack) {
  for (int h = 0; h < kHalves; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool bf16_nan = (h & 0x7fff) > 0x7f80, f16_nan = (h & 0x7fff) > 0x7c00;
    EXPECT_EQ(f32_to_bf16(bf16_to_f32(half)), h | (bf16_nan ? 0x40 : 0)) << h;
    EXPECT_EQ(f32_to_f16(f16_to_f32(half)), h | (f16_nan ? 0x200 : 0)) << h;
  }
}

// Between each two neighbours: the midpoint takes the even code, a step to either side the nearer.
template <class Value, class Narrow>
void expect_midpoints(int last, Value value, Narrow narrow) {
  for (int h = 0; h < last; ++h) {
    const auto middle = static_cast<float>((value(h) + value(h + 1)) / 2);
    const int even = h % 2 == 0 ? h : h + 1;
    EXPECT_EQ(narrow(middle), even) << h;
    EXPECT_EQ(narrow(std::nextafter(middle, 0.0f)), h) << h;
    EXPECT_EQ(narrow(std::nextafter(middle, INFINITY)), h + 1) << h;
    EXPECT_EQ(narrow(-middle), even | 0x8000) << h;
  }
}

TEST(Convert, RoundsMidpointsToEven) {
  expect_midpoints(0x7f7f, bf16_value, f32_to_bf16);
  expect_midpoints(0x7bff, f16_value, f32_to_f16);
}

TEST(Convert, OverflowIsInf) {
  EXPECT_EQ(f32_to_f16(65519.996f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-INFINITY), 0xff80);
}

TEST(Convert, NanKeepsItsSignAndIsQuiet) {
  EXPECT_EQ(f32_to_bf16(float_of(0x7f800001)), 0x7fc0);
  EXPECT_EQ(f32_to_bf16(float_of(0xffa00000)), 0xffe0);
  EXPECT_EQ(f32_to_f16(float_of(0x7f800001)), 0x7e00);
  EXPECT_EQ(f32_to_f16(float_of(0xffc00000)), 0xfe00);
  EXPECT_EQ(bits_of(f16_to_f32(0x7c01)), 0x7fc02000u);
}

TEST(Convert, OddRoundingMakesDoublesRoundOnce) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> mantissa(-2.0, 2.0);
  std::uniform_int_distribution<int> exponent(-160, 127);
  for (int i = 0; i < 200000; ++i) {
    double x = std::ldexp(mantissa(random), exponent(random));
    if (i % 2 == 0) {  // just beside a midpoint of two halves, where two roundings go wrong
      const double half = bf16_value(static_cast<int>(random() % 0x7f00));
      const double next = bf16_value(static_cast<int>(bits_of(static_cast<float>(half)) >> 16) + 1);
      x = std::nextafter((half + next) / 2, i % 4 == 0 ? 0.0 : INFINITY);
    }
    if (std::fabs(x) > trait(Codes::bf16).largest) continue;  // a cast saturates there
    EXPECT_EQ(f32_to_bf16(f64_to_f32_odd(x)), reference::encode(Codes::bf16, x)) << x;
    if (std::fabs(x) >= 65504) continue;
    EXPECT_EQ(f32_to_f16(f64_to_f32_odd(x)), reference::encode(Codes::f16, x)) << x;
  }
  EXPECT_EQ(f64_to_f32_odd(1e300), std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isnan(f64_to_f32_odd(NAN)));
}

}  // namespace
}  // namespace stowage

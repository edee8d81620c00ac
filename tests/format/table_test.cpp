// SPDX-License-Identifier: Apache-2.0
// Every value of every table, by a second road: bit fields with ldexp, and published hex values.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "stowage/storage.h"

namespace stowage {
namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

void expect_value(Codes codes, int code, float expected) {
  const float got = trait(codes).values[static_cast<std::size_t>(code)];
  if (std::isnan(expected))
    EXPECT_TRUE(std::isnan(got)) << code;
  else
    EXPECT_EQ(bits_of(got), bits_of(expected)) << code;
}

TEST(Table, E4m3HasAll256Values) {
  for (int code = 0; code < 256; ++code) {
    const int exp = code >> 3 & 15, man = code & 7;
    float v = exp == 0 ? std::ldexp(static_cast<float>(man), -9)
                       : std::ldexp(1.0f + static_cast<float>(man) / 8, exp - 7);
    if ((code & 0x7f) == 0x7f) v = NAN;
    expect_value(Codes::f8_e4m3, code, code < 128 ? v : -v);
  }
}

TEST(Table, E5m2HasAll256Values) {
  for (int code = 0; code < 256; ++code) {
    const int exp = code >> 2 & 31, man = code & 3;
    float v = exp == 0 ? std::ldexp(static_cast<float>(man), -16)
                       : std::ldexp(1.0f + static_cast<float>(man) / 4, exp - 15);
    if (exp == 31) v = man == 0 ? INFINITY : NAN;
    expect_value(Codes::f8_e5m2, code, code < 128 ? v : -v);
  }
}

TEST(Table, Int8IsTwosComplement) {
  for (int code = 0; code < 256; ++code)
    expect_value(Codes::int8, code, static_cast<std::int8_t>(code));
}

TEST(Table, Nf4HasThePublishedBits) {
  const std::vector<std::uint32_t> expected{0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0,
                                            0xbe91a24d, 0xbe3d353f, 0xbdba7871, 0x00000000,
                                            0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a,
                                            0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000};
  for (std::size_t code = 0; code < 16; ++code)
    EXPECT_EQ(bits_of(trait(Codes::nf4).values[code]), expected[code]) << code;
}

TEST(Table, Fp4IsBitsandbytesOwn) {
  const std::vector<double> magnitudes{0, 1.0 / 192, 2.0 / 3, 1, 1.0 / 3, 0.5, 1.0 / 6, 0.25};
  for (int code = 0; code < 8; ++code) {
    const auto v = static_cast<float>(magnitudes[static_cast<std::size_t>(code)]);
    expect_value(Codes::fp4, code, v);
    expect_value(Codes::fp4, code + 8, code == 0 ? 0.0f : -v);  // code 8 is +0
  }
}

TEST(Table, E2m1IsThatOfTheMicroscalingFormats) {
  const std::vector<float> magnitudes{0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    expect_value(Codes::f4_e2m1, code, magnitudes[static_cast<std::size_t>(code)]);
    expect_value(Codes::f4_e2m1, code + 8, -magnitudes[static_cast<std::size_t>(code)]);  // -0 too
  }
}

TEST(Table, Int4IsEightLessThanItsCode) {
  for (int code = 0; code < 16; ++code)
    expect_value(Codes::int4, code, static_cast<float>(code - 8));
}

TEST(Table, IntegersOfOtherWidthsAreTheirCodeLessHalfOfTheRange) {
  for (const auto& [codes, bits] : {std::pair{Codes::int2, 2},
                                    {Codes::int3, 3},
                                    {Codes::int5, 5},
                                    {Codes::int6, 6},
                                    {Codes::int7, 7}})
    for (int code = 0; code < 1 << bits; ++code)
      expect_value(codes, code, static_cast<float>(code - (1 << bits) / 2));
}

TEST(Table, Uint4IsItsCode) {
  for (int code = 0; code < 16; ++code) expect_value(Codes::uint4, code, static_cast<float>(code));
}

TEST(Table, LargestIsTheLargestFiniteValue) {
  for (const FormatTrait& format : formats()) {
    float largest = 0;
    for (const float v : format.values)
      if (std::isfinite(v)) largest = std::max(largest, v);
    if (format.values.empty()) continue;
    EXPECT_EQ(format.largest, largest) << format.name;
  }
  EXPECT_EQ(trait(Codes::f16).largest, 65504.0f);
  EXPECT_EQ(bits_of(trait(Codes::bf16).largest), 0x7f7f0000u);
  EXPECT_EQ(bits_of(trait(Codes::f32).largest), 0x7f7fffffu);
}

TEST(Table, DiskTypesHaveTheWidthOfTheCodes) {
  for (const FormatTrait& format : formats())
    EXPECT_EQ(bits(format.disk), format.bits < 8 ? 8 : format.bits) << format.name;
}

}  // namespace
}  // namespace stowage

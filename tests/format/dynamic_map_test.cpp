// SPDX-License-Identifier: Apache-2.0
#include "format/dynamic_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "crc32.h"

namespace stowage {
namespace {

TEST(DynamicMap, HasTheBitsOfTorch214) {
  EXPECT_EQ(test::crc32(dynamic_map().data(), sizeof dynamic_map()), 0x1b137aebu);
}

TEST(DynamicMap, IsAscendingWithAnOnlyZero) {
  const auto& map = dynamic_map();
  for (std::size_t i = 1; i < map.size(); ++i) EXPECT_LT(map[i - 1], map[i]);
  EXPECT_EQ(map[127], 0.0f);
  EXPECT_EQ(map[255], 1.0f);
  EXPECT_NEAR(map[0], -0.992969f, 1e-6);
}

TEST(DynamicMap, CodesComeFromSixtyFiveThousandSteps) {
  EXPECT_EQ(dynamic_code(1.0f), 255);
  EXPECT_EQ(dynamic_code(-1.0f), 0);
  int last = 0;
  for (int step = 0; step <= 65535; ++step) {  // monotone, and each value of the map is near itself
    const int code = dynamic_code(-1.0f + 2.0f * static_cast<float>(step) / 65535.0f);
    EXPECT_GE(code, last);
    last = code;
  }
  for (std::size_t i = 0; i < 256; ++i)
    EXPECT_NEAR(dynamic_map()[dynamic_code(dynamic_map()[i])], dynamic_map()[i], 2.0f / 65535.0f);
}

TEST(NestScales, EqualScalesNestExactly) {
  const std::vector<float> absmax(300, 0.375f);
  std::vector<std::uint8_t> codes(300, 9);
  std::vector<float> nested(2, -1.0f);
  float offset = 0;
  nest_scales(absmax, codes.data(), nested.data(), &offset);
  EXPECT_EQ(offset, 0.375f);
  EXPECT_EQ(nested, std::vector<float>(2, 0.0f));
  EXPECT_EQ(codes, std::vector<std::uint8_t>(300, 0));
  EXPECT_EQ(dynamic_map()[codes[0]] * nested[0] + offset, 0.375f);
}

TEST(NestScales, NoScalesHaveOffsetZero) {
  float offset = 1;
  nest_scales({}, nullptr, nullptr, &offset);
  EXPECT_EQ(offset, 0.0f);
}

TEST(NestScales, MeanIsSummedInDoubleInIndexOrder) {
  // In fp32 the ones would vanish beside 2^25.
  std::vector<float> absmax(9, 1.0f);
  absmax[0] = 0x1p25f;
  std::vector<std::uint8_t> codes(9);
  float nested = 0, offset = 0;
  nest_scales(absmax, codes.data(), &nested, &offset);
  EXPECT_EQ(offset, static_cast<float>((0x1p25 + 8) / 9));
  EXPECT_EQ(nested, std::fabs(0x1p25f - offset));
}

}  // namespace
}  // namespace stowage

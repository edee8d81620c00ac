// SPDX-License-Identifier: Apache-2.0
#include "base/checked.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace stowage {
namespace {

constexpr auto kMax64 = std::numeric_limits<std::int64_t>::max();
constexpr auto kMaxU64 = std::numeric_limits<std::uint64_t>::max();

TEST(Checked, AddsUntilTheLastValue) {
  EXPECT_EQ(checked_add(kMax64 - 1, std::int64_t{1}), kMax64);
  EXPECT_EQ(checked_add(kMax64, std::int64_t{1}), std::nullopt);
  EXPECT_EQ(checked_add(kMaxU64, std::uint64_t{1}), std::nullopt);
}

TEST(Checked, MultipliesUntilTheLastValue) {
  EXPECT_EQ(checked_mul(std::uint64_t{1} << 32, std::uint64_t{1} << 31), std::uint64_t{1} << 63);
  EXPECT_EQ(checked_mul(std::uint64_t{1} << 32, std::uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(checked_mul(std::int64_t{1} << 62, std::int64_t{2}), std::nullopt);
}

TEST(Checked, CastsWhatFits) {
  EXPECT_EQ(checked_cast<std::int64_t>(kMaxU64), std::nullopt);
  EXPECT_EQ(checked_cast<std::uint64_t>(std::int64_t{-1}), std::nullopt);
  EXPECT_EQ(checked_cast<std::uint64_t>(kMax64), std::uint64_t{1} << 63 ^ kMaxU64);
  EXPECT_EQ(checked_cast<std::uint8_t>(255), 255);
  EXPECT_EQ(checked_cast<std::uint8_t>(256), std::nullopt);
}

TEST(Checked, DividesUpWithoutOverflow) {
  EXPECT_EQ(ceil_div(0, 64), 0);
  EXPECT_EQ(ceil_div(1, 64), 1);
  EXPECT_EQ(ceil_div(64, 64), 1);
  EXPECT_EQ(ceil_div(65, 64), 2);
  EXPECT_EQ(ceil_div(kMax64, std::int64_t{2}), std::int64_t{1} << 62);
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "stowage/info.h"

namespace stowage {
namespace {

TEST(Version, IsThreeNumbers) {
  EXPECT_TRUE(std::regex_match(version(), std::regex(R"(\d+\.\d+\.\d+)"))) << version();
}

TEST(Version, CommitIsHexOrUnknown) {
  EXPECT_TRUE(std::regex_match(commit(), std::regex("[0-9a-f]{7,40}|unknown"))) << commit();
}

}  // namespace
}  // namespace stowage

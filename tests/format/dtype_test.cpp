// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "stowage/storage.h"

namespace stowage {
namespace {

TEST(Dtype, NamesAreReadBack) {
  for (int i = 0; i < static_cast<int>(Dtype::unknown); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_FALSE(disk_name(dtype).empty());
    EXPECT_EQ(dtype_from_disk_name(disk_name(dtype)), dtype) << disk_name(dtype);
  }
}

TEST(Dtype, UnknownNamesStayUnknown) {
  for (const char* name : {"", "bf16", "F6_E2M3", "BF16 "})
    EXPECT_EQ(dtype_from_disk_name(name), Dtype::unknown) << name;
  EXPECT_EQ(bits(Dtype::unknown), 0);
  EXPECT_EQ(disk_name(static_cast<Dtype>(200)), "");
}

TEST(Dtype, KnowsItsBits) {
  EXPECT_EQ(bits(Dtype::boolean), 8);
  EXPECT_EQ(bits(Dtype::f4), 4);
  EXPECT_EQ(bits(Dtype::f8_e8m0), 8);
  EXPECT_EQ(bits(Dtype::bf16), 16);
  EXPECT_EQ(bits(Dtype::c64), 64);
}

TEST(Dtype, FourOfThemHoldValues) {
  int count = 0;
  for (int i = 0; i <= static_cast<int>(Dtype::unknown); ++i)
    count += is_value_dtype(static_cast<Dtype>(i)) ? 1 : 0;
  EXPECT_EQ(count, 4);
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
#include "cli/text.h"

#include "expect_error.h"

namespace stowage::cli {
namespace {

TEST(Text, SizesAreRead) {
  EXPECT_EQ(parse_size("1000"), 1000u);
  EXPECT_EQ(parse_size("5GB"), 5000000000u);
  EXPECT_EQ(parse_size("64 MiB"), 64u << 20);
  for (const char* text : {"", "MiB", "0", "-1", "5 Gb", "1.5GB", "99999999999999999999", "5GBx",
                           "18446744073709551615KiB"})
    EXPECT_STOWAGE_ERROR(parse_size(text), invalid_argument, "size: must be a number");
}

TEST(Text, ValueDtypesHaveNames) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16})
    EXPECT_EQ(value_dtype_from_name(value_dtype_name(dtype)), dtype);
  EXPECT_FALSE(value_dtype_from_name("int8"));
}

}  // namespace
}  // namespace stowage::cli

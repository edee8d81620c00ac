// SPDX-License-Identifier: Apache-2.0
#include "cli/text.h"

#include "expect_error.h"

namespace stowage::cli {
namespace {

TEST(Text, SizesAreShort) {
  EXPECT_EQ(size_text(0), "0 B");
  EXPECT_EQ(size_text(1023), "1023 B");
  EXPECT_EQ(size_text(1024), "1.00 KiB");
  EXPECT_EQ(size_text(1536u << 20), "1.50 GiB");
  EXPECT_EQ(size_text(~std::uint64_t{0}), "16384.00 PiB");
}

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

TEST(Text, TablesAlign) {
  Table table({"name", "bytes"}, 1);
  table.add({"a", "1"});
  table.add({"longer", "10000000"});
  EXPECT_EQ(table.text(), "name       bytes\na              1\nlonger  10000000\n");
}

TEST(Text, ControlCharactersAreShown) {
  EXPECT_EQ(printable("a\x1b[2J\nb\x7f"), "a\\x1b[2J\\x0ab\\x7f");
  EXPECT_EQ(printable("größe"), "größe");
}

}  // namespace
}  // namespace stowage::cli

// SPDX-License-Identifier: Apache-2.0
#include "base/table.h"

#include <gtest/gtest.h>

namespace stowage {
namespace {

TEST(Table, SizesAreShort) {
  EXPECT_EQ(size_text(0), "0 B");
  EXPECT_EQ(size_text(1023), "1023 B");
  EXPECT_EQ(size_text(1024), "1.00 KiB");
  EXPECT_EQ(size_text(1536u << 20), "1.50 GiB");
  EXPECT_EQ(size_text(~std::uint64_t{0}), "16384.00 PiB");
}

TEST(Table, ColumnsAlign) {
  Table table({"name", "bytes"}, 1);
  table.add({"a", "1"});
  table.add({"longer", "10000000"});
  EXPECT_EQ(table.text(), "name       bytes\na              1\nlonger  10000000\n");
}

TEST(Table, ControlCharactersAreShown) {
  EXPECT_EQ(printable("a\x1b[2J\nb\x7f"), "a\\x1b[2J\\x0ab\\x7f");
  EXPECT_EQ(printable("größe"), "größe");
}

TEST(Table, TimesAreShort) {
  EXPECT_EQ(time_text(0), "0.0 us");
  EXPECT_EQ(time_text(0.0142), "14.20 ms");
  EXPECT_EQ(time_text(2.307), "2.31 s");
}

}  // namespace
}  // namespace stowage

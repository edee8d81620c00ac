// SPDX-License-Identifier: Apache-2.0
// What files of the kernel say, and what it says of this process.
#include "base/host.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace stowage::host {
namespace {

TEST(Host, ReadsLimitsOfControlGroups) {
  EXPECT_EQ(bytes_of_limit("1073741824\n"), 1u << 30);
  EXPECT_EQ(bytes_of_limit("max\n"), 0u);
  EXPECT_EQ(bytes_of_limit("9223372036854771712\n"), 0u);  // none, as version 1 writes it
  EXPECT_EQ(bytes_of_limit(""), 0u);
  EXPECT_DOUBLE_EQ(processors_of_limit("150000 100000\n"), 1.5);
  EXPECT_DOUBLE_EQ(processors_of_limit("max 100000\n"), 0);
  for (const char* broken : {"", "150000", "150000 0", "1 x"})
    EXPECT_DOUBLE_EQ(processors_of_limit(broken), 0) << broken;
}

TEST(Host, ReadsWhatIsChosen) {
  EXPECT_EQ(chosen("always [madvise] never\n"), "madvise");
  for (const char* broken : {"", "always", "]x[", "["}) EXPECT_EQ(chosen(broken), "") << broken;
}

TEST(Host, ReadsLinesWithKeys) {
  const char* const text = "MemTotal:       16 kB\nMemFree: 8 kB\nlast\t: a b";
  EXPECT_EQ(value_of(text, "MemFree"), "8 kB");
  EXPECT_EQ(value_of(text, "last"), "a b");
  EXPECT_EQ(value_of(text, "other"), "");
  EXPECT_EQ(value_of("key:", "key"), "");
}

TEST(Host, KnowsThisMachine) {
  const Memory found = memory();
  EXPECT_GT(found.all, 1u << 28);
  EXPECT_GT(found.available, 0u);
  EXPECT_LE(found.available, found.all);
  EXPECT_GE(processor_limit(), 0);
  EXPECT_TRUE(is_writable("/tmp"));
  EXPECT_FALSE(is_writable("/nowhere"));
  EXPECT_FALSE(is_writable("/dev/null"));
}

TEST(Host, NamesVariables) {
  setenv("STOWAGE_HOST_TEST_B", "1", 1);
  setenv("STOWAGE_HOST_TEST_A", "", 1);
  EXPECT_EQ(variables("STOWAGE_HOST_TEST"),
            (std::vector<std::string>{"STOWAGE_HOST_TEST_A", "STOWAGE_HOST_TEST_B"}));
  unsetenv("STOWAGE_HOST_TEST_A");
  unsetenv("STOWAGE_HOST_TEST_B");
}

}  // namespace
}  // namespace stowage::host

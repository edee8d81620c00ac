// SPDX-License-Identifier: Apache-2.0
#include "base/env.h"

#include <cstdlib>

#include "expect_error.h"

namespace stowage::env {
namespace {

class Env : public testing::Test {
 protected:
  Env() { unset(); }  // whatever the tests run under
  void TearDown() override { unset(); }

 private:
  static void unset() {
    unsetenv("STOWAGE_THREADS");
    unsetenv("STOWAGE_FORCE_ISA");
  }
};

TEST_F(Env, TableHasOneRowForEachVariableInOrder) {
  std::size_t i = 0;
  for (const Row& row : table()) {
    EXPECT_EQ(static_cast<std::size_t>(row.variable), i++);
    EXPECT_THAT(row.name, testing::StartsWith("STOWAGE_"));
    EXPECT_THAT(row.meaning, testing::EndsWith("."));
  }
  EXPECT_LE(table().size(), 10u) << "more than ten variables is a defect";
}

TEST_F(Env, UnsetReadsAsEmpty) {
  EXPECT_EQ(threads(), 0);
  EXPECT_EQ(force_isa(), "");
}

TEST_F(Env, ReadsWhatIsSet) {
  setenv("STOWAGE_THREADS", "3", 1);
  setenv("STOWAGE_FORCE_ISA", "avx2", 1);
  EXPECT_EQ(threads(), 3);
  EXPECT_EQ(force_isa(), "avx2");
}

TEST_F(Env, RefusesThreadsThatAreNoCount) {
  for (const char* text : {"0", "-1", "1025", "4x", " 4", "four", "99999999999999999999"}) {
    setenv("STOWAGE_THREADS", text, 1);
    EXPECT_STOWAGE_ERROR(
        threads(), invalid_argument,
        "STOWAGE_THREADS: must be a number from 1 to 1024, got '" + std::string(text) + "'");
  }
}

}  // namespace
}  // namespace stowage::env

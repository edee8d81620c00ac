// SPDX-License-Identifier: Apache-2.0
// The crossover of a machine is measured once, kept beside its links, and said by the environment.
#include "stowage/crossover.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "expect_error.h"
#include "kernel/crossover.h"
#include "scratch.h"
#include "stowage/info.h"
#include "stowage/plan.h"

namespace stowage {
namespace {

class KeptCrossover : public testing::Test {
 protected:
  KeptCrossover() { ::setenv("STOWAGE_LINKS", scratch.path("kept/links.json").c_str(), 1); }
  ~KeptCrossover() override {
    ::unsetenv("STOWAGE_LINKS");
    ::unsetenv("STOWAGE_CROSSOVER");
    use_crossover(built_in_crossover());
  }
  const test::Scratch scratch;
};

TEST_F(KeptCrossover, IsMeasuredOnce) {
  bool measured = false;
  const Crossover first = crossover_of_this_machine(false, &measured);
  EXPECT_TRUE(measured);
  EXPECT_EQ(crossover(), first);
  EXPECT_EQ(crossover_of_this_machine(false, &measured), first);
  EXPECT_FALSE(measured);
}

TEST_F(KeptCrossover, IsSaidNotToBeKeptWhereItCannotBe) {
  ::setenv("STOWAGE_LINKS", "/proc/no/links.json", 1);
  Crossover some = built_in_crossover();
  some.rows = 5;
  EXPECT_STOWAGE_ERROR(keep_crossover(some), io, "/proc/no/links.json: must be writable");
  EXPECT_EQ(crossover(), some);
}

TEST_F(KeptCrossover, IsUsedWhereItIsKept) {
  EXPECT_FALSE(use_kept_crossover());
  EXPECT_EQ(crossover(), built_in_crossover());
  Crossover some = built_in_crossover();
  some.rows = 5;
  keep_crossover(some);
  use_crossover(built_in_crossover());
  EXPECT_TRUE(use_kept_crossover());
  EXPECT_EQ(crossover(), some);
  for (const char* broken : {"{", "{\"stowage_links\": 1, \"machines\": 3}",
                             "{\"stowage_links\": 1, \"machines\": {\"another\": {}}}"}) {
    scratch.write("kept/links.json", broken);
    EXPECT_FALSE(use_kept_crossover()) << broken;
  }
}

// A release that measures more takes what an earlier one kept, and its own for the rest.
TEST_F(KeptCrossover, HasWhatIsBuiltInForWhatWasNotMeasured) {
  Crossover some = built_in_crossover();
  some.rows = 5;
  scratch.write("kept/links.json", R"({"stowage_links": 1, "machines": {")" + machine_key() +
                                       R"(": {"crossover": {")" + instruction_set() +
                                       R"(": {"rows": 5}}}}})");
  EXPECT_TRUE(use_kept_crossover());
  EXPECT_EQ(crossover(), some);
}

TEST_F(KeptCrossover, IsWithinBoundsWhateverAnotherHandWrote) {
  const std::string key = machine_key(), isa = instruction_set();
  for (const char* rows : {"1000", "-3", "1.5", "null", "\"8\""}) {
    scratch.write("kept/links.json", R"({"stowage_links": 1, "machines": {")" + key +
                                         R"(": {"crossover": {")" + isa + R"(": {"rows": )" + rows +
                                         R"(, "long_groups": 1, "short_groups": 1, "bytes": 1,
  "words": 1, "float8": 1, "vectors": 4, "near": 0, "own": 64, "own_bf16": 16, "own_matrices": 0, "own_gradient": 0}}}}})");
    use_crossover(built_in_crossover());
    if (use_kept_crossover())
      EXPECT_LE(crossover().rows, kMostWidened);
    else
      EXPECT_EQ(crossover(), built_in_crossover());
  }
}

TEST_F(KeptCrossover, IsWhatTheEnvironmentSays) {
  Crossover some = built_in_crossover();
  some.rows = 5;
  keep_crossover(some);
  ::setenv("STOWAGE_CROSSOVER", "built_in", 1);
  EXPECT_TRUE(use_kept_crossover());
  EXPECT_EQ(crossover(), built_in_crossover());
  ::setenv("STOWAGE_CROSSOVER", "rows=8,words=3", 1);
  EXPECT_TRUE(use_kept_crossover());
  some = built_in_crossover();
  some.rows = 8, some.words = 3;
  EXPECT_EQ(crossover(), some);
  for (const char* wrong :
       {"rows", "rows=", "rows=x", "rows=1x", "lines=3", "rows=3,,words=1", "="}) {
    ::setenv("STOWAGE_CROSSOVER", wrong, 1);
    EXPECT_STOWAGE_ERROR(use_kept_crossover(), invalid_argument,
                         "STOWAGE_CROSSOVER: must be built_in or names and numbers");
  }
  ::setenv("STOWAGE_CROSSOVER", "rows=65", 1);
  EXPECT_STOWAGE_ERROR(use_kept_crossover(), invalid_argument, "rows must be from 0 to 64, got 65");
}

}  // namespace
}  // namespace stowage

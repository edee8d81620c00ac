// SPDX-License-Identifier: Apache-2.0
#include "engine/candidates.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace stowage::engine {
namespace {

constexpr auto kAny = [](WeightId) { return true; };
constexpr auto kNobody = [](WeightId) { return false; };

TEST(Candidates, TheOneThatIsUsedLastGoesFirst) {
  Candidates candidates(4);
  candidates.add(0, 10);
  candidates.add(1, 30);
  candidates.add(2, 20);
  EXPECT_EQ(candidates.take_last(0, kAny, kAny), 1);
  EXPECT_EQ(candidates.take_last(15, kAny, kAny), 2);
  EXPECT_EQ(candidates.take_last(15, kAny, kAny), std::nullopt);  // 0 is used before that
  EXPECT_EQ(candidates.take_last(0, kAny, kAny), 0);
  EXPECT_EQ(candidates.take_last(0, kAny, kAny), std::nullopt);
}

TEST(Candidates, OneThatFitsIsPreferredAndTheOthersStay) {
  Candidates candidates(4);
  for (const WeightId id : {0, 1, 2}) candidates.add(id, 10 + static_cast<std::uint64_t>(id));
  EXPECT_EQ(candidates.take_last(
                0, [](WeightId id) { return id == 0; }, kAny),
            0);
  EXPECT_EQ(candidates.take_last(0, kNobody, kAny), 2);
  EXPECT_EQ(candidates.take_last(0, kAny, kNobody), std::nullopt);
  EXPECT_EQ(candidates.take_last(0, kAny, kAny), 1);
}

TEST(Candidates, OverdueOnesAreThoseWhoseTimeHasPassed) {
  Candidates candidates(3);
  candidates.add(0, 10);
  candidates.add(1, 5);
  EXPECT_EQ(candidates.take_overdue(4), std::nullopt);
  EXPECT_EQ(candidates.take_overdue(5), 1);
  candidates.add(0, 50);  // used again
  EXPECT_EQ(candidates.take_overdue(20), std::nullopt);
  EXPECT_EQ(candidates.take_overdue(50), 0);
}

TEST(Candidates, AgreesWithASortedListHoweverOftenTheyChange) {
  constexpr int kUnits = 30;
  Candidates candidates(kUnits);
  std::map<WeightId, std::uint64_t> expected;
  std::mt19937 random(3);
  for (int step = 0; step < 20000; ++step) {
    const auto id = static_cast<WeightId>(random() % kUnits);
    if (random() % 4 == 0) {
      candidates.remove(id);
      expected.erase(id);
    } else if (random() % 3 == 0 && !expected.empty()) {
      const auto last =
          std::ranges::max_element(expected, {}, [](const auto& entry) { return entry.second; });
      const auto taken = candidates.take_last(0, kAny, kAny);
      ASSERT_TRUE(taken);
      ASSERT_EQ(expected.at(*taken), last->second);
      expected.erase(*taken);
    } else {
      const std::uint64_t time = 1 + random() % 1000;
      candidates.add(id, time);
      expected[id] = time;
    }
  }
}

}  // namespace
}  // namespace stowage::engine

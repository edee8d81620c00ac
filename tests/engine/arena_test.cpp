// SPDX-License-Identifier: Apache-2.0
#include "engine/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

namespace stowage::engine {
namespace {

TEST(Arena, TakesTheSmallestRunThatFitsAndJoinsNeighbours) {
  Arena arena(8 * kPage, 8);
  const auto a = arena.take(2 * kPage), b = arena.take(kPage), c = arena.take(3 * kPage);
  ASSERT_TRUE(a && b && c);
  EXPECT_EQ(arena.data(*b), arena.data(*a) + 2 * kPage);
  EXPECT_EQ(arena.taken(), 6 * kPage);
  EXPECT_FALSE(arena.take(3 * kPage));
  arena.give(*b);  // a hole of one page between a and c
  const auto d = arena.take(kPage);
  ASSERT_TRUE(d);
  EXPECT_EQ(arena.data(*d), arena.data(*a) + 2 * kPage);
  arena.give(*a);
  EXPECT_EQ(arena.hole(*d), 3 * kPage);
  arena.give(*d);
  arena.give(*c);
  const auto whole = arena.take(8 * kPage);
  ASSERT_TRUE(whole);
  EXPECT_EQ(arena.taken(), 8 * kPage);
}

TEST(Arena, HandsOutNoByteTwice) {
  constexpr std::size_t kRuns = 40;
  Arena arena(64 * kPage, kRuns);
  std::mt19937 random(7);
  std::map<Arena::Run, std::uint64_t> taken;
  std::uint64_t bytes = 0;
  for (int step = 0; step < 20000; ++step) {
    if (taken.size() < kRuns && random() % 2 == 0) {
      const std::uint64_t want = (1 + random() % 9) * kPage;
      const auto run = arena.take(want);
      if (!run) continue;
      ASSERT_TRUE(taken.emplace(*run, want).second);
      ASSERT_EQ(arena.bytes(*run), want);
      std::memset(arena.data(*run), *run, want);
      bytes += want;
    } else if (!taken.empty()) {
      const auto it = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
      for (std::uint64_t i = 0; i < it->second; i += 512)
        ASSERT_EQ(arena.data(it->first)[i], std::byte(it->first));
      bytes -= it->second;
      arena.give(it->first);
      taken.erase(it);
    }
    ASSERT_EQ(arena.taken(), bytes);
  }
}

}  // namespace
}  // namespace stowage::engine

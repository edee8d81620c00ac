// SPDX-License-Identifier: Apache-2.0
// The simulated pass beside what can be said without simulating.
#include "plan/pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace stowage::planning {
namespace {

double seconds(const std::vector<Step>& steps, std::uint64_t ram) {
  return Pass().seconds(steps, {.ram = ram});
}

TEST(Pass, WithoutLinksIsTheSumOfTheWork) {
  EXPECT_DOUBLE_EQ(seconds({{.compute = 1}, {.compute = 2}, {.compute = 4}}, 0), 7);
}

TEST(Pass, ARingOfOneUnitReadsAndWorksInTurn) {
  const std::vector<Step> steps(5, {.bytes = 10, .read = 3, .compute = 2});
  EXPECT_DOUBLE_EQ(seconds(steps, 10), 5 * (3 + 2));
}

TEST(Pass, ARingOfTwoHidesTheShorter) {
  const std::vector<Step> reads(5, {.bytes = 10, .read = 3, .compute = 2});
  EXPECT_DOUBLE_EQ(seconds(reads, 20), 5 * 3);
  const std::vector<Step> works(5, {.bytes = 10, .read = 2, .compute = 3});
  EXPECT_DOUBLE_EQ(seconds(works, 20), 5 * 3);
}

TEST(Pass, ResidentsGiveWhatMovesTimeToHide) {
  std::vector<Step> steps;
  for (int i = 0; i < 4; ++i) {
    steps.push_back({.bytes = 10, .read = 4, .compute = 2});
    steps.push_back({.compute = 2});
  }
  EXPECT_DOUBLE_EQ(seconds(steps, 20), 4 * 4);
}

TEST(Pass, TwoLinksInARowAreAsFastAsTheSlower) {
  const std::vector<Step> steps(
      6, {.bytes = 10, .read = 5, .copy = 3, .compute = 1, .accelerator = 0});
  Rings rings{.ram = 20};
  rings.accelerators[0] = 20;
  EXPECT_DOUBLE_EQ(Pass().seconds(steps, rings), 6 * 5);
}

// T >= max(sum of work, sum over each link), T <= the sum of all: whatever the rings.
TEST(Pass, LiesBetweenItsBounds) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<Step> steps(1 + random() % 20);
    double work = 0, read = 0, copy = 0;
    for (Step& step : steps) {
      step = {.bytes = 1 + random() % 9, .compute = static_cast<double>(random() % 10)};
      if (random() % 2 == 0) step.read = static_cast<double>(1 + random() % 9);
      if (random() % 2 == 0) {
        step.copy = static_cast<double>(1 + random() % 9);
        step.accelerator = 0;
      }
      work += step.compute;
      read += step.read;
      copy += step.copy;
    }
    double before = 1e300;
    for (const std::uint64_t ring : {9u, 18u, 40u, 400u}) {
      Rings rings{.ram = ring};
      rings.accelerators[0] = ring;
      const double took = Pass().seconds(steps, rings);
      EXPECT_GE(took, std::max({work, ring < 400 ? read : 0, ring < 400 ? copy : 0}) - 1e-9);
      EXPECT_LE(took, work + read + copy + 1e-9);
      if (ring < 400) {
        EXPECT_LE(took, before + 1e-9) << "a larger ring is no slower";
      }
      before = took;
    }
  }
}

TEST(Pass, TellsWhenUnitsTookRoom) {
  std::vector<Moments> moments;
  const std::vector<Step> steps(3, {.bytes = 10, .read = 3, .compute = 2});
  Pass().seconds(steps, {.ram = 20}, &moments);
  ASSERT_EQ(moments.size(), 3u);
  for (const Moments& m : moments) {
    EXPECT_LE(m.ram_taken + 3, m.begun);
    EXPECT_DOUBLE_EQ(m.ram_given, m.begun + 2);
  }
}

}  // namespace
}  // namespace stowage::planning

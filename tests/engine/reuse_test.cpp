// SPDX-License-Identifier: Apache-2.0
// Which slices count as used often and lately: beside a plain simulation of each half-life, and
// beside the best of them where those who route change.
#include "engine/reuse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

namespace stowage::engine {
namespace {

using Trace = std::vector<std::size_t>;
constexpr std::size_t kSlices = 64;

// Misses of one half-life, by all uses that there were.
std::size_t misses_of(double half_life, const Trace& trace, std::size_t room) {
  std::map<std::size_t, std::vector<std::size_t>> uses;
  std::set<std::size_t> held;
  std::size_t misses = 0;
  for (std::size_t now = 0; now < trace.size(); ++now) {
    uses[trace[now]].push_back(now);
    if (held.contains(trace[now])) continue;
    ++misses;
    const auto worth = [&](std::size_t slice) {
      double sum = 0;
      for (const std::size_t at : uses[slice])
        sum += std::exp2((static_cast<double>(at) - static_cast<double>(now)) / half_life);
      return sum;
    };
    if (held.size() >= room) held.erase(*std::ranges::min_element(held, {}, worth));
    held.insert(trace[now]);
  }
  return misses;
}

// As the engine does it: what has the least rank goes, by whatever half-life is chosen.
std::size_t misses_of(Reuse& reuse, const Trace& trace, std::size_t room) {
  std::set<std::size_t> held;
  std::size_t misses = 0;
  for (const std::size_t slice : trace) {
    reuse.note(slice);
    if (held.contains(slice)) continue;
    ++misses;
    if (held.size() >= room) {
      reuse.set_room(room);
      held.erase(*std::ranges::min_element(held, {}, [&](std::size_t s) { return reuse.rank(s); }));
    }
    held.insert(slice);
  }
  return misses;
}

// Preferences as Zipf has them, which change after `lasts` uses; with `stays` as the chance of a
// use to be that of four uses before.
Trace routed(std::size_t uses, std::size_t lasts, double stays, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> chances;
  for (std::size_t i = 0; i < kSlices; ++i) chances.push_back(1 / static_cast<double>(i + 1));
  std::discrete_distribution<std::size_t> pick(chances.begin(), chances.end());
  std::bernoulli_distribution again(stays);
  std::vector<std::size_t> order(kSlices);
  for (std::size_t i = 0; i < kSlices; ++i) order[i] = i;
  Trace trace;
  for (std::size_t i = 0; i < uses; ++i) {
    if (i % lasts == 0) std::ranges::shuffle(order, random);
    trace.push_back(i >= 4 && again(random) ? trace[i - 4] : order[pick(random)]);
  }
  return trace;
}

Reuse of_slices(std::size_t count = kSlices) { return Reuse(std::vector<std::uint64_t>(count, 1)); }

TEST(Reuse, RanksAreInTheOrderOfUsesThatAge) {
  Reuse reuse = of_slices();
  const Trace trace = routed(2000, 300, 0.2, 1);
  std::vector<std::vector<std::size_t>> uses(kSlices);
  for (std::size_t now = 0; now < trace.size(); ++now) {
    reuse.note(trace[now]);
    uses[trace[now]].push_back(now);
    if (now % 97 != 0) continue;
    std::vector<std::pair<double, double>> both;  // ranks, and sums of 2^(-age / half-life)
    for (std::size_t slice = 0; slice < kSlices; ++slice) {
      double sum = 0;
      for (const std::size_t at : uses[slice])
        sum += std::exp2((static_cast<double>(at) - static_cast<double>(now)) / reuse.half_life());
      if (sum > 1e-200) both.emplace_back(reuse.rank(slice), sum);
    }
    std::ranges::sort(both);
    for (std::size_t i = 1; i < both.size(); ++i) {
      EXPECT_LE(both[i - 1].second, both[i].second * (1 + 1e-9)) << now;
    }
  }
}

TEST(Reuse, MissesAboutAsLittleAsTheBestHalfLife) {
  struct Case {
    std::size_t lasts;
    double stays;
  };
  for (const Case& of : {Case{100000, 0}, {600, 0}, {120, 0}, {100000, 0.5}, {600, 0.5}}) {
    for (const std::size_t room : {16u, 32u}) {
      const Trace trace = routed(6000, of.lasts, of.stays, 2);
      std::size_t best = trace.size(), worst = 0;
      for (const double half_life : {2.0, 8.0, 32.0, 128.0, 512.0}) {
        const std::size_t misses = misses_of(half_life, trace, room);
        best = std::min(best, misses);
        worst = std::max(worst, misses);
      }
      Reuse reuse = of_slices();
      const std::size_t misses = misses_of(reuse, trace, room);
      EXPECT_LE(static_cast<double>(misses), 1.06 * static_cast<double>(best))
          << of.lasts << " " << of.stays << " " << room;
      EXPECT_LT(misses, worst);
    }
  }
}

TEST(Reuse, OfManySlicesAPartTellsTheRest) {
  constexpr std::size_t kCopies = 128;  // of each slice, one after the other
  Reuse lasting = of_slices(kSlices * kCopies), repeated = of_slices(kSlices * kCopies);
  for (const auto& [reuse, stays] : {std::pair(&lasting, 0.0), {&repeated, 0.9}}) {
    Trace each = routed(3000, 100000, stays, 3);
    Trace trace;
    for (const std::size_t slice : each)
      for (std::size_t i = 0; i < kCopies; ++i) trace.push_back(slice * kCopies + i);
    std::set<std::size_t> held;
    for (const std::size_t slice : trace) {
      reuse->note(slice);
      if (!held.insert(slice).second) continue;
      if (held.size() > 16 * kCopies) {
        reuse->set_room(16 * kCopies);
        held.erase(held.begin());  // whichever: what it learns is of its own lists
      }
    }
  }
  EXPECT_GT(lasting.half_life(), repeated.half_life());
}

TEST(Reuse, LearnsHowLongPreferencesLast) {
  Reuse lasting = of_slices(), repeated = of_slices();
  misses_of(lasting, routed(6000, 100000, 0, 3), 16);
  misses_of(repeated, routed(6000, 100000, 0.8, 3), 16);
  EXPECT_GT(lasting.half_life(), 4 * repeated.half_life());
}

TEST(Reuse, WhereAllFitsNothingIsToBeChosen) {
  Reuse reuse = of_slices();
  for (const std::size_t slice : routed(3000, 100, 0, 4)) EXPECT_FALSE(reuse.note(slice));
}

TEST(Reuse, WhatWasForeseenRanksByItsUses) {
  Reuse reuse = of_slices(4);
  reuse.foresee(std::vector<std::uint64_t>{5, 0, 900, 40});
  EXPECT_GT(reuse.rank(2), reuse.rank(3));
  EXPECT_GT(reuse.rank(3), reuse.rank(0));
  for (int i = 0; i < 400; ++i) reuse.note(1);
  EXPECT_GT(reuse.rank(1), reuse.rank(2)) << "what is used counts more than what was foreseen";
  Reuse none = of_slices(2);
  none.foresee(std::vector<std::uint64_t>{0, 0});
  EXPECT_EQ(none.rank(0), none.rank(1));
}

TEST(Reuse, SlicesOfOtherSizesTakeTheirRoom) {
  Reuse reuse(std::vector<std::uint64_t>{10, 1, 1, 1, 100});
  reuse.set_room(3);
  for (int i = 0; i < 200; ++i)  // the large ones fit no list, and are dropped from it next
    for (const std::size_t slice : {4u, 0u, 1u, 2u, 3u}) reuse.note(slice);
  EXPECT_GT(reuse.rank(3), reuse.rank(4)) << "used as often, and later";
}

}  // namespace
}  // namespace stowage::engine

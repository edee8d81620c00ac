// SPDX-License-Identifier: Apache-2.0
// A placement beside the best of all that there are, and the rules that every one keeps.
#include "plan/search.h"

#include <gtest/gtest.h>

#include <numeric>

#include "allocations.h"
#include "plan/placed.h"
#include "plan/spread.h"

namespace stowage::planning {
namespace {

using test::Draw;
using test::draw;
using test::Drawn;

constexpr double kNear = 1.05;

// One draw shows what a sanitizer can find; all placements of many take it minutes.
std::uint64_t rounds(std::uint64_t count) { return test::kCountsAllocations ? count : 1; }

void expect_near_best(const Draw& what, std::uint64_t seeds) {
  for (std::uint64_t seed = 1; seed <= rounds(seeds); ++seed) {
    const Drawn drawn = draw(what, seed);
    const Placement placed = place(drawn.units, drawn.limits);
    const double best = test::exhaustive(drawn, what.with_disk);
    EXPECT_LE(placed.seconds, kNear * best) << "seed " << seed;
    EXPECT_GE(placed.seconds, best * (1 - 1e-9)) << "seed " << seed;
  }
}

TEST(Placement, OfTwelveUnitsOnACpuIsNearTheBest) { expect_near_best({.units = 12}, 60); }
TEST(Placement, OfSixUnitsOnACpuIsNearTheBest) { expect_near_best({.units = 6}, 200); }
TEST(Placement, WithAnAcceleratorIsNearTheBest) {
  expect_near_best({.units = 6, .accelerators = 1}, 40);
}
TEST(Placement, WithAnAcceleratorAndAllInRamIsNearTheBest) {
  expect_near_best({.units = 9, .accelerators = 1, .with_disk = false}, 25);
}
TEST(Placement, OfTwelveUnitsWithAnAcceleratorIsNearTheBest) {
  expect_near_best({.units = 12, .accelerators = 1, .with_disk = false}, 2);
}
TEST(Placement, WithTwoAcceleratorsIsNearTheBest) {
  expect_near_best({.units = 8, .accelerators = 2, .with_disk = false}, 25);
}

TEST(Placement, OfManyUnitsKeepsTheLimits) {
  for (std::uint64_t seed = 1; seed <= rounds(30); ++seed) {
    const Drawn drawn = draw({.units = 300, .accelerators = static_cast<int>(seed % 3)}, seed);
    const Placement placed = place(drawn.units, drawn.limits);
    const auto rings = rings_of(drawn.units, drawn.limits, placed.assignments);
    ASSERT_TRUE(rings.has_value()) << "seed " << seed;
    EXPECT_EQ(rings->ram, placed.rings.ram);
    for (std::size_t i = 0; i < drawn.units.size(); ++i) {
      const bool on_cpu = works_on_cpu(placed.assignments[i]);
      EXPECT_TRUE(drawn.units[i].accelerator >= 0 || on_cpu);
      EXPECT_TRUE(drawn.units[i].accelerator < 0 || drawn.limits.works_on_cpu || !on_cpu);
    }
  }
}

TEST(Placement, KeepsEverythingWhereItFits) {
  Drawn drawn = draw({.units = 50}, 3);
  drawn.limits.ram = 1 << 20;
  const Placement placed = place(drawn.units, drawn.limits);
  for (const Assignment assignment : placed.assignments) EXPECT_EQ(assignment, Assignment::ram_cpu);
  EXPECT_EQ(placed.rings.ram, 0u);
}

TEST(Placement, SpreadsWhatStaysEvenly) {
  std::vector<Candidate> units(40, Candidate{.bytes = 10, .read = 10, .on_cpu = 5});
  Limits limits;
  limits.ram = 220;  // 20 stay beside a ring of two
  const Placement placed = place(units, limits);
  for (std::size_t part = 0; part < 4; ++part) {
    int stay = 0;
    for (std::size_t i = 10 * part; i < 10 * part + 10; ++i)
      stay += placed.assignments[i] == Assignment::ram_cpu;
    EXPECT_GE(stay, 4) << part;
    EXPECT_LE(stay, 6) << part;
  }
}

TEST(Placement, KeepsWhatIsUsedBeforeWhatIsNot) {
  std::vector<Candidate> units;
  for (int i = 0; i < 20; ++i) {
    const double uses = i % 2 == 0 ? 1 : 0.05;
    units.push_back({.bytes = 10, .read = 10 * uses, .on_cpu = uses});
  }
  Limits limits;
  limits.ram = 110;  // the ten hot ones and a ring of one
  const Placement placed = place(units, limits);
  for (std::size_t i = 0; i < units.size(); ++i)
    EXPECT_EQ(placed.assignments[i] == Assignment::ram_cpu, i % 2 == 0) << i;
}

TEST(Placement, MultipliesWhereTheWeightRestsIfThatIsCheaper) {
  const std::vector<Candidate> slow_link(
      8, {.bytes = 10, .copy = 100, .on_cpu = 5, .on_accelerator = 1, .accelerator = 0});
  Limits limits;
  limits.ram = 80;
  limits.accelerators[0] = 40;
  const Placement placed = place(slow_link, limits);
  EXPECT_EQ(std::ranges::count(placed.assignments, Assignment::resident), 4);
  EXPECT_EQ(std::ranges::count(placed.assignments, Assignment::ram_cpu), 4);
}

TEST(Spread, TakesTheMostValuableFirst) {
  const std::vector<Candidate> units(4, Candidate{.bytes = 10});
  const std::vector<std::size_t> among{0, 1, 2, 3};
  const std::vector<double> value{1, 8, 2, 4};
  std::vector<std::size_t> taken = spread_evenly(units, among, value, 20);
  std::ranges::sort(taken);
  EXPECT_EQ(taken, (std::vector<std::size_t>{1, 3}));
  EXPECT_TRUE(spread_evenly(units, among, value, 9).empty());
}

}  // namespace
}  // namespace stowage::planning

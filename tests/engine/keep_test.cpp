// SPDX-License-Identifier: Apache-2.0
// Units that are asked to stay do, whatever else comes and goes in the rest of the budget.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "allocations.h"
#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;

constexpr int kWeights = 6;

class Keep : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_));
  Needs needs_{file_};

  static WeightId id(const Engine& engine, int i) { return engine.find(weight_name(i)).value(); }
  void use(Engine& engine, int i) const {
    const Lease lease = engine.acquire(id(engine, i));
    EXPECT_TRUE(same_bytes(lease.weight(), file_.weight(weight_name(i)))) << i;
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Keep,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Keep, WhatIsKeptIsReadOnce) {
  for (const int workers : {0, 2}) {
    const Engine sizes(file_, {.ram = needs_.all, .reads = GetParam(), .workers = 0});
    const std::uint64_t kept = sizes.bytes(id(sizes, 1)) + sizes.bytes(id(sizes, 4));
    const std::uint64_t ram = kept + needs_.least;
    Engine engine(file_, {.ram = ram, .reads = GetParam(), .workers = workers});
    engine.keep(std::vector{id(engine, 4), id(engine, 1), id(engine, 4)});
    EXPECT_EQ(engine.report().held, kept);
    std::uint64_t rest = 0;
    for (int i = 0; i < kWeights; ++i)
      if (i != 1 && i != 4) rest += sizes.bytes(id(sizes, i));
    constexpr int kPasses = 5;
    for (int pass = 0; pass < kPasses; ++pass)
      for (int i = 0; i < kWeights; ++i) use(engine, i);
    const EngineReport report = engine.report();
    EXPECT_EQ(report.acquired, static_cast<std::uint64_t>(kPasses * kWeights));
    EXPECT_EQ(report.hits + report.misses + report.late, report.acquired);
    EXPECT_LE(report.peak, ram);
    EXPECT_LE(report.bytes_read, kept + (kPasses + 1) * rest);  // with what is prefetched last
    if (workers == 0) {
      EXPECT_EQ(report.misses, 2u + kPasses * (kWeights - 2));
    }
  }
}

// Prefetched it may be too, and an engine without workers reads what is asked for.
TEST_P(Keep, MayBeEverythingButOne) {
  Engine engine(file_, {.ram = needs_.all - 1, .reads = GetParam(), .workers = 2});
  std::vector<WeightId> most;
  for (WeightId unit = 0; unit < engine.size(); ++unit)
    if (unit != id(engine, 0)) most.push_back(unit);
  EXPECT_STOWAGE_ERROR(engine.keep(most), invalid_argument, "the budget must hold what is kept");
  ASSERT_FALSE(HasFailure());  // without room for the last one its use would wait for ever
  std::erase(most, id(engine, 5));
  engine.keep(most);
  for (int pass = 0; pass < 4; ++pass)
    for (int i = kWeights; i-- > 0;) use(engine, i);
  EXPECT_LE(engine.report().peak, needs_.all - 1);
}

TEST_P(Keep, IsSaidBeforeTheFirstUse) {
  Engine engine(file_, {.ram = needs_.least, .reads = GetParam(), .workers = 0});
  EXPECT_STOWAGE_ERROR(engine.keep(std::vector{engine.size()}), invalid_argument,
                       "a weight's id must be below");
  for (const WeightId none : {-1, engine.size()}) {
    EXPECT_STOWAGE_ERROR(engine.name(none), invalid_argument, "a weight's id must be below");
    EXPECT_STOWAGE_ERROR(engine.bytes(none), invalid_argument, "a weight's id must be below");
    EXPECT_STOWAGE_ERROR(engine.acquire(none), invalid_argument, "a weight's id must be below");
    EXPECT_STOWAGE_ERROR(engine.expect(std::vector{none}), invalid_argument, "must be below");
  }
  use(engine, 0);
  EXPECT_STOWAGE_ERROR(engine.keep(std::vector{id(engine, 1)}), invalid_argument,
                       "before the first use");
  use(engine, 1);
}

// What never comes needs no room, however large it is; its leases show the mapping.
TEST_P(Keep, WhatIsMappedOnlyNeedsNoRoom) {
  std::uint64_t second = 0;
  std::vector<std::string> left_out;
  {
    const Engine sizes(file_, {.ram = needs_.all, .reads = GetParam(), .workers = 0});
    for (WeightId unit = 0; unit < sizes.size(); ++unit) {
      if (sizes.bytes(unit) == needs_.least)
        left_out.push_back(sizes.name(unit));
      else
        second = std::max(second, sizes.bytes(unit));
    }
  }
  EXPECT_STOWAGE_ERROR(Engine(file_, {.ram = second, .reads = GetParam()}), invalid_argument,
                       "must hold the largest weight");
  Engine engine(file_, {.ram = second, .reads = GetParam(), .mapped_only = left_out});
  EXPECT_EQ(engine.bytes(engine.find(left_out[0]).value()), 0u);
  std::vector<WeightId> all(static_cast<std::size_t>(engine.size()));
  std::iota(all.begin(), all.end(), 0);
  engine.expect(all);
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < kWeights; ++i) use(engine, i);
  EXPECT_GE(engine.report().borrowed, 3u);
  EXPECT_LE(engine.report().peak, second);
  EXPECT_FALSE(Engine::lease_at(file_.weight(left_out[0]).part(0)).has_value());
  EXPECT_STOWAGE_ERROR(Engine(file_, {.ram = needs_.all, .mapped_only = {"none"}}),
                       invalid_argument, "must have none");
  // Its pages are the system's to keep: giving them back would cost each lease all of them.
  const std::uint64_t before = madvised();
  for (int i = 0; i < 100; ++i) (void)engine.acquire(engine.find(left_out[0]).value());
  EXPECT_EQ(madvised(), before);
}

TEST_P(Keep, ChangesNothingWhereAllFits) {
  Engine engine(file_, {.ram = needs_.all, .reads = GetParam(), .workers = 0});
  engine.keep(std::vector{id(engine, 1)});
  EXPECT_EQ(engine.report().held, 0u);
  for (int pass = 0; pass < 2; ++pass)
    for (int i = 0; i < kWeights; ++i) use(engine, i);
  EXPECT_EQ(engine.report().misses, static_cast<std::uint64_t>(kWeights));
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
#include "stowage/engine.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <limits>
#include <numeric>
#include <thread>

#include "engine/model.h"
#include "expect_error.h"
#include "forked.h"

namespace stowage {
namespace {
using namespace test;
using namespace std::chrono_literals;

class Engines : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  std::string folder_ = write_model(scratch_);
  File file_ = File::open(folder_);
  Needs needs_{file_};

  EngineOptions options(std::uint64_t ram, int workers = 2) const {
    return {.ram = ram, .reads = GetParam(), .workers = workers};
  }
  static WeightId id(const Engine& engine, int i) { return engine.find(weight_name(i)).value(); }
  void expect_right(const Lease& lease, int i) const {
    EXPECT_TRUE(same_bytes(lease.weight(), file_.weight(weight_name(i)))) << i;
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Engines,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Engines, GivesTheBytesOfEveryWeightUnderTheSmallestBudget) {
  Engine engine(file_, options(needs_.least));
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < 6; ++i) expect_right(engine.acquire(id(engine, i)), i);
  const EngineReport report = engine.report();
  EXPECT_EQ(report.acquired, 18u);
  EXPECT_EQ(report.hits + report.misses + report.late, 18u);
  EXPECT_LE(report.peak, needs_.least);
}

TEST_P(Engines, ReadsAWeightOnceWhereAllFit) {
  Engine engine(file_, options(needs_.all, 0));
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < 6; ++i) expect_right(engine.acquire(id(engine, i)), i);
  EXPECT_EQ(engine.report().misses, 6u);
  EXPECT_EQ(engine.report().hits, 12u);
  EXPECT_EQ(engine.report().evicted, 0u);
}

// Activation checkpointing: each block goes forward again, then backward. Nothing of that is missed
// once it is known, at any budget.
TEST_P(Engines, LearnsPassesThatComputeAgain) {
  constexpr int kBlocks = 4, kLayers = 3;
  const Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = kBlocks * kLayers}));
  std::vector<int> pass(kBlocks * kLayers);
  std::iota(pass.begin(), pass.end(), 0);
  for (int block = kBlocks; block-- > 0;) {
    for (int k = 0; k < kLayers; ++k) pass.push_back(block * kLayers + k);
    for (int k = kLayers; k-- > 0;) pass.push_back(block * kLayers + k);
  }
  const Needs needs(file);
  for (const std::uint64_t share : {4, 6, 8}) {
    Engine engine(file, options(needs.all * share / 10));
    std::uint64_t missed = 0;
    for (int i = 0; i < 8; ++i) {
      if (i == 4) missed = engine.report().misses;
      for (const int k : pass)
        EXPECT_TRUE(
            same_bytes(engine.acquire(id(engine, k)).weight(), file.weight(weight_name(k))));
    }
    EXPECT_EQ(engine.report().misses, missed) << share;
  }
}

// Looking ahead must not put out what could have stayed.
TEST_P(Engines, ReadsOfACircleWhatDoesNotFitAndALittleMore) {
  constexpr int kLayers = 96;
  const Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = kLayers}));
  const Needs needs(file);
  Engine engine(file, options(needs.all / 2));
  std::uint64_t before = 0;
  for (int pass = 0; pass < 8; ++pass) {
    if (pass == 4) before = engine.report().bytes_read;
    for (int i = 0; i < kLayers; ++i) engine.acquire(id(engine, i));
  }
  EXPECT_LT(engine.report().bytes_read - before, 4 * needs.all * 3 / 4);
}

TEST_P(Engines, KeepsWhatWillBeUsedSoonest) {
  // In a circle the unit just used is the one needed last: all but one of those that fit stay.
  Engine engine(file_, options(needs_.all - 1, 0));
  for (int pass = 0; pass < 6; ++pass)
    for (WeightId i = 0; i < engine.size(); ++i) engine.acquire(i);
  const EngineReport report = engine.report();
  EXPECT_GT(report.hits, 5 * static_cast<std::uint64_t>(engine.size()) / 2);
}

TEST_P(Engines, ReadsAheadInTheOrderThatItLearnt) {
  Engine engine(file_, options(2 * needs_.least));
  const int order[] = {3, 0, 5, 1, 4, 2};
  for (int pass = 0; pass < 6; ++pass) {
    for (const int i : order) {
      const Lease lease = engine.acquire(id(engine, i));
      expect_right(lease, i);
      std::this_thread::sleep_for(5ms);
    }
  }
  const EngineReport report = engine.report();
  EXPECT_GT(report.ahead, 12u);
  EXPECT_GT(report.hits + report.late, 18u) << report.misses;
  EXPECT_LE(report.peak, 2 * needs_.least);
}

TEST_P(Engines, AnExpectedOrderServesTheFirstPass) {
  Engine engine(file_, options(3 * needs_.least));
  std::vector<WeightId> order(6);
  for (int i = 0; i < 6; ++i) order[static_cast<std::size_t>(i)] = id(engine, i);
  engine.expect(order);
  for (int i = 0; i < 6; ++i) {
    expect_right(engine.acquire(id(engine, i)), i);
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(engine.report().misses, 1u);
  EXPECT_STOWAGE_ERROR(engine.expect(std::vector<WeightId>{99}), invalid_argument, "99");
}

TEST_P(Engines, WhatIsNotUsedAnyMoreGoes) {
  Engine engine(file_, options(needs_.all / 2, 0));
  for (int pass = 0; pass < 4; ++pass)
    for (const int i : {0, 1, 2}) engine.acquire(id(engine, i));
  for (int pass = 0; pass < 60; ++pass)
    for (const int i : {3, 4}) engine.acquire(id(engine, i));
  const auto before = engine.report();
  for (int pass = 0; pass < 10; ++pass)
    for (const int i : {3, 4}) engine.acquire(id(engine, i));
  EXPECT_EQ(engine.report().hits - before.hits, 20u);
}

TEST_P(Engines, AThreadThatHoldsALeaseNeverWaits) {
  Engine engine(file_, options(needs_.least));
  std::vector<Lease> leases;
  for (int i = 0; i < 6; ++i) {
    leases.push_back(engine.acquire(id(engine, i)));
    expect_right(leases.back(), i);
  }
  for (int i = 0; i < 6; ++i) expect_right(leases[static_cast<std::size_t>(i)], i);
  EXPECT_GT(engine.report().borrowed, 0u);
  EXPECT_LE(engine.report().peak, needs_.least);
  leases.clear();
  expect_right(engine.acquire(id(engine, 5)), 5);
}

TEST_P(Engines, OneSlotAndEightThreadsGetThrough) {
  Engine engine(file_, options(needs_.least, 1));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int k = 0; k < 60; ++k) {
        const int i = (k * (t + 1) + t) % 6;
        const Lease lease = engine.acquire(id(engine, i));
        if (!same_bytes(lease.weight(), file_.weight(weight_name(i)))) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(engine.report().acquired, 480u);
  EXPECT_LE(engine.report().peak, needs_.least);
}

TEST_P(Engines, AddressesOfTheMappingLeadToTheLease) {
  const Weight mapped = file_.weight(weight_name(1));
  EXPECT_FALSE(Engine::lease_at(mapped.part(0)));
  {
    const Engine engine(file_, options(needs_.least));
    const auto lease = Engine::lease_at(mapped.part(0));
    ASSERT_TRUE(lease);
    const auto* const middle = static_cast<const std::byte*>(mapped.part(0)) + 777;
    EXPECT_EQ(*static_cast<const std::byte*>(lease->at(middle)), *middle);
    EXPECT_EQ(lease->at(mapped.part(0)) == mapped.part(0), GetParam() == Reads::mapped);
    const int elsewhere = 0;
    EXPECT_EQ(lease->at(&elsewhere), &elsewhere);
    EXPECT_FALSE(Engine::lease_at(&elsewhere));
  }
  EXPECT_FALSE(Engine::lease_at(mapped.part(0)));
}

TEST_P(Engines, LeasesOutliveTheirEngine) {
  std::optional<Lease> lease;
  {
    Engine engine(file_, options(needs_.all));
    lease.emplace(engine.acquire(id(engine, 2)));
  }
  expect_right(*lease, 2);
}

TEST_P(Engines, PlainTensorsAndEmptyOnesAreUnitsToo) {
  Engine engine(file_, options(needs_.least));
  const TensorInfo& norm = *file_.find("norm");
  const Lease lease = engine.acquire(engine.find("norm").value());
  EXPECT_EQ(*static_cast<const float*>(lease.at(file_.bytes(norm).data())), 1.5f);
  EXPECT_STOWAGE_ERROR(engine.acquire(engine.find("positions").value()).weight(), invalid_argument,
                       "positions");
  engine.acquire(engine.find("empty").value());
  EXPECT_FALSE(engine.find("nothing"));
}

TEST_P(Engines, ShardsAreOneFile) {
  Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = 9, .shard_bytes = 60000}));
  ASSERT_GT(file.paths().size(), 2u);
  const Needs needs(file);
  Engine engine(file, options(needs.least));
  for (int pass = 0; pass < 2; ++pass)
    for (int i = 0; i < 9; ++i)
      EXPECT_TRUE(same_bytes(engine.acquire(id(engine, i)).weight(), file.weight(weight_name(i))));
}

TEST_P(Engines, BigWeightsComeInPieces) {
  Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = 5, .rows = 3000, .columns = 4096}));
  const Needs needs(file);
  Engine engine(file, options(needs.least, 3));
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(same_bytes(engine.acquire(id(engine, i)).weight(), file.weight(weight_name(i))));
}

TEST_P(Engines, RefusesABudgetBelowTheLargestWeight) {
  EXPECT_STOWAGE_ERROR(Engine(file_, options(needs_.least - 4096)), invalid_argument,
                       std::to_string(needs_.least));
  EXPECT_STOWAGE_ERROR(Engine(file_, options(needs_.least, -1)), invalid_argument, "workers");
  Engine engine(file_, options(needs_.least));
  EXPECT_STOWAGE_ERROR(engine.acquire(-1), invalid_argument, "-1");
  EXPECT_STOWAGE_ERROR(engine.acquire(engine.size()), invalid_argument, "id");
}

TEST(EngineReads, AutomaticMapsWhatThePageCacheHolds) {
  Scratch scratch;
  const File file = File::open(write_model(scratch));
  Engine engine(file, {.ram = 1 << 20});  // just written: cached
  EXPECT_EQ(engine.report().reads, Reads::mapped);
}

// mincore() says to who may only read a file that all of it is in memory.
// Of a file of ours.
std::ptrdiff_t pages_cached(int descriptor) {
  struct stat status {};
  ::fstat(descriptor, &status);
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  std::vector<unsigned char> there((size + 4095) / 4096);
  EXPECT_EQ(::mincore(map, size, there.data()), 0);
  ::munmap(map, size);
  return std::ranges::count_if(there, [](unsigned char page) { return (page & 1u) != 0; });
}

TEST(EngineReads, AutomaticKnowsWhatIsCachedWithoutTheRightToWrite) {
  if (::geteuid() != 0) GTEST_SKIP() << "only the superuser can become another user";
  Scratch scratch;
  const std::string folder = write_model(scratch, {.weights = 12, .rows = 512, .columns = 4096});
  const std::string path = scratch.path("model.safetensors");
  ::chmod(folder.c_str(), 0755);
  ::chmod(path.c_str(), 0644);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fdatasync(descriptor);
  const auto all = pages_cached(descriptor);
  const auto reads_as = [&](uid_t user) {
    return in_child([&] {
      // From inside: the folder of temporary files may be closed to others.
      if (::chdir(folder.c_str()) != 0 || ::setuid(user) != 0) return false;
      const Engine engine(File::open("model.safetensors"), {.ram = 1 << 24, .workers = 0});
      ::_exit(16 + static_cast<int>(engine.report().reads));
    });
  };
  const auto gave = [](Reads reads) {
    return "the child gave " + std::to_string(16 + static_cast<int>(reads));
  };
  for (const uid_t user : {0u, 65534u}) {
    // Who opens it reads its header, and the kernel as much after it as it likes: where that was
    // nearly all, either answer is right.
    int asked = 0;
    for (int again = 0; again < 40 && asked < 3; ++again) {
      ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
      const std::string answer = reads_as(user);
      if (pages_cached(descriptor) > all / 2) continue;
      EXPECT_EQ(answer, gave(Reads::direct)) << user;
      ++asked;
    }
    EXPECT_EQ(asked, 3) << user;
    std::ifstream(path, std::ios::binary).ignore(std::numeric_limits<std::streamsize>::max());
    EXPECT_EQ(reads_as(user), gave(Reads::mapped)) << user;
  }
  ::close(descriptor);
}

}  // namespace
}  // namespace stowage

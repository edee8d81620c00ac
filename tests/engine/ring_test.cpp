// SPDX-License-Identifier: Apache-2.0
// Once warm, an engine takes no memory and touches no new page, whatever it reads and evicts.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "allocations.h"
#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;

long faults() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);  // all threads: the readers too
  return used.ru_minflt + used.ru_majflt;
}

class Ring : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_, {.weights = 24, .rows = 256, .columns = 1024}));
  Needs needs_{file_};

  static void pass(Engine& engine) {
    for (WeightId id = 0; id < engine.size(); ++id) {
      const Lease lease = engine.acquire(id);
      (void)lease.at(nullptr);
    }
  }
  void expect_none(std::uint64_t ram, bool lock = false) const {
    Engine engine(file_, {.ram = ram, .reads = GetParam(), .workers = 2, .lock = lock});
    for (int warm = 0; warm < 2; ++warm) pass(engine);
    const EngineReport before = engine.report();
    // A reader's thread may first get to work late, on a busy machine: one round without any.
    std::uint64_t taken = 1;
    long touched = 1;
    for (int round = 0; round < 10 && (taken != 0 || touched != 0); ++round) {
      const std::uint64_t taken_before = allocations();
      const long touched_before = faults();
      for (int i = 0; i < 3; ++i) pass(engine);
      taken = allocations() - taken_before;
      touched = faults() - touched_before;
    }
    if (!kCountsAllocations) return;
    EXPECT_EQ(touched, 0);
    EXPECT_EQ(taken, 0u);
    EXPECT_EQ(engine.report().bytes_read > before.bytes_read, ram < needs_.all);
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Ring, testing::Values(Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Ring, StreamsWithoutAllocationsOrPageFaults) { expect_none(needs_.all / 3); }
TEST_P(Ring, LeasesWhatIsThereWithoutAllocationsOrPageFaults) { expect_none(needs_.all); }
TEST_P(Ring, LockedMemoryIsTheSame) { expect_none(needs_.all / 3, true); }

TEST_P(Ring, HasTouchedItsMemoryBeforeTheFirstUse) {
  Engine engine(file_, {.ram = needs_.all, .reads = GetParam(), .workers = 0});
  pass(engine);  // its session, and what of the program a first pass touches
  Engine other(file_, {.ram = needs_.all, .reads = GetParam(), .workers = 0});
  const long before = faults();
  pass(other);
  const long pages = static_cast<long>(needs_.all / 4096);
  if (kCountsAllocations) {
    EXPECT_LT(faults() - before, pages / 50);
  }
}

// In a child without the privilege that lifts the limit.
TEST_P(Ring, SaysHowMuchMayBeLocked) {
  if (::geteuid() != 0) GTEST_SKIP() << "cannot drop privileges";
  if (!kCountsAllocations) GTEST_SKIP() << "sanitizers let every mlock succeed";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit low{4096, 4096};
    if (::setrlimit(RLIMIT_MEMLOCK, &low) != 0 || ::setuid(65534) != 0) ::_exit(2);
    try {
      const Engine engine(file_,
                          {.ram = needs_.all, .reads = GetParam(), .workers = 0, .lock = true});
    } catch (const Error& error) {
      const std::string what = error.what();
      const bool named = what.find("ulimit -l), got 4096") != std::string::npos;
      ::_exit(error.code() == Code::out_of_memory && named ? 0 : 3);
    }
    ::_exit(4);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(RingLock, IsNotForMappedReads) {
  Scratch scratch;
  const File file = File::open(write_model(scratch));
  EXPECT_STOWAGE_ERROR(Engine(file, {.ram = 1 << 24, .reads = Reads::mapped, .lock = true}),
                       invalid_argument, "mapped with lock");
  const Engine engine(file, {.ram = 1 << 24, .lock = true});
  EXPECT_EQ(engine.report().reads, Reads::buffered);
}

}  // namespace
}  // namespace stowage

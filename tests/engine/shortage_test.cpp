// SPDX-License-Identifier: Apache-2.0
// Over an engine's whole life, whatever it asks of the system is refused once, in turn: memory, a
// thread, a mapping, a read. It says so or does without, and is as good as before; nothing is left
// behind, and the caller's signals are as they were.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "allocations.h"
#include "base/threads.h"
#include "engine/model.h"

namespace stowage {
namespace {
using namespace test;

constexpr int kScarceWeights = 5, kScarceReaders = 3;

long entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder),
                       std::filesystem::directory_iterator());
}

std::string blocked_signals() {
  sigset_t set;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &set);
  std::string text;
  for (int number = 1; number < SIGRTMAX; ++number)
    text += sigismember(&set, number) == 1 ? '1' : '0';
  return text;
}

// Runs `step`, and where a shortage refused it again: that must do. Returns whether it did at all.
template <class Step>
bool again_if_refused(Step step) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      step();
      return true;
    } catch (const Error&) {
    } catch (const std::bad_alloc&) {
    }
  }
  return false;
}

class Shortages : public testing::TestWithParam<Reads> {
 protected:
  void SetUp() override {
    if (!kCountsAllocations) GTEST_SKIP() << "sanitizers have a heap and threads of their own";
  }
  // Every door once; false where one stays shut, or gives other bytes.
  bool live() {
    std::unique_ptr<Engine> engine;
    bool good = again_if_refused([&] {
      engine = std::make_unique<Engine>(
          file_, EngineOptions{.ram = 2 * least_, .reads = GetParam(), .workers = kScarceReaders});
    });
    if (!good) return false;
    good &= again_if_refused([&] { engine->expect(ids_); });
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t i = 0; i < ids_.size(); ++i) {
        bool same = false;
        good &= again_if_refused([&] {
          const Lease lease = engine->acquire(ids_[i]);
          const Lease beside = engine->acquire(ids_[(i + 2) % ids_.size()]);
          same = same_bytes(lease.weight(), weights_[i]) &&
                 same_bytes(beside.weight(), weights_[(i + 2) % ids_.size()]);
        });
        good &= same;
      }
    }
    good &= again_if_refused([&] { (void)Engine::lease_at(weights_[0].part(0)); });
    good &= again_if_refused([&] { engine->set_signature(3); });
    engine->cancel();
    good &= again_if_refused([&] { (void)engine->acquire(ids_[1]); });
    return good && engine->report().held <= 2 * least_;
  }

  Scratch scratch_;
  File file_ = File::open(write_model(scratch_, {.weights = kScarceWeights}));
  std::uint64_t least_ = Needs(file_).least;
  std::vector<WeightId> ids_;
  std::vector<Weight> weights_;
};
INSTANTIATE_TEST_SUITE_P(Reads, Shortages,
                         testing::Values(Reads::automatic, Reads::mapped, Reads::buffered,
                                         Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Shortages, OfEachRequestInTurn) {
  {
    const Engine engine(file_, {.ram = 1 << 24, .workers = 0});
    for (int i = 0; i < kScarceWeights; ++i) {
      ids_.push_back(engine.find(weight_name(i)).value());
      weights_.push_back(file_.weight(weight_name(i)));
    }
  }
  ASSERT_TRUE(live());  // what a process makes once
  const std::string signals = blocked_signals();
  const long descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  std::set<std::string> refused;
  std::int64_t held_before = held();
  int quiet = 0;
  std::int64_t nth = 0;
  for (; quiet < 3; ++nth) {
    std::string failed;
    bool good = false;
    {
      const Shortage shortage(nth);
      good = live();
      failed = Shortage::failed();
    }
    EXPECT_TRUE(good) << nth << ": " << failed;
    EXPECT_EQ(blocked_signals(), signals) << nth << ": " << failed;
    EXPECT_EQ(entries("/proc/self/fd"), descriptors) << nth << ": " << failed;
    refused.insert(failed);
    quiet = failed.empty() ? quiet + 1 : 0;  // readers ask at times of their own
  }
  EXPECT_EQ(entries("/proc/self/task"), threads);
  // The names in the set, and what readers that come and go leave to the next ones; a leak on one
  // path would be of every round that takes it.
  EXPECT_LT(held() - held_before, nth / 8) << nth << " rounds";
  EXPECT_TRUE(refused.contains("malloc") && refused.contains("pthread_create") &&
              refused.contains("madvise") && refused.contains("fstat"));
  EXPECT_EQ(refused.contains("preadv"), GetParam() >= Reads::buffered);
}

class OtherShortages : public Shortages {};
INSTANTIATE_TEST_SUITE_P(Reads, OtherShortages, testing::Values(Reads::buffered),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(OtherShortages, APoolWorksWithTheThreadsThatItGets) {
  const std::string signals = blocked_signals();
  bool failed = true;
  for (std::int64_t nth = 0; failed; ++nth) {
    std::atomic<int> calls = 0;
    bool worked = false;
    {
      const Shortage shortage(nth);
      worked = again_if_refused([&] {
        calls = 0;
        make_pool(4)->for_each(32, [&](std::int64_t) { ++calls; });
      });
      failed = !Shortage::failed().empty();
    }
    EXPECT_TRUE(worked) << nth << ": " << Shortage::failed();
    EXPECT_EQ(calls, 32) << nth << ": " << Shortage::failed();
    EXPECT_EQ(blocked_signals(), signals) << nth << ": " << Shortage::failed();
  }
}

}  // namespace
}  // namespace stowage

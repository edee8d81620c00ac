// SPDX-License-Identifier: Apache-2.0
#include "base/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/env.h"
#include "forked.h"
#include "stowage/error.h"
#include "stowage/info.h"

namespace stowage {
namespace {

class Pools : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, Pools, testing::Values(1, 2, 3, 8));

TEST_P(Pools, CallsEachIndexOnce) {
  const auto pool = make_pool(GetParam());
  EXPECT_EQ(pool->threads(), GetParam());
  for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
    pool->for_each(count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
    for (const auto& n : calls) EXPECT_EQ(n, 1);
  }
}

TEST_P(Pools, SeesTheResultsOfEveryRunAcrossThousandsOfShortOnes) {
  const auto pool = make_pool(GetParam());
  std::vector<int> sums(16);
  for (int round = 0; round < 3000; ++round)
    pool->for_each(16, [&](std::int64_t i) { ++sums[static_cast<std::size_t>(i)]; });
  EXPECT_EQ(sums, std::vector<int>(16, 3000));
}

TEST_P(Pools, RethrowsTheFirstExceptionAndStaysUsable) {
  const auto pool = make_pool(GetParam());
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool->for_each(100,
                                [](std::int64_t i) {
                                  if (i % 10 == 3) throw std::out_of_range("three");
                                }),
                 std::out_of_range);
  }
  std::atomic<int> calls = 0;
  pool->for_each(10, [&](std::int64_t) { ++calls; });
  EXPECT_EQ(calls, 10);
}

TEST_P(Pools, NestedRunsFinish) {
  const auto pool = make_pool(GetParam());
  std::atomic<int> calls = 0;
  pool->for_each(8, [&](std::int64_t) {
    pool->for_each(8, [&](std::int64_t) { pool->for_each(2, [&](std::int64_t) { ++calls; }); });
  });
  EXPECT_EQ(calls, 128);
}

TEST_P(Pools, ServesSeveralCallersAtOnce) {
  const auto pool = make_pool(GetParam());
  std::atomic<int> calls = 0;
  {
    std::vector<std::jthread> callers;
    for (int c = 0; c < 6; ++c)
      callers.emplace_back([&] {
        for (int round = 0; round < 200; ++round) pool->for_each(5, [&](std::int64_t) { ++calls; });
      });
  }
  EXPECT_EQ(calls, 6 * 200 * 5);
}

TEST(Pool, UsesSeveralThreads) {
  const auto pool = make_pool(2);
  // Each of two tasks waits for the other: one thread alone would never finish.
  std::atomic<int> arrived = 0;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  pool->for_each(2, [&](std::int64_t) {
    ++arrived;
    while (arrived < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
  EXPECT_LT(std::chrono::steady_clock::now(), limit);
}

TEST(Pool, DefaultExecutorWorksInAForkedChild) {
  if (!test::kForksBesideThreads) GTEST_SKIP() << test::kNoForks;
  std::atomic<int> calls = 0;
  default_executor().for_each(64, [&](std::int64_t) { ++calls; });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int> own = 0;
    for (int round = 0; round < 20; ++round)
      default_executor().for_each(64, [&](std::int64_t) { ++own; });
    _exit(own == 20 * 64 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Pool, OfAParentWorksAndEndsInAForkedChild) {
  if (!test::kForksBesideThreads) GTEST_SKIP() << test::kNoForks;
  auto pool = make_pool(4);
  const auto sum = [&] {
    std::atomic<int> calls = 0;
    pool->for_each(64, [&](std::int64_t) { ++calls; });
    return calls.load();
  };
  const auto end_first = [&] { return pool.reset(), true; };
  const auto use_and_end = [&] { return sum() == 64 && sum() == 64 && end_first(); };
  for (const test::End end : {test::End::at_once, test::End::by_exit}) {
    EXPECT_EQ(test::in_child(use_and_end, end), "") << "not used yet";
    EXPECT_EQ(sum(), 64);
    EXPECT_EQ(test::in_child(use_and_end, end), "");
    EXPECT_EQ(test::in_child(end_first, end), "");
    EXPECT_EQ(test::in_child([&] { return sum() == 64 && test::in_child(use_and_end) == ""; }), "");
  }
  std::atomic<bool> over = false;
  std::jthread busy([&] {
    while (!over) sum();
  });
  for (int round = 0; round < 50; ++round) EXPECT_EQ(test::in_child(use_and_end), "");
  over = true;
}

TEST(Pool, ATaskThatForksIsAnErrorInTheChild) {
  if (!test::kForksBesideThreads) GTEST_SKIP() << test::kNoForks;
  const auto pool = make_pool(4);
  const std::thread::id caller = std::this_thread::get_id();
  pid_t child = -1;
  const auto fork_once = [&](std::int64_t) {
    if (std::this_thread::get_id() == caller && child < 0) child = ::fork();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for the others to join
  };
  try {
    pool->for_each(64, fork_once);
  } catch (const Error& error) {
    const bool named = std::string_view(error.what()).find("must not fork") != std::string::npos;
    ::_exit(child == 0 && named ? 0 : 1);
  }
  if (child == 0) ::_exit(2);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Pool, DefaultHasTheThreadsOfTheProcess) {
  EXPECT_EQ(thread_count(), default_executor().threads());
  EXPECT_EQ(thread_count(), env::threads() != 0 ? env::threads() : available_cpus());
}

TEST(InlineExecutor, RunsInOrderOnTheCallingThread) {
  std::vector<std::int64_t> seen;
  std::set<std::thread::id> ids;
  inline_executor().for_each(5, [&](std::int64_t i) {
    seen.push_back(i);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(ids, std::set{std::this_thread::get_id()});
  EXPECT_EQ(inline_executor().threads(), 1);
}

}  // namespace
}  // namespace stowage

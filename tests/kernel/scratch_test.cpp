// SPDX-License-Identifier: Apache-2.0
#include "kernel/scratch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "expect_error.h"

namespace stowage::scratch_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(Scratch, IsPageAlignedWritableAndCounted) {
  const std::size_t before = scratch_use(true).live;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, 3 * kMiB}) {
    void* memory = take_scratch(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 4096, 0u);
    std::memset(memory, 1, bytes);
    EXPECT_GE(scratch_use().live, before + bytes);
    give_scratch(memory);
    EXPECT_EQ(scratch_use().live, before);
    EXPECT_GE(scratch_use().peak, before + bytes);
  }
  EXPECT_EQ(scratch_use(true).live, before);
  EXPECT_EQ(scratch_use().peak, before);
}

TEST(Scratch, IsUsedAgain) {
  void* first = take_scratch(kMiB);
  give_scratch(first);
  void* second = take_scratch(kMiB - 5000);
  EXPECT_EQ(second, first);
  void* third = take_scratch(kMiB);
  EXPECT_NE(third, second);
  give_scratch(second);
  give_scratch(third);
}

TEST(Scratch, KeepsABoundedAmount) {
  std::vector<void*> taken;
  for (int i = 0; i < 40; ++i) taken.push_back(take_scratch(4 * kMiB));
  for (void* memory : taken) give_scratch(memory);
  EXPECT_LE(scratch_use().idle, 64 * kMiB);
  const std::size_t idle = scratch_use().idle;
  EXPECT_GT(idle, 32 * kMiB);
  give_scratch(take_scratch(200 * kMiB));
  EXPECT_EQ(scratch_use().idle, idle);
}

TEST(Scratch, RefusesWhatTheSystemDoesNotHave) {
  const ScratchUse before = scratch_use();
  EXPECT_STOWAGE_ERROR(take_scratch(std::numeric_limits<std::size_t>::max()), out_of_memory,
                       "take_scratch: ");
  EXPECT_STOWAGE_ERROR(take_scratch(std::numeric_limits<std::size_t>::max() / 2), out_of_memory,
                       "take_scratch: ");
  EXPECT_EQ(scratch_use().live, before.live);
}

TEST(Scratch, IgnoresNullAndTakesBackFromAnyThread) {
  give_scratch(nullptr);
  const std::size_t before = scratch_use().live;
  void* memory = take_scratch(100);
  std::thread([&] { give_scratch(memory); }).join();
  EXPECT_EQ(scratch_use().live, before);
}

TEST(Scratch, ServesManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < 500; ++i) {
        const Scratch scratch(static_cast<std::size_t>(1 + i * 37));
        scratch.floats()[0] = static_cast<float>(t);
        EXPECT_EQ(scratch.floats()[0], static_cast<float>(t));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Scratch, WorksInAForkedChild) {
  give_scratch(take_scratch(kMiB));
  const pid_t child = fork();
  if (child == 0) {
    give_scratch(take_scratch(kMiB));
    _exit(0);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stowage::scratch_test

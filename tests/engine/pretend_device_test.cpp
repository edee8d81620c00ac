// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "expect_error.h"
#include "stowage/device.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

Bytes pattern(std::size_t bytes, int seed) {
  Bytes made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(i * 31 + i / 256 + seed);
  return made;
}

TEST(PretendDevice, CopiesInTheOrderAsked) {
  PretendDevice device({.memory = 1 << 20});
  const Bytes first = pattern(100000, 1), second = pattern(100000, 2);
  void* const to = device.allocate(first.size());
  device.copy_in(to, first.data(), first.size(), {});
  const Device::Event event = device.copy_in(to, second.data(), second.size(), {});
  device.wait(event);
  EXPECT_TRUE(device.done(event));
  EXPECT_EQ(std::memcmp(to, second.data(), second.size()), 0);
  EXPECT_EQ(device.copied(), 200000u);
  device.free(to);
  EXPECT_EQ(device.allocated(), 0u);
}

TEST(PretendDevice, NewMemoryIsPoison) {
  PretendDevice device({.memory = 1 << 20});
  const auto* const memory = static_cast<const std::uint8_t*>(device.allocate(5000));
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(memory[i], PretendDevice::kPoison);
}

TEST(PretendDevice, ItsMemoryHasAnEnd) {
  PretendDevice device({.memory = 8192});
  void* const memory = device.allocate(8000);
  EXPECT_STOWAGE_ERROR(device.allocate(193), out_of_memory, "193 bytes must be free, got 192");
  device.free(memory);
  device.free(device.allocate(8192));
}

TEST(PretendDevice, ALinkHasItsRate) {
  PretendDevice device({.memory = 1 << 22, .bytes_per_second = 1e6});
  const Bytes from = pattern(300000, 3);
  void* const to = device.allocate(from.size());
  const Clock::time_point begun = Clock::now();
  const Device::Event event = device.copy_in(to, from.data(), from.size(), {});
  device.wait(event);
  EXPECT_GE(seconds_since(begun), 0.3 * 0.999);
}

// A stream that waits for a copy sees its bytes. One that does not would see poison, and the thread
// sanitizer a race.
TEST(PretendDevice, StreamsWaitForEvents) {
  PretendDevice device({.memory = 1 << 20, .bytes_per_second = 4e6});
  const Bytes from = pattern(200000, 4);
  auto* const to = static_cast<std::byte*>(device.allocate(from.size()));
  const Device::Stream ordered = device.make_stream();
  std::byte seen{};
  const std::size_t last = from.size() - 1;
  const Device::Event copied = device.copy_in(to, from.data(), from.size(), {});
  device.wait_on(ordered, copied);
  device.wait(device.launch(ordered, [&] { seen = to[last]; }));
  EXPECT_EQ(seen, from[last]);
  EXPECT_TRUE(device.done(copied));
}

// What the engine relies on when it gives memory to the next weight: the copy does not begin while
// work that reads the last one is under way.
TEST(PretendDevice, CopiesWaitForWork) {
  PretendDevice device({.memory = 1 << 20});
  const Bytes first = pattern(4096, 5), second = pattern(4096, 6);
  auto* const to = static_cast<std::byte*>(device.allocate(4096));
  device.wait(device.copy_in(to, first.data(), 4096, {}));
  std::atomic<bool> release = false;
  Bytes seen(4096);
  device.launch(nullptr, [&] {
    release.wait(false);
    std::memcpy(seen.data(), to, 4096);
  });
  const Device::Event used = device.record(nullptr);
  const Device::Event copied = device.copy_in(to, second.data(), 4096, std::span(&used, 1));
  EXPECT_FALSE(device.done(copied));
  release = true;
  release.notify_all();
  device.wait(copied);
  EXPECT_EQ(seen, first);
  EXPECT_EQ(std::memcmp(to, second.data(), 4096), 0);
}

TEST(PretendDevice, FailuresComeOutOfWait) {
  PretendDevice device({.memory = 1 << 20});
  const Bytes from = pattern(4096, 7);
  void* const to = device.allocate(4096);
  device.fail_copies(1);
  const Device::Event failed = device.copy_in(to, from.data(), 4096, {});
  EXPECT_STOWAGE_ERROR(device.wait(failed), cuda, "a copy failed, as was asked for");
  device.wait(device.copy_in(to, from.data(), 4096, {}));
  EXPECT_EQ(std::memcmp(to, from.data(), 4096), 0);
  const Device::Event thrown = device.launch(nullptr, [] { throw std::runtime_error("kernel"); });
  EXPECT_THROW(device.wait(thrown), std::runtime_error);
}

TEST(PretendDevice, ItsEndFinishesWhatWasAsked) {
  std::atomic<int> runs = 0;
  {
    PretendDevice device({.memory = 1 << 20});
    const Device::Stream other = device.make_stream();
    for (int i = 0; i < 50; ++i) device.launch(i % 2 != 0 ? other : nullptr, [&] { ++runs; });
    device.allocate(100);
  }
  EXPECT_EQ(runs, 50);
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// A device that pretends: its kernels run late, its copies take time, its free memory is poison.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "engine/model.h"
#include "expect_error.h"
#include "stowage/device_engine.h"

namespace stowage {
namespace {
using namespace test;

struct OnDevice : testing::Test {
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_, {.weights = 8, .rows = 48, .columns = 128}));
  Needs needs_{file_};
  std::shared_ptr<Engine> host_ =
      std::make_shared<Engine>(file_, EngineOptions{.ram = needs_.all, .reads = Reads::buffered});
  std::atomic<int> wrong_ = 0;

  std::shared_ptr<PretendDevice> device(double bytes_per_second = 0) const {
    return std::make_shared<PretendDevice>(
        PretendOptions{.memory = needs_.all, .bytes_per_second = bytes_per_second});
  }
  WeightId id(int i) const { return host_->find(weight_name(i)).value(); }
  /// A kernel that looks at every byte of the weight, when its turn comes.
  void use(DeviceEngine& engine, PretendDevice& device, int i, Device::Stream stream = nullptr,
           std::chrono::microseconds work = {}) {
    const DeviceLease lease = engine.acquire(id(i), stream);
    device.launch(stream, [this, i, work, weight = lease.weight()] {
      std::this_thread::sleep_for(work);
      if (!same_bytes(weight, file_.weight(weight_name(i)))) ++wrong_;
    });
  }
};

TEST_F(OnDevice, KernelsSeeTheBytesOfTheFile) {
  for (const std::uint64_t memory : {needs_.least, needs_.all / 2, needs_.all}) {
    for (const int workers : {0, 1, 3}) {
      const auto device = this->device();
      {
        DeviceEngine engine(host_, device, {.memory = memory, .workers = workers});
        for (int pass = 0; pass < 4; ++pass)
          for (int i = 0; i < 8; ++i)
            use(engine, *device, i, nullptr, std::chrono::microseconds(100));
        EXPECT_LE(device->allocated(), memory);
        EXPECT_LE(engine.report().peak, memory);
      }
      EXPECT_EQ(device->allocated(), 0u);
    }
  }
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, WhatFitsIsCopiedOnce) {
  const auto device = this->device();
  DeviceEngine engine(host_, device, {.memory = needs_.all});
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < 8; ++i) use(engine, *device, i);
  device->wait(device->record(nullptr));
  std::uint64_t parts = 0;
  for (int i = 0; i < 8; ++i) {
    const Weight& weight = file_.weight(weight_name(i));
    const Layout made = layout(weight.storage(), weight.shape());
    for (int p = 0; p < made.count; ++p)
      parts += static_cast<std::uint64_t>(made.parts[static_cast<std::size_t>(p)].bytes);
  }
  EXPECT_GE(device->copied(), parts);  // of resting bytes alone, and what was expected beside them
  EXPECT_LE(device->copied(), needs_.all);
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, TheHostsMemoryIsPinnedWhileItIsUsed) {
  const auto device = this->device();
  {
    const DeviceEngine engine(host_, device, {.memory = needs_.least});
    EXPECT_EQ(device->pinned(), needs_.all);
    { const DeviceEngine second(host_, device, {.memory = needs_.least}); }
    EXPECT_EQ(device->pinned(), needs_.all);  // the first has it
  }
  EXPECT_EQ(device->pinned(), 0u);
  const auto mapped =
      std::make_shared<Engine>(file_, EngineOptions{.ram = needs_.all, .reads = Reads::mapped});
  DeviceEngine engine(mapped, device, {.memory = needs_.least});
  EXPECT_EQ(device->pinned(), 0u);  // the page cache is not ours to pin
  for (int i = 0; i < 8; ++i) use(engine, *device, i);
  device->wait(device->record(nullptr));
  EXPECT_EQ(wrong_, 0);
}

// The memory of a weight is written again only when the work that reads it is done, even where that
// work has not begun when its lease ends.
TEST_F(OnDevice, CopiesWaitForTheWorkBefore) {
  const auto device = this->device();
  DeviceEngine engine(host_, device, {.memory = needs_.least, .workers = 0});
  std::atomic<bool> go = false;
  device->launch(nullptr, [&] { go.wait(false); });
  use(engine, *device, 0);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    go = true;
    go.notify_all();
  });
  use(engine, *device, 1);  // takes the room of the first
  opener.join();
  device->wait(device->record(nullptr));
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, SeveralStreams) {
  const auto device = this->device(1e9);
  DeviceEngine engine(host_, device, {.memory = 2 * needs_.least});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      const Device::Stream stream = device->make_stream();
      for (int n = 0; n < 40; ++n)
        use(engine, *device, (n * (t + 1)) % 8, stream, std::chrono::microseconds(50 * t));
      device->wait(device->record(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, AFailedCopyIsToldAndTheNextIsRight) {
  const auto device = this->device();
  DeviceEngine engine(host_, device, {.memory = needs_.least, .workers = 0});
  device->fail_copies(1);
  EXPECT_STOWAGE_ERROR((void)engine.acquire(id(3)), cuda, "a copy failed");
  use(engine, *device, 3);
  device->wait(device->record(nullptr));
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, NothingStandsInForItsMemory) {
  EXPECT_STOWAGE_ERROR(DeviceEngine(host_, device(), {.memory = 100}), invalid_argument,
                       "the budget must hold the largest weight");
  const auto small = std::make_shared<PretendDevice>(PretendOptions{.memory = 4096});
  EXPECT_STOWAGE_ERROR(DeviceEngine(host_, small, {.memory = needs_.all}), out_of_memory,
                       "pretend device");
  const DeviceEngine any(host_, device(), {.memory = needs_.all, .workers = 0});
  WeightId most = 0;
  for (WeightId i = 0; i < host_->size(); ++i)
    if (any.bytes(i) > any.bytes(most)) most = i;
  DeviceEngine engine(host_, device(), {.memory = any.bytes(most), .workers = 0});
  const DeviceLease first = engine.acquire(most);
  EXPECT_STOWAGE_ERROR((void)engine.acquire(id(0)), out_of_memory,
                       "must hold what one thread uses at a time");
}

TEST_F(OnDevice, ItsEndDuringACopy) {
  const auto device = this->device(2e6);
  {
    DeviceEngine engine(host_, device, {.memory = needs_.all, .workers = 2});
    use(engine, *device, 0);  // more is being copied ahead
  }
  EXPECT_EQ(device->allocated(), 0u);
  EXPECT_EQ(wrong_, 0);
}

TEST_F(OnDevice, RandomSchedules) {
  const char* const wanted = std::getenv("STOWAGE_SCHEDULES");  // `make test-all` sets 1000
  const int count = wanted != nullptr ? std::atoi(wanted) : 40;
  for (int schedule = 0; schedule < count; ++schedule) {
    std::mt19937_64 random(static_cast<std::uint64_t>(schedule));
    const auto device = this->device(random() % 2 != 0 ? 2e9 : 0);
    DeviceEngine engine(host_, device,
                        {.memory = needs_.least + random() % (needs_.all - needs_.least),
                         .workers = int(random() % 3)});
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 1 + random() % 3; ++t) {
      threads.emplace_back([&, seed = random()] {
        std::mt19937_64 own(seed);
        const Device::Stream stream = device->make_stream();
        for (int n = 0; n < 30; ++n)
          use(engine, *device, own() % 5 == 0 ? static_cast<int>(own() % 8) : n % 8, stream,
              std::chrono::microseconds(own() % 60));
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(wrong_, 0) << "schedule " << schedule;
    ASSERT_LE(engine.report().peak, needs_.all);
  }
  EXPECT_EQ(wrong_, 0);
}

// While the work of one stream stands still, the next weight is copied and used by another.
TEST_F(OnDevice, CopiesRunBesideTheWork) {
  const auto device = this->device();
  DeviceEngine engine(host_, device, {.memory = 3 * needs_.least});
  const Device::Stream other = device->make_stream();
  for (int i = 0; i < 7; ++i) {
    std::atomic<bool> go = false;
    {
      const DeviceLease lease = engine.acquire(id(i));
      device->launch(nullptr, [&] { go.wait(false); });
    }
    use(engine, *device, i + 1, other);
    device->wait(device->record(other));
    go = true;
    go.notify_all();
    device->wait(device->record(nullptr));
  }
  EXPECT_EQ(wrong_, 0);
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Stores that do not answer: who waits is told in time, what is being read keeps its memory until
// it has come, and an engine that ends waits for that.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "engine/faulty_reader.h"
#include "engine/model.h"
#include "engine/registry.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;
using namespace std::chrono_literals;

constexpr int kLargest = 2;

struct SlowStore : testing::Test {
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_));
  Needs needs_{file_};
  FaultyReader reader_;

  EngineOptions options(double timeout, int workers) const {
    return {.ram = needs_.least, .reads = Reads::direct, .workers = workers, .timeout = timeout};
  }
  static WeightId id(const OverReader& engine, int i) {
    const auto& units = engine->units();
    const auto found = std::ranges::find(units, weight_name(i), &engine::Unit::name);
    return static_cast<WeightId>(found - units.begin());
  }
  bool is_right(const OverReader& engine, int i) const {
    return same_bytes(engine->acquire(id(engine, i)).weight(), file_.weight(weight_name(i)));
  }
};

TEST_F(SlowStore, ATimeoutSaysWhatCameAndHowFast) {
  const OverReader engine(file_, options(0.05, 1), reader_);
  reader_.close_gate();
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, kLargest)), io, weight_name(kLargest) + " of ");
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 50ms);
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, kLargest)), io,
                       "timeout of 0.05 s, got 0 of them");
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, kLargest)), io, "MB/s");
  EXPECT_GT(engine->report().held, 0u);  // the read may still write there
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, 1)), io, "no room");
  reader_.open_gate();
  for (;;) try {
      EXPECT_TRUE(is_right(engine, kLargest));
      break;
    } catch (const Error&) {  // a busy machine
    }
  EXPECT_TRUE(is_right(engine, 1));
}

TEST_F(SlowStore, ATimeoutThatIsNotReachedChangesNothing) {
  const OverReader engine(file_, options(60, 2), reader_);
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(is_right(engine, i));
  EXPECT_STOWAGE_ERROR(OverReader(file_, options(1, 0), reader_), invalid_argument, "timeout");
  EXPECT_STOWAGE_ERROR(OverReader(file_, options(-1, 1), reader_), invalid_argument, "timeout");
}

TEST_F(SlowStore, ACancelEndsThoseWhoWait) {
  for (const int workers : {1, 4}) {
    const OverReader engine(file_, options(60, workers), reader_);
    reader_.close_gate();
    auto bytes = std::async(std::launch::async, [&] { engine->acquire(id(engine, 0)); });
    while (engine->report().misses < 1) std::this_thread::yield();
    auto room = std::async(std::launch::async, [&] { engine->acquire(id(engine, 5)); });
    while (engine->report().misses < 2) std::this_thread::yield();
    engine->cancel();
    EXPECT_STOWAGE_ERROR(bytes.get(), io, "cancel");
    EXPECT_STOWAGE_ERROR(room.get(), io, "cancel");
    reader_.open_gate();
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(is_right(engine, i));
  }
}

// A thread in a read of its own gets the cancel when that returns.
TEST_F(SlowStore, ACancelReachesWhoeverReadsForHimself) {
  Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = 1, .rows = 3000, .columns = 4096}));
  const OverReader engine(file, {.ram = Needs(file).all, .reads = Reads::buffered, .workers = 0},
                          reader_);
  reader_.close_gate();
  auto thread = std::async(std::launch::async, [&] { engine->acquire(id(engine, 0)); });
  while (reader_.reads < 1) std::this_thread::yield();
  engine->cancel();
  reader_.open_gate();
  EXPECT_STOWAGE_ERROR(thread.get(), io, "cancel");
  EXPECT_EQ(reader_.reads, 1);
  EXPECT_TRUE(same_bytes(engine->acquire(id(engine, 0)).weight(), file.weight(weight_name(0))));
}

// Nobody begins a read for a thread that was cancelled: without readers none would end it, and its
// room would be lost to those who wait for room.
TEST_F(SlowStore, ACancelLeavesNoReadThatNobodyDoes) {
  Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = 2, .rows = 3000, .columns = 4096}));
  const OverReader engine(file, {.ram = Needs(file).least, .reads = Reads::buffered, .workers = 0},
                          reader_);
  reader_.close_gate();
  auto thread = std::async(std::launch::async, [&] { engine->acquire(id(engine, 0)); });
  while (reader_.reads < 1) std::this_thread::yield();
  engine->cancel();
  reader_.open_gate();
  EXPECT_STOWAGE_ERROR(thread.get(), io, "cancel");
  EXPECT_EQ(engine->report().held, 0u);
  EXPECT_TRUE(same_bytes(engine->acquire(id(engine, 1)).weight(), file.weight(weight_name(1))));
}

// Of two that wait for room for one unit, one gives up when the other has read it.
TEST_F(SlowStore, WhoGivesUpLeavesNothingThatCannotGo) {
  for (int round = 0; round < 200; ++round) {
    const OverReader engine(file_, options(20, 1), reader_);
    const auto wants = [&] {
      try {
        engine->acquire(id(engine, 0));
      } catch (const Error&) {  // cancelled
      }
    };
    std::vector<std::future<void>> threads;
    {
      const auto lease = engine->acquire(id(engine, kLargest));
      threads.push_back(std::async(std::launch::async, wants));
      while (engine->report().misses < 2) std::this_thread::yield();
      engine->cancel();
    }
    for (int i = 0; i < 3; ++i) threads.push_back(std::async(std::launch::async, wants));
    for (auto& thread : threads) thread.get();
    ASSERT_TRUE(is_right(engine, kLargest)) << round;
  }
}

TEST_F(SlowStore, AnEngineThatEndsWaitsForItsReadersAndTellsThoseWhoWait) {
  const OverReader engine(file_, options(60, 2), reader_);
  reader_.close_gate();
  auto waiter = std::async(std::launch::async, [&] { engine->acquire(id(engine, 0)); });
  while (reader_.reads == 0) std::this_thread::yield();
  std::atomic<bool> opened = false;
  const auto opens = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(20ms);
    opened = true;
    reader_.open_gate();
  });
  engine->stop();
  EXPECT_TRUE(opened);
  EXPECT_STOWAGE_ERROR(waiter.get(), io, "cancel");
  EXPECT_TRUE(is_right(engine, 3));  // whoever still has it reads for himself
}

// As one does that gets another budget while somebody reads through it.
TEST_F(SlowStore, AnEngineThatEndsLeavesThoseWhoWaitByAddressToTheMapping) {
  const Weight mapped = file_.weight(weight_name(kLargest));
  const auto core = engine::core_on_disk(file_, options(60, 1), reader_);
  engine::add_engine(core);
  reader_.close_gate();
  auto lease = std::async(std::launch::async, [&] { return Engine::lease_at(mapped.part(0)); });
  while (core->report().misses < 1) std::this_thread::yield();
  engine::remove_engine(core.get());
  auto ended = std::async(std::launch::async, [&] { core->stop(); });
  EXPECT_FALSE(lease.get().has_value());  // while its worker still reads
  reader_.open_gate();
  ended.get();
  EXPECT_FALSE(Engine::lease_at(mapped.part(0)).has_value());
}

}  // namespace
}  // namespace stowage

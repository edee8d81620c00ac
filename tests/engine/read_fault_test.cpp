// SPDX-License-Identifier: Apache-2.0
// Stores that fail: each fault is an error that says where, or is mended by reading on; bytes are
// never wrong, and what failed can be asked for again.
#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <tuple>

#include "engine/faulty_reader.h"
#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;
using testing::HasSubstr;

constexpr int kFaultyWeights = 6;

class ReadFaults : public testing::TestWithParam<std::tuple<Reads, int>> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_));
  Needs needs_{file_};
  FaultyReader reader_;
  OverReader engine_{file_, options(needs_.least), reader_};

  static EngineOptions options(std::uint64_t ram) {
    return {.ram = ram, .reads = std::get<0>(GetParam()), .workers = std::get<1>(GetParam())};
  }
  static WeightId id(const OverReader& engine, int i) {
    const auto& units = engine->units();
    const auto found = std::ranges::find(units, weight_name(i), &engine::Unit::name);
    return static_cast<WeightId>(found - units.begin());
  }
  WeightId id(int i) const { return id(engine_, i); }
  bool is_right(int i) const {
    return same_bytes(engine_->acquire(id(i)).weight(), file_.weight(weight_name(i)));
  }
  void expect_all_right() const {
    for (int i = 0; i < kFaultyWeights; ++i) EXPECT_TRUE(is_right(i)) << i;
    EXPECT_LE(engine_->report().peak, needs_.least);
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, ReadFaults,
                         testing::Combine(testing::Values(Reads::mapped, Reads::buffered,
                                                          Reads::direct),
                                          testing::Values(0, 4)),
                         [](const auto& given) {
                           return std::string(to_string(std::get<0>(given.param))) +
                                  std::to_string(std::get<1>(given.param));
                         });

TEST_P(ReadFaults, AnErrorNamesTheFileTheByteAndWhatTheSystemSaid) {
  reader_.fail_from = 0;
  for (int again = 0; again < 2; ++again) {
    EXPECT_STOWAGE_ERROR(engine_->acquire(id(2)), io, scratch_.path("model.safetensors"));
    EXPECT_STOWAGE_ERROR(engine_->acquire(id(2)), io, "byte ");
    EXPECT_STOWAGE_ERROR(engine_->acquire(id(2)), io, "Input/output error");
  }
  EXPECT_EQ(engine_->report().held, 0u);
  reader_.fail_until = 0;
  expect_all_right();
}

// Nobody else may take it meanwhile: there would be none when it is asked for again.
TEST_P(ReadFaults, WhatIsKeptKeepsItsRoomWhenItsReadFails) {
  for (const int at : {1, 4}) {
    FaultyReader reader;
    const std::uint64_t kept = engine_->units()[static_cast<std::size_t>(id(at))].bytes;
    const OverReader engine(file_, options(kept + needs_.least), reader);
    engine->keep(std::vector{id(at)});
    EXPECT_EQ(engine->report().held, kept);
    reader.fail_from = 0;
    EXPECT_STOWAGE_ERROR(engine->acquire(id(at)), io, "Input/output error");
    EXPECT_EQ(engine->report().held, kept);
    reader.fail_until = 0;
    for (int i = 0; i < kFaultyWeights; ++i)
      EXPECT_TRUE(same_bytes(engine->acquire(id(i)).weight(), file_.weight(weight_name(i)))) << i;
    EXPECT_LE(engine->report().peak, kept + needs_.least);
  }
}

// Whichever read fails, somebody is told or nobody needed it.
TEST_P(ReadFaults, AnyOneReadMayFail) {
  std::vector<WeightId> order;
  for (int i = 0; i < kFaultyWeights; ++i) order.push_back(id(i));
  engine_->expect(order);
  constexpr int kFaults = 3 * kFaultyWeights;
  int told = 0;
  const auto ask_until_right = [&](int i) {
    for (int attempt = 0; attempt <= kFaults; ++attempt) {
      try {
        EXPECT_TRUE(is_right(i));
        return;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
        ++told;
      }
    }
    ADD_FAILURE() << "weight " << i << " never came";
  };
  for (int nth = 0; nth < kFaults; ++nth) {
    reader_.fail_from = reader_.reads + nth % 5;
    reader_.fail_until = reader_.fail_from + 1;
    for (int i = 0; i < kFaultyWeights; ++i) ask_until_right(i);
  }
  if (std::get<1>(GetParam()) == 0) {
    EXPECT_EQ(told, kFaults);
  }
  EXPECT_LE(told, kFaults);
  EXPECT_LE(engine_->report().peak, needs_.least);
}

TEST_P(ReadFaults, EveryWaiterIsTold) {
  reader_.fail_from = 0;
  reader_.close_gate();
  std::vector<std::future<void>> threads;
  for (int t = 0; t < 3; ++t)
    threads.push_back(std::async(std::launch::async, [&] { engine_->acquire(id(1)).weight(); }));
  while (engine_->report().acquired < 3) std::this_thread::yield();
  reader_.open_gate();
  for (auto& thread : threads) EXPECT_STOWAGE_ERROR(thread.get(), io, "Input/output error");
  reader_.fail_until = 0;
  expect_all_right();
}

TEST_P(ReadFaults, ShortAndInterruptedReadsAreFinished) {
  reader_.interrupts = true;
  for (const std::size_t most : {std::size_t{4096}, std::size_t{1000}}) {
    reader_.most = most;
    const int before = reader_.reads;
    expect_all_right();
    EXPECT_GT(reader_.reads, before + 2 * kFaultyWeights);
  }
}

TEST_P(ReadFaults, TheEndOfTheFileIsABadFile) {
  reader_.fail_from = 0;
  reader_.error = 0;
  EXPECT_STOWAGE_ERROR(engine_->acquire(id(0)), bad_file, "cut short");
  reader_.fail_until = 0;
  expect_all_right();
}

// A disk whose blocks are larger than a page says so at the first read past the page cache.
TEST_P(ReadFaults, WhereDirectReadsAreRefusedBufferedOnesServe) {
  reader_.error = EINVAL;
  reader_.fail_from = 0;
  if (std::get<0>(GetParam()) != Reads::direct) {
    EXPECT_STOWAGE_ERROR(engine_->acquire(id(2)), io, "Invalid argument");
    return;
  }
  reader_.only_direct = true;
  expect_all_right();
  EXPECT_EQ(engine_->report().reads, Reads::buffered);
}

TEST_P(ReadFaults, AnErrorWhereAllFitsKeepsTheRoom) {
  const OverReader engine(file_, options(needs_.all), reader_);
  for (int round = 0; round < 4; ++round) {
    reader_.fail_from = reader_.reads.load();
    reader_.fail_until = reader_.fail_from + 1;
    for (int i = 0; i < kFaultyWeights; ++i) {
      try {
        EXPECT_TRUE(
            same_bytes(engine->acquire(id(engine, i)).weight(), file_.weight(weight_name(i))));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
      }
    }
  }
  EXPECT_LE(engine->report().held, needs_.all);
  EXPECT_EQ(engine->report().evicted, 0u);
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Weights whose codes, scales and zero points a file has in another order (AWQ): an engine reads
// the file's bytes into scratch of the budget and puts them in order in the weight's memory; who
// touches their addresses without a lease finds the same.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <thread>

#include "engine/faulty_reader.h"
#include "engine/model.h"
#include "expect_error.h"

// Pages that a handler maps and moves by system calls of its own may have addresses that another
// thread's had before; the thread sanitizer sees neither call.
extern "C" const char* __tsan_default_suppressions();
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_suppressions() {
  return "race:stowage::FormedViews::fill_part\n";
}

namespace stowage {
namespace {
using namespace test;

constexpr std::int64_t kRows = 96, kColumns = 256, kGroup = 64;

std::string layer(int i) { return "layer." + std::to_string(i); }

// Any words are codes; scales are numbers. In two files, each a shard.
std::string write_awq(const Scratch& scratch, int weights) {
  std::mt19937 random(5);
  std::string header, data;
  const auto add = [&](const std::string& name, const char* dtype, std::int64_t rows,
                       std::int64_t columns, std::int64_t bytes) {
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + dtype +
              "\",\"shape\":[" + std::to_string(rows) + "," + std::to_string(columns) +
              "],\"data_offsets\":[" + std::to_string(data.size()) + "," +
              std::to_string(data.size() + static_cast<std::size_t>(bytes)) + "]}";
    for (std::int64_t i = 0; i < bytes; ++i)  // f16 numbers below 2, for all of them
      data += static_cast<char>(dtype[0] == 'F' && i % 2 == 1 ? random() % 0x40 : random());
  };
  for (int i = 0; i < weights; ++i) {
    const std::int64_t columns = kColumns * (1 + i % 3), groups = columns / kGroup;
    add(layer(i) + ".qweight", "I32", columns, kRows / 8, columns * kRows / 2);
    add(layer(i) + ".qzeros", "I32", groups, kRows / 8, groups * kRows / 2);
    add(layer(i) + ".scales", "F16", groups, kRows, groups * kRows * 2);
  }
  add("norm.weight", "F32", 3, 11, 132);
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> 8 * i & 0xff);
  scratch.write("model.safetensors", length + header + data);
  scratch.write("config.json", R"({"dtype": "float16", "quantization_config": {"quant_method": )"
                               R"("awq", "bits": 4, "group_size": 64, "version": "gemm",)"
                               R"( "zero_point": true}})");
  return scratch.path();
}

class FormedWeights : public testing::TestWithParam<std::tuple<Reads, int>> {
 protected:
  static constexpr int kWeights = 7;
  Scratch scratch_;
  File file_ = File::open(write_awq(scratch_, kWeights));
  FaultyReader reader_;

  static EngineOptions options(std::uint64_t ram) {
    return {.ram = ram, .reads = std::get<0>(GetParam()), .workers = std::get<1>(GetParam())};
  }
  // The smallest budget: the largest weight, and scratch.
  std::uint64_t least() const {
    const Engine engine(file_, {.ram = 1 << 20, .reads = Reads::buffered, .workers = 0});
    std::uint64_t scratch = 0;
    for (const engine::Unit& unit : engine::units_of(file_))
      scratch = std::max(scratch, unit.scratch);
    return largest(engine) + scratch;
  }
  static WeightId id(const OverReader& engine, int i) {
    const auto& units = engine->units();
    const auto found = std::ranges::find(units, layer(i) + ".weight", &engine::Unit::name);
    return static_cast<WeightId>(found - units.begin());
  }
  void expect_right(const OverReader& engine, int i) const {
    const Lease lease = engine->acquire(id(engine, i));
    EXPECT_TRUE(same_bytes(lease.weight(), file_.weight(layer(i) + ".weight"))) << i;
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, FormedWeights,
                         testing::Combine(testing::Values(Reads::automatic, Reads::buffered,
                                                          Reads::direct),
                                          testing::Values(0, 4)),
                         [](const auto& given) {
                           return std::string(to_string(std::get<0>(given.param))) +
                                  std::to_string(std::get<1>(given.param));
                         });

TEST_P(FormedWeights, ComeInOrderWithinTheBudget) {
  for (const std::uint64_t more : {std::uint64_t{0}, std::uint64_t{100} << 10, 8 * least()}) {
    const OverReader engine(file_, options(least() + more), reader_);
    for (int pass = 0; pass < 4; ++pass)
      for (int i = 0; i < kWeights; ++i) expect_right(engine, i);
    const EngineReport report = engine->report();
    EXPECT_NE(report.reads, Reads::mapped);
    EXPECT_LE(report.peak, least() + more);
    EXPECT_EQ(report.borrowed, 0u);
    EXPECT_GT(report.forming, 0);
    std::uint64_t once = 0;
    for (int i = 0; i < kWeights; ++i)
      for (const engine::FormedPart& part :
           engine->units()[static_cast<std::size_t>(id(engine, i))].formed)
        once += part.bytes;
    EXPECT_GE(report.bytes_formed, once);
    if (more == 8 * least()) {
      EXPECT_EQ(report.bytes_formed, once) << "all of it stays";
    }
  }
}

TEST_P(FormedWeights, ThreadsFindThemInOrder) {
  const OverReader engine(file_, options(least() + (64 << 10)), reader_);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (int n = 0; n < 40; ++n) expect_right(engine, (n * (t + 1) + t) % kWeights);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(engine->report().peak, least() + (64 << 10));
}

TEST_P(FormedWeights, ShortReadsAndErrorsAreFinishedOrTold) {
  const OverReader engine(file_, options(least()), reader_);
  expect_faults_mended_or_told(reader_, kWeights, [&](int i) { expect_right(engine, i); });
  EXPECT_LE(engine->report().peak, least());
}

TEST_P(FormedWeights, AFileThatIsCutShortOrWrittenToIsToldAndHoldsNothing) {
  const OverReader engine(file_, options(least()), reader_);
  expect_right(engine, 0);
  const std::string path = scratch_.path("model.safetensors");
  reader_.error = 0;
  reader_.fail_from = reader_.reads.load();
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, 2)), bad_file, "cut short");
  reader_.fail_from = 1 << 30;
  expect_right(engine, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the file system's clock
  std::fstream(path, std::ios::in | std::ios::out).seekp(-1, std::ios::end).put('x');
  EXPECT_STOWAGE_ERROR(engine->acquire(id(engine, 5)), bad_file, path);
  EXPECT_LE(engine->report().held, least());
}

TEST_P(FormedWeights, ACancelLeavesScratchForWhoComesAfter) {
  const OverReader engine(file_, options(least()), reader_);
  for (int round = 0; round < 5; ++round) {
    reader_.close_gate();
    std::thread waits([&] {
      try {
        expect_right(engine, round);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
      }
    });
    while (reader_.reads == 0) std::this_thread::yield();
    engine->cancel();
    reader_.open_gate();
    waits.join();
    for (int i = 0; i < kWeights; ++i) expect_right(engine, i);
  }
}

TEST(FormedEngine, SaysWhatTheBudgetMustHold) {
  const Scratch scratch;
  const File file = File::open(write_awq(scratch, 3));
  EXPECT_STOWAGE_ERROR(Engine(file, {.ram = 4096}), invalid_argument, "and scratch of ");
  EXPECT_STOWAGE_ERROR(Engine(file, {.ram = 1 << 20, .reads = Reads::mapped}), invalid_argument,
                       "got mapped for codes that awq has in another order");
  const Engine engine(file, {.ram = 1 << 20});
  EXPECT_GT(engine.scratch(), 0u);
  const std::byte* const norm = file.bytes(*file.find("norm.weight")).data();
  EXPECT_TRUE(Engine::lease_at(norm).has_value());
  EXPECT_FALSE(Engine::lease_at(norm, true).has_value());
  const WeightInfo& info = *file.find_weight("layer.0.weight");
  EXPECT_TRUE(Engine::lease_at(file.formed_place(info, 0), true).has_value());
}

// A part is formed whole where one byte is touched; those that were touched before go in time.
TEST(FormedEngine, WhoTouchesAPartFindsItInOrder) {
  const Scratch scratch;
  const File file = File::open(write_awq(scratch, 9));
  const auto touch = [&](int i) {
    const std::string name = layer(i) + ".weight";
    EXPECT_TRUE(same_bytes(file.weight(name, {}, true), file.weight(name))) << i;
  };
  for (int pass = 0; pass < 2; ++pass)
    for (int i = 0; i < 9; ++i) touch(i);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int n = 0; n < 30; ++n) touch((n * (t + 1) + t) % 9);
    });
  for (std::thread& thread : threads) thread.join();
  file.check();
  const pid_t child = ::fork();
  if (child == 0) {
    bool same = true;
    for (int i = 0; i < 9; ++i) {
      const std::string name = layer(i) + ".weight";
      same &= same_bytes(file.weight(name, {}, true), file.weight(name));
    }
    ::_exit(same ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(FormedEngine, WhatWasLostIsToldToWhoAsks) {
  const Scratch scratch;
  const File file = File::open(write_awq(scratch, 2));
  const WeightInfo& info = *file.find_weight("layer.1.weight");
  const std::byte* const place = file.formed_place(info, 0);
  ASSERT_EQ(::truncate(scratch.path("model.safetensors").c_str(), 4096), 0);
  EXPECT_EQ(std::to_integer<int>(*const_cast<const volatile std::byte*>(place)), 0);
  EXPECT_STOWAGE_ERROR(check_memory(place), bad_file, "cut short");
}

}  // namespace
}  // namespace stowage

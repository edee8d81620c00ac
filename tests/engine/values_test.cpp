// SPDX-License-Identifier: Apache-2.0
// Values that a file has at any multiple of their size: in memory of the engine they begin at a
// line, as torch's own do, so that products take them as they are.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include "engine/faulty_reader.h"
#include "engine/model.h"

namespace stowage {
namespace {
using namespace test;

constexpr int kTensors = 7;
constexpr std::uintptr_t kLine = 64;

// Vectors of f32 and bf16, from a few pages to `most` numbers; what lies before them is `before`
// bytes long.
std::string write_values(const Scratch& scratch, std::size_t before, std::size_t most = 25594) {
  std::mt19937 random(9);
  std::string header, data;
  for (int i = 0; i < kTensors; ++i) {
    const std::size_t count = 1000 + (most - 1000) / (kTensors - 1) * static_cast<std::size_t>(i);
    const std::size_t bytes = (i % 2 == 0 ? 2 : 4) * count;
    header += (i == 0 ? "{\"" : ",\"") + weight_name(i) + "\":{\"dtype\":\"" +
              (i % 2 == 0 ? "BF16" : "F32") + "\",\"shape\":[" + std::to_string(count) +
              "],\"data_offsets\":[" + std::to_string(data.size()) + "," +
              std::to_string(data.size() + bytes) + "]}";
    for (std::size_t b = 0; b < bytes; ++b) data += static_cast<char>(random());
  }
  header += "}";
  header.append((kLine + before - 8 - header.size() % kLine) % kLine, ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> 8 * i & 0xff);
  scratch.write("model.safetensors", length + header + data);
  return scratch.path();
}

class Values : public testing::TestWithParam<std::tuple<Reads, int, std::size_t>> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_values(scratch_, std::get<2>(GetParam())));
  FaultyReader reader_;

  static bool moves() { return std::get<0>(GetParam()) != Reads::mapped; }
  static EngineOptions options(std::uint64_t ram) {
    return {.ram = ram, .reads = std::get<0>(GetParam()), .workers = std::get<1>(GetParam())};
  }
  std::uint64_t least() const {
    return largest(Engine(file_, {.ram = 1 << 20, .reads = Reads::buffered, .workers = 0}));
  }
  const TensorInfo& tensor(int i) const { return *file_.find(weight_name(i)); }
  void expect_right(const OverReader& engine, int i) const {
    const std::span<const std::byte> mapped = file_.bytes(tensor(i));
    const Lease lease = engine->acquire(*engine::find_unit(engine->units(), weight_name(i)));
    const void* const at = lease.at(mapped.data());
    if (moves()) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % kLine, 0u) << i;
    } else {
      EXPECT_EQ(at, mapped.data()) << i;
    }
    EXPECT_EQ(std::memcmp(at, mapped.data(), mapped.size()), 0) << i;
    EXPECT_EQ(lease.at(&mapped.back()), static_cast<const std::byte*>(at) + mapped.size() - 1);
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Values,
                         testing::Combine(testing::Values(Reads::mapped, Reads::buffered,
                                                          Reads::direct),
                                          testing::Values(0, 4), testing::Values(0, 8, 24, 60)),
                         [](const auto& given) {
                           return std::string(to_string(std::get<0>(given.param))) +
                                  std::to_string(std::get<1>(given.param)) + "Before" +
                                  std::to_string(std::get<2>(given.param));
                         });

TEST_P(Values, BeginAtALine) {
  const OverReader engine(file_, options(least() + (16 << 10)), reader_);
  for (int pass = 0; pass < 3; ++pass)
    for (int i = 0; i < kTensors; ++i) expect_right(engine, i);
  const EngineReport report = engine->report();
  EXPECT_LE(report.peak, least() + (16 << 10));
  EXPECT_EQ(report.borrowed, 0u);
}

TEST_P(Values, OnlyThoseMoveThatBeginElsewhere) {
  const OverReader engine(file_, options(8 * least()), reader_);
  std::uint64_t moved = 0;
  for (int i = 0; i < kTensors; ++i) {
    expect_right(engine, i);
    if (moves() && tensor(i).offset % kLine != 0) moved += tensor(i).bytes;
  }
  EXPECT_EQ(engine->report().bytes_formed, moved);
}

TEST_P(Values, ThreadsFindThemThere) {
  const OverReader engine(file_, options(2 * least()), reader_);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (int n = 0; n < 40; ++n) expect_right(engine, (n * (t + 1) + t) % kTensors);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Values, ShortReadsAndErrorsAreFinishedOrTold) {
  const OverReader engine(file_, options(least()), reader_);
  expect_faults_mended_or_told(reader_, kTensors, [&](int i) { expect_right(engine, i); });
}

TEST(LargeValues, OfACachedFileAreReadWhereProductsWouldCopyThem) {
  const Scratch scratch;
  constexpr std::size_t kMany = std::size_t{5} << 20;  // numbers; one vector of bf16
  for (const auto& [before, most, wanted] :
       {std::tuple{std::size_t{8}, kMany, Reads::buffered},
        std::tuple{std::size_t{8}, kMany / 16, Reads::mapped}}) {
    const File file = File::open(write_values(scratch, before, most));
    const Engine engine(file, {.ram = std::uint64_t{64} << 20});  // just written, so in the cache
    EXPECT_EQ(engine.report().reads, wanted) << most;
  }
}

TEST(ValuesInStacks, EachIndexBeginsAtALine) {
  const Scratch scratch;
  const Weight stack = made_weight(parse_storage("bf16"), Shape{5, 33, 65});
  WriterOptions options;
  options.weights.push_back({"experts", stack.storage(), stack.shape(), {}, {}});
  Writer writer(scratch.path("model.safetensors"),
                disk_layout("experts", stack.storage(), stack.shape()), options);
  writer.write_weight("experts", stack);
  writer.finish();
  const File file = File::open(scratch.path());
  for (const Reads reads : {Reads::buffered, Reads::direct}) {
    Engine engine(file, {.ram = 1 << 20, .reads = reads, .by_rows = {{"experts", 1}}});
    const SliceIds slices = engine.slices(*engine.find("experts"));
    for (WeightId i = 0; i < slices.count; ++i) {
      const Lease lease = engine.acquire(slices.first + i);
      const void* const at = lease.weight().part(0);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % kLine, 0u) << i;
      const auto* const from = static_cast<const std::byte*>(stack.part(0)) + i * 33 * 65 * 2;
      EXPECT_EQ(std::memcmp(at, from, 33 * 65 * 2), 0) << i;
    }
  }
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// What a thread looks ahead to: the ring itself, and what it makes of neighbours in the file.
#include "engine/window.h"

#include <gtest/gtest.h>

#include "engine/faulty_reader.h"
#include "engine/model.h"

namespace stowage {
namespace {
using namespace test;

TEST(Window, CountsBytesAndKnowsItsEnd) {
  engine::Window window;
  window.restart({.signature = 7, .previous = 1, .current = 2});
  EXPECT_EQ(window.first(), engine::kNone);
  for (int round = 0; round < 3; ++round) {  // around the ring
    for (WeightId id = 0; id < 400; ++id) window.push(id, 10);
    EXPECT_EQ(window.bytes(), 4000u);
    EXPECT_EQ(window.end().current, 399);
    EXPECT_EQ(window.end().previous, 398);
    EXPECT_EQ(window.end().signature, 7u);
    for (WeightId id = 0; id < 400; ++id) EXPECT_EQ(window.pop(), id);
    EXPECT_EQ(window.bytes(), 0u);
  }
}

// Plain tensors of 64 KiB, as a file of many experts has them.
struct Neighbours : testing::Test {
  static constexpr int kCount = 256;
  static constexpr std::int64_t kBytes = 64 << 10;
  Scratch scratch_;

  File write() const {
    std::vector<Declaration> tensors;
    for (int i = 0; i < kCount; ++i)
      tensors.push_back({"t" + std::to_string(1000 + i), Dtype::u8, Shape{kBytes}, "", 0});
    Writer writer(scratch_.path("model.safetensors"), tensors);
    for (int i = 0; i < kCount; ++i)
      writer.write(tensors[static_cast<std::size_t>(i)].name,
                   std::vector<std::byte>(kBytes, static_cast<std::byte>(i)));
    writer.finish();
    return File::open(scratch_.path());
  }
  // One pass; returns how many reads it took.
  static int reads(const File& file, std::uint64_t ram, bool backward, Reads how) {
    FaultyReader reader;
    const OverReader engine(file, {.ram = ram, .reads = how, .workers = 3}, reader);
    std::vector<WeightId> order(kCount);
    for (int i = 0; i < kCount; ++i) order[static_cast<std::size_t>(i)] = i;
    if (backward) std::ranges::reverse(order);
    engine->expect(order);
    for (const WeightId id : order) {
      const Lease lease = engine->acquire(id);
      const auto bytes = file.bytes(*file.find("t" + std::to_string(1000 + id)));
      const auto* const here = static_cast<const std::byte*>(lease.at(bytes.data()));
      EXPECT_EQ(here[0], static_cast<std::byte>(id));
      EXPECT_EQ(here[kBytes - 1], static_cast<std::byte>(id));
    }
    EXPECT_LE(engine->report().peak, ram);
    return reader.reads;
  }
};

TEST_F(Neighbours, AreReadAsOneInEitherDirection) {
  const File file = write();
  for (const Reads how : {Reads::buffered, Reads::direct})
    for (const bool backward : {false, true}) {
      EXPECT_LT(reads(file, kCount * kBytes, backward, how), kCount / 4);
      EXPECT_LT(reads(file, kCount * kBytes / 4, backward, how), kCount / 2);
    }
}

TEST_F(Neighbours, AreReadOneByOneWhereTheFirstReadFails) {
  const File file = write();
  FaultyReader reader;
  const OverReader engine(file, {.ram = kCount * kBytes, .reads = Reads::direct, .workers = 1},
                          reader);
  std::vector<WeightId> order(kCount);
  for (int i = 0; i < kCount; ++i) order[static_cast<std::size_t>(i)] = i;
  engine->expect(order);
  reader.fail_from = 1;  // the first run of the reader, and its first piece
  reader.fail_until = 3;
  int failed = 0;
  for (const WeightId id : order) {
    try {
      engine->acquire(id);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::io);
      ++failed;
    }
  }
  EXPECT_LE(failed, 2);
}

}  // namespace
}  // namespace stowage

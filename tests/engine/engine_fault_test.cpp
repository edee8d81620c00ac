// SPDX-License-Identifier: Apache-2.0
// Files that change under an engine: each fault is an error that names the file, and the engine
// works on when the fault is gone.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;
namespace fs = std::filesystem;

class EngineFaults : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_));
  std::string path_ = scratch_.path("model.safetensors");
  Needs needs_{file_};
  Engine engine_{file_, {.ram = needs_.least, .reads = GetParam(), .workers = 1}};
  WeightId id(int i) const { return engine_.find(weight_name(i)).value(); }
};
INSTANTIATE_TEST_SUITE_P(Reads, EngineFaults,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(EngineFaults, CutShort) {
  engine_.acquire(id(0));
  fs::resize_file(path_, fs::file_size(path_) / 2);
  for (int again = 0; again < 2; ++again)
    EXPECT_STOWAGE_ERROR(engine_.acquire(id(4)), bad_file, path_);
  EXPECT_LE(engine_.report().held, needs_.least);
}

TEST_P(EngineFaults, WrittenSince) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the clock of the file system
  std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end)
      << 'x';
  EXPECT_STOWAGE_ERROR(engine_.acquire(id(4)), bad_file, "[file_changed]");
}

TEST_P(EngineFaults, RenamedOverOrDeletedIsStillThere) {
  const std::string other = scratch_.write("other", "nothing of use");
  fs::rename(other, path_);
  EXPECT_TRUE(same_bytes(engine_.acquire(id(1)).weight(), file_.weight(weight_name(1))));
  fs::remove(path_);
  EXPECT_TRUE(same_bytes(engine_.acquire(id(2)).weight(), file_.weight(weight_name(2))));
}

TEST_P(EngineFaults, AnotherFileUnderTheNameIsNotRead) {
  Scratch other;
  write_model(other, {.weights = 7});
  fs::rename(other.path("model.safetensors"), path_);
  Engine engine(file_, {.ram = needs_.least, .reads = GetParam()});
  EXPECT_TRUE(same_bytes(engine.acquire(id(4)).weight(), file_.weight(weight_name(4))));
}

TEST_P(EngineFaults, DestroyedWhileItReads) {
  Scratch scratch;
  const File file = File::open(write_model(scratch, {.weights = 5, .rows = 3000, .columns = 4096}));
  const Needs needs(file);
  for (int round = 0; round < 10; ++round) {
    Engine engine(file, {.ram = needs.all, .reads = GetParam(), .workers = 3});
    std::vector<WeightId> order;
    for (int i = 0; i < 5; ++i) order.push_back(engine.find(weight_name(i)).value());
    engine.expect(order);
    engine.acquire(order[static_cast<std::size_t>(round % 5)]);
  }
}

}  // namespace
}  // namespace stowage

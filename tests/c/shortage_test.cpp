// SPDX-License-Identifier: Apache-2.0
// Over a whole use of the C interface, whatever it asks of the system is refused once, in turn. The
// call that it was asked in says so by its status, and the same call then works.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "allocations.h"
#include "scratch.h"
#include "stowage.h"

namespace stowage {
namespace {
using namespace test;

constexpr std::int64_t kShape[] = {16, 64};
constexpr std::size_t kElements = 16 * 64;

class CShortages : public testing::Test {
 protected:
  void SetUp() override {
    if (!kCountsAllocations) GTEST_SKIP() << "sanitizers have a heap and threads of their own";
    for (std::size_t i = 0; i < kElements; ++i)
      values_[i] = std::sin(0.37F * static_cast<float>(i));
  }

  // Runs a call, and where it was refused again: that must do.
  template <class Call>
  void works(Call call) {
    const stowage_status status = call();
    if (status == STOWAGE_OK) return;
    refused_.insert(status);
    good_ &= std::string(stowage_last_error()) != "" && call() == STOWAGE_OK;
  }

  void write() {
    stowage_writer* writer = nullptr;
    stowage_weight* weight = nullptr;
    works([&] {
      return stowage_quantize(values_.data(), STOWAGE_F32, kShape, 2, "nf4:nested", &weight);
    });
    works([&] { return stowage_writer_new(path_.c_str(), nullptr, &writer); });
    works(
        [&] { return stowage_writer_set_metadata(writer, "a long key of it", "its long value"); });
    works([&] {
      return stowage_writer_declare_weight(writer, "a.weight", "nf4:nested", kShape, 2,
                                           STOWAGE_BF16);
    });
    works([&] { return stowage_writer_declare_tensor(writer, "plain", STOWAGE_F32, kShape, 2); });
    // What a shortage tore may not be written twice: such a writer ends, and leaves nothing.
    for (const stowage_status status :
         {stowage_writer_write_tensor(writer, "plain", values_.data(), sizeof values_),
          stowage_writer_write_weight(writer, "a.weight", weight), stowage_writer_finish(writer)})
      if (status != STOWAGE_OK) refused_.insert(status);
    stowage_writer_free(writer);
    stowage_weight_free(weight);
  }

  void use() {
    stowage_file* file = nullptr;
    stowage_engine* engine = nullptr;
    stowage_lease* lease = nullptr;
    stowage_weight* mapped = nullptr;
    const stowage_weight* held = nullptr;
    stowage_weight_info info{};
    info.size = sizeof info;
    stowage_engine_options options{};
    options.size = sizeof options;
    options.ram = 1 << 20;
    options.workers = 1;
    std::array<float, kElements> out{}, y{};
    works([&] { return stowage_file_open(path_.c_str(), &file); });
    works([&] { return stowage_file_describe_weight(file, 0, &info); });
    works([&] { return stowage_file_weight(file, 0, STOWAGE_UNKNOWN, &mapped); });
    works([&] { return stowage_engine_new(file, &options, &engine); });
    works([&] { return stowage_engine_acquire(engine, 0, &lease); });
    works([&] { return stowage_lease_weight(lease, &held); });
    works([&] { return stowage_dequantize(held, 0, 16, out.data(), STOWAGE_F32); });
    works([&] { return stowage_linear(held, values_.data(), 2, STOWAGE_F32, nullptr, y.data()); });
    works([&] { return stowage_file_verify(file, &compared_); });
    if (expected_.empty()) expected_.assign(out.begin(), out.end());
    good_ &= std::equal(out.begin(), out.end(), expected_.begin());
    stowage_lease_free(lease);
    stowage_engine_free(engine);
    stowage_weight_free(mapped);
    stowage_file_free(file);
  }

  Scratch scratch_;
  std::string path_ = scratch_.path("model.safetensors");
  std::array<float, kElements> values_{};
  std::vector<float> expected_;
  std::set<stowage_status> refused_;
  std::int64_t compared_ = 0;
  bool good_ = true;
};

TEST_F(CShortages, OfEachRequestInTurn) {
  write();
  use();  // what a process makes once
  ASSERT_TRUE(good_ && refused_.empty()) << stowage_last_error();
  int quiet = 0;
  for (std::int64_t nth = 0; quiet < 3; ++nth) {
    std::string failed;
    {
      const Shortage shortage(nth);
      write();
      use();
      failed = Shortage::failed();
    }
    EXPECT_TRUE(good_) << nth << ": " << failed << ": " << stowage_last_error();
    good_ = true;
    quiet = failed.empty() ? quiet + 1 : 0;
  }
  EXPECT_TRUE(refused_.contains(STOWAGE_OUT_OF_MEMORY));
  EXPECT_FALSE(refused_.contains(STOWAGE_DEFECT));
  EXPECT_EQ(scratch_.names(), std::set<std::string>{"model.safetensors"});
}

}  // namespace
}  // namespace stowage

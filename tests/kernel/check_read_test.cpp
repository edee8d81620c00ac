// SPDX-License-Identifier: Apache-2.0
// Every function that reads weights or values refuses what it read from a file that lost bytes.
#include "kernel/check_read.h"

#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "base/file.h"
#include "expect_error.h"
#include "scratch.h"
#include "stowage/quantize.h"

namespace stowage::check_read_test {
namespace {

using test::Scratch;

constexpr std::int64_t kRows = 64, kColumns = 256;  // 16 pages of f32, 4 of int8

class CheckRead : public testing::Test {
 protected:
  CheckRead() {
    std::vector<float> values(kRows * kColumns, 1.0F);
    std::string bytes(values.size() * sizeof(float), '\0');
    std::memcpy(bytes.data(), values.data(), bytes.size());
    path_ = folder_.write("f", bytes);
    file_ = std::make_unique<MappedFile>(path_);
    const void* const mapped = file_->data();
    plain_ = Weight({.codes = Codes::f32}, {kRows, kColumns}, {&mapped, 1});
    const std::array<const void*, 2> own_codes{codes_.data(), mapped};
    scaled_ = Weight(parse_storage("int8:row"), {kRows, kColumns}, own_codes);
  }
  void cut(std::uint64_t bytes) { std::filesystem::resize_file(path_, bytes); }

  Scratch folder_;
  std::string path_;
  std::unique_ptr<MappedFile> file_;
  std::vector<std::int8_t> codes_ = std::vector<std::int8_t>(kRows * kColumns, 3);
  Weight plain_, scaled_;  // codes in the file; scales in the file
  std::vector<float> x_ = std::vector<float>(kRows * kColumns, 1.0F);
  std::vector<float> y_ = std::vector<float>(kRows * kColumns);
};

#define EXPECT_LOST(statement) \
  EXPECT_STOWAGE_ERROR(statement, bad_file, path_ + ": the file must stay whole while it is open")

TEST_F(CheckRead, EveryFunctionOnAWeightThrows) {
  constexpr Dtype f32 = Dtype::f32;
  const std::int64_t last = kRows - 1;
  for (const bool lost : {false, true}) {
    if (lost) cut(4096);  // the first 4 rows of plain_ stay
    const auto expect = [&](const auto& function) {
      if (lost)
        EXPECT_LOST(function());
      else
        function();
    };
    expect([&] { dequantize(plain_, {0, kRows}, y_.data(), f32); });
    expect([&] { dequantize(plain_, {0, kRows}, {8, 16}, y_.data(), f32); });
    expect([&] { embedding(plain_, &last, 1, y_.data(), f32); });
    expect([&] { linear(x_.data(), 1, f32, plain_, nullptr, y_.data()); });
    expect([&] { linear(x_.data(), kRows, f32, plain_, nullptr, y_.data()); });
    expect([&] { linear_grad_input(x_.data(), 1, f32, plain_, y_.data()); });
    expect([&] { linear_fixed(x_.data(), 1, plain_, nullptr, y_.data()); });
    expect([&] { amax({{Values{file_->data(), f32, kRows * kColumns}}}, y_.data()); });
    expect([&] { measure(x_.data(), f32, plain_); });
    expect([&] { measure(file_->data(), f32, scaled_); });
    expect([&] { quantize(file_->data(), f32, {kRows, kColumns}, parse_storage("nf4")); });
  }
}

TEST_F(CheckRead, AnyPartMayBeTheLostOne) {
  dequantize(scaled_, {0, kRows}, y_.data(), Dtype::f32);
  EXPECT_EQ(y_[0], 3.0F);
  cut(0);
  EXPECT_LOST(dequantize(scaled_, {0, kRows}, y_.data(), Dtype::f32));
}

// A mapping that was damaged before is no better for the second reader, nor for one who reads what
// is still there: it may be of a file that is being rewritten.
TEST_F(CheckRead, TheMarkStays) {
  cut(4096);
  EXPECT_LOST(dequantize(plain_, {0, kRows}, y_.data(), Dtype::f32));
  EXPECT_LOST(dequantize(plain_, {0, kRows}, y_.data(), Dtype::f32));
  EXPECT_LOST(dequantize(plain_, {0, 1}, y_.data(), Dtype::f32));
}

TEST_F(CheckRead, OthersAreLeftAlone) {
  cut(0);
  EXPECT_LOST(dequantize(plain_, {0, kRows}, y_.data(), Dtype::f32));
  ASSERT_EQ(mappings_damaged(), 1U);
  const Weight other = quantize(x_.data(), Dtype::f32, {kRows, kColumns}, parse_storage("nf4"));
  dequantize(other, {0, kRows}, y_.data(), Dtype::f32);
  EXPECT_EQ(y_, x_);
}

}  // namespace
}  // namespace stowage::check_read_test

// SPDX-License-Identifier: Apache-2.0
// Superblocks by hand: where the bits of a record lie, what it makes of codes, and what quantizing
// makes of values.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "expect_error.h"
#include "format/reference.h"
#include "format/superblocks.h"

namespace stowage::reference {
namespace {

using Octets = std::vector<std::uint8_t>;

const Storage& q4k() {
  static const Storage storage = parse_storage("q4_k");
  return storage;
}

struct Quantized {
  Shape shape;
  Octets codes, records;
  explicit Quantized(const Shape& of) : shape(of) {
    const Layout made = layout(q4k(), shape);
    codes.resize(static_cast<std::size_t>(made.parts[0].bytes));
    records.resize(static_cast<std::size_t>(made.parts[1].bytes));
  }
  Quantized(const Shape& of, const std::vector<float>& values) : Quantized(of) {
    const std::vector<void*> parts{codes.data(), records.data()};
    quantize(values.data(), Dtype::f32, shape, q4k(), parts);
  }
  float at(std::int64_t i) const {
    const std::vector<const void*> parts{codes.data(), records.data()};
    return value_at(Weight(q4k(), shape, parts), i);
  }
};

// 0.5 counts scales and 0.25 offsets; those of sub-block j are 8 j + 1 and 63 - 9 j.
Octets drawn() {
  return {0x00,        0x38,        0x00,        0x34,         // f16: 0.5, 0.25
          1 | 2 << 6,  9 | 2 << 6,  17 | 3 << 6, 25 | 3 << 6,  // and upper bits of 33, 41, ...
          63 | 1 << 6, 54 | 1 << 6, 45 | 0 << 6, 36 | 0 << 6,  // and of 27, 18, 9, 0
          1 | 11 << 4, 9 | 2 << 4,  1 | 9 << 4,  9 | 0 << 4};  // lower bits of both
}

TEST(Superblock, ARecordHasTwoNumbersForEachSubBlock) {
  Quantized made({1, 256});
  made.records = drawn();
  made.codes.assign(128, 0x51);  // 1, 5, 1, 5, ...
  for (std::int64_t i = 0; i < 256; ++i) {
    const std::int64_t j = i / 32, code = i % 2 == 0 ? 1 : 5;
    const double scale = 0.5 * static_cast<double>(8 * j + 1);
    const double offset = 0.25 * static_cast<double>(63 - 9 * j);
    EXPECT_EQ(made.at(i), static_cast<double>(code) * scale - offset) << i;
  }
}

TEST(Superblock, TheKernelsReadAndWriteTheSameRecord) {
  const Octets record = drawn();
  using superblocks::Q4K;
  const auto steps = superblocks::steps_of<Q4K>(record.data());
  for (std::int64_t j = 0; j < Q4K::kSteps; ++j) {
    EXPECT_EQ(steps.scale[j], 0.5f * static_cast<float>(8 * j + 1)) << j;
    EXPECT_EQ(steps.offset[j], 0.25f * static_cast<float>(63 - 9 * j)) << j;
  }
  Octets again(16);
  Q4K::put(again.data(), 0x3800, 0x3400, {1, 9, 17, 25, 33, 41, 49, 57},
           {63, 54, 45, 36, 27, 18, 9, 0});
  EXPECT_EQ(again, record);
}

TEST(Superblock, ProductsAreExactAndTheDifferenceIsRoundedOnce) {
  Quantized made({1, 256});
  made.records = drawn();
  made.records[0] = 0xff, made.records[1] = 0x7b;  // 65504
  made.records[2] = 0x01, made.records[3] = 0x00;  // 2^-24
  made.codes.assign(128, 0xff);
  const double exact = 15 * (65504.0 * 57) - std::ldexp(0, -24);
  EXPECT_EQ(made.at(255), static_cast<float>(exact));
  EXPECT_EQ(made.at(0), static_cast<float>(15 * 65504.0 - std::ldexp(63, -24)));
}

TEST(Superblock, ValuesReachFromTheirOffsetToFifteenScales) {
  std::vector<float> values(256);
  for (std::size_t i = 0; i < 256; ++i) values[i] = static_cast<float>(i % 32 % 16) * 0.5f - 2.0f;
  const Quantized made({1, 256}, values);
  const float unit = 0.5f / 63, low = 2.0f / 63;  // then of f16
  for (std::int64_t i = 0; i < 256; ++i)
    EXPECT_NEAR(made.at(i), values[static_cast<std::size_t>(i)],
                16 * 63 * unit * 0x1p-11 + low * 0x1p-5)
        << i;
  EXPECT_EQ(made.codes, [] {
    Octets codes(128);
    for (std::size_t i = 0; i < 128; ++i)
      codes[i] = static_cast<std::uint8_t>(2 * i % 16 | (2 * i + 1) % 16 << 4);
    return codes;
  }());
}

TEST(Superblock, ZerosAreZeros) {
  const Quantized made({2, 256}, std::vector<float>(512, 0.0f));
  EXPECT_EQ(made.records, Octets(32, 0));
  for (std::int64_t i = 0; i < 512; i += 51) {
    EXPECT_EQ(made.at(i), 0.0f);
    EXPECT_FALSE(std::signbit(made.at(i)));
  }
}

TEST(Superblock, ARowMayEndInsideOfOne) {
  std::vector<float> values(2 * 300, -1.0f);
  values[256] = 31.0f;
  const Quantized made({2, 300}, values);
  EXPECT_EQ(made.records.size(), 2u * 2 * 16);
  EXPECT_EQ(made.codes.size(), 2u * 150);
  EXPECT_NEAR(made.at(0), -1.0f, 0x1p-8);
  EXPECT_NEAR(made.at(256), 31.0f, 0.05f);
  EXPECT_NEAR(made.at(599), -1.0f, 0x1p-8);
}

TEST(Superblock, ScalesBeyondF16AreRefused) {
  std::vector<float> values(256, 0.0f);
  values[40] = 6e7f;  // 15 times 63 times 65504 are more
  EXPECT_NO_THROW(Quantized({1, 256}, values));
  values[40] = 6.4e7f;
  EXPECT_STOWAGE_ERROR(Quantized({1, 256}, values), invalid_argument,
                       "quantize: values must have finite scales in q4_k, got infinity");
  values[40] = -4.2e6f;  // and 63 times 65504
  EXPECT_STOWAGE_ERROR(Quantized({1, 256}, values), invalid_argument, "finite scales in q4_k");
}

}  // namespace
}  // namespace stowage::reference

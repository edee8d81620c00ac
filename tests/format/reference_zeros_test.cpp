// SPDX-License-Identifier: Apache-2.0
// Zeros that are numbers: which ones a group takes, and in which order values are computed.
#include <cmath>
#include <string>
#include <vector>

#include "expect_error.h"
#include "format/convert.h"
#include "format/reference.h"

namespace stowage {
namespace {

std::uint16_t half_of(const Storage& storage, float x) {
  return storage.scaling.type == ScaleType::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
}
float of_half(const Storage& storage, std::uint16_t x) {
  return storage.scaling.type == ScaleType::bf16 ? bf16_to_f32(x) : f16_to_f32(x);
}

// What two codes, one a value of 7 or 15 and one a value of 0, read as.
std::vector<float> read(const std::string& name, float scale, float zero) {
  const Storage storage = parse_storage(name);
  const std::uint8_t codes = storage.codes == Codes::int4 ? 0x8F : 0x0F;
  const std::uint16_t halves[2] = {half_of(storage, scale), half_of(storage, zero)};
  const void* const scale_part = &halves[0];
  const void* const zero_part = &halves[1];
  const float floats[2] = {scale, zero};
  const bool wide = storage.scaling.type == ScaleType::f32;
  const Weight weight(storage, {1, 2},
                      std::vector<const void*>{&codes, wide ? &floats[0] : scale_part,
                                               wide ? &floats[1] : zero_part});
  return {reference::value_at(weight, 0), reference::value_at(weight, 1)};
}

TEST(Zeros, AreAddedToTheProductInFp32) {
  EXPECT_EQ(read("int4:row:bf16:zero_sum", 0.2f, 0.6f),
            (std::vector{7 * 0.2001953125f + 0.6015625f, 0.6015625f}));
  EXPECT_EQ(read("int4:row:f16:zero_sum", 0.5f, 0.1f),
            (std::vector{3.5f + 0.0999755859375f, 0.0999755859375f}));
  // Neither the product nor the sum is exact: each is rounded to fp32.
  const float product = 7 * 0.1f;
  EXPECT_EQ(read("int4:row:zero_sum", 0.1f, 1e-3f), (std::vector{product + 1e-3f, 1e-3f}));
}

TEST(Zeros, AreTakenOffCodesAndBothResultsAreRounded) {
  EXPECT_EQ(read("uint4:row:f16:zero_rounded", 0.5f, 0.1f),
            (std::vector{14.8984375f / 2, -0.0999755859375f / 2}));
  EXPECT_EQ(read("uint4:row:bf16:zero_rounded", 0.3f, 0.1f),
            (std::vector{4.46875f, bf16_to_f32(f32_to_bf16(-0.10009765625f * 0.30078125f))}));
  const float distance = 15 - 0.1f;
  EXPECT_EQ(read("uint4:row:zero_rounded", 0.3f, 0.1f),
            (std::vector{distance * 0.3f, -0.1f * 0.3f}));
  EXPECT_EQ(read("uint4:row:f16:zero_rounded", 65504, 1),  // beyond the type
            (std::vector{HUGE_VALF, -65504.0f}));
}

struct Made {
  std::vector<std::uint8_t> codes;
  float scale, zero;
};
Made made(const std::string& name, const std::vector<float>& values) {
  const Storage storage = parse_storage(name);
  Made result{std::vector<std::uint8_t>(values.size() / 2), 0, 0};
  std::uint16_t halves[2] = {};
  float floats[2] = {};
  const bool wide = storage.scaling.type == ScaleType::f32;
  const std::vector<void*> parts{result.codes.data(), wide ? static_cast<void*>(floats) : halves,
                                 wide ? static_cast<void*>(floats + 1) : halves + 1};
  reference::quantize(values.data(), Dtype::f32, {1, static_cast<std::int64_t>(values.size())},
                      storage, parts);
  result.scale = wide ? floats[0] : of_half(storage, halves[0]);
  result.zero = wide ? floats[1] : of_half(storage, halves[1]);
  return result;
}

// From -3 to 12 in steps of 1: the middle of the codes of int4 is 5.
TEST(Zeros, OfTheSumStandInTheMiddleOfTheCodes) {
  const Made found = made("int4:row:zero_sum", {-3, 12, 0, 5.5f, 6.5f, -1});
  EXPECT_EQ(found.scale, 1.0f);
  EXPECT_EQ(found.zero, 5.0f);
  EXPECT_EQ(found.codes, (std::vector<std::uint8_t>{0xF0, 0x83, 0x2A}));
  const Made rounded = made("int4:row:bf16:zero_sum", {-1, 2, 0, 0.5f});
  EXPECT_EQ(rounded.scale, 0.2001953125f);
  EXPECT_EQ(rounded.zero, 0.6015625f);  // of 0.6
  const Made none = made("int4:row:f16:zero_sum", {0, 0});
  EXPECT_EQ(none.scale, 1.0f);
  EXPECT_EQ(none.zero, 8.0f);
  EXPECT_EQ(none.codes, std::vector<std::uint8_t>{0x00});
  EXPECT_STOWAGE_ERROR(made("int4:row:f16:zero_sum", {0, 2e5f}), invalid_argument,
                       "finite scales in int4:row:f16:zero_sum");
}

// From -1 to 1.5 by sixths of 1: 0 is no code, and codes are those of the zero that is kept.
TEST(Zeros, OfTheDifferenceNeedBeNoInteger) {
  const Made found = made("uint4:row:bf16:zero_rounded", {-1.0f, 1.5f, 0.0f, 0.25f});
  EXPECT_EQ(found.scale, bf16_to_f32(f32_to_bf16(2.5f / 15)));
  EXPECT_EQ(found.zero, 6.0f);
  EXPECT_EQ(found.codes, (std::vector<std::uint8_t>{0xF0, 0x76}));
  const Made between = made("uint4:row:f16:zero_rounded", {-1.0f, 9.0f});
  EXPECT_EQ(between.zero, 1.5f);
  EXPECT_EQ(between.codes, std::vector<std::uint8_t>{0xF0});
  const Made positive = made("uint4:row:f16:zero_rounded", {3.0f, -0.0f});
  EXPECT_FALSE(std::signbit(positive.zero));
  EXPECT_EQ(positive.zero, 0.0f);
  EXPECT_EQ(positive.codes, std::vector<std::uint8_t>{0x0F});
  const Made none = made("uint4:row:f16:zero_rounded", {0, 0});
  EXPECT_EQ(none.scale, 1.0f);
  EXPECT_EQ(none.codes, std::vector<std::uint8_t>{0x00});
}

// Of eight rows in groups of four, rows 0, 2, 4 and 6 of a column are one, and those between them.
TEST(Zeros, OfAColumnAreThoseOfRowsAsFarApart) {
  const Storage storage = parse_storage("uint4:column4:f16:zero_rounded");
  const Shape shape{8, 2};
  std::vector<float> values(16);
  const float of_column[2][2][4] = {{{0, 15, 3, 7}, {-1, 9, 0, 1}}, {{0, 0, 0, 0}, {3, 0, 1, 2}}};
  for (std::size_t column : {0U, 1U})
    for (std::size_t first : {0U, 1U})
      for (std::size_t i = 0; i < 4; ++i)
        values[(2 * i + first) * 2 + column] = of_column[column][first][i];
  std::vector<std::uint8_t> codes(8);
  std::vector<std::uint16_t> scales(4), zeros(4);
  const std::vector<void*> parts{codes.data(), scales.data(), zeros.data()};
  reference::quantize(values.data(), Dtype::f32, shape, storage, parts);
  const auto number = [](std::uint16_t bits) { return f16_to_f32(bits); };
  const auto fifth = f16_to_f32(f32_to_f16(3.0f / 15)),
             two_thirds = f16_to_f32(f32_to_f16(10.0f / 15));
  for (std::size_t g = 0; g < 4; ++g) {
    EXPECT_EQ(number(scales[g]), (std::array{1.0f, 1.0f, two_thirds, fifth})[g]) << g;
    EXPECT_EQ(number(zeros[g]), (std::array{0.0f, 0.0f, 1.5f, 0.0f})[g]) << g;
  }
  EXPECT_EQ(codes, (std::vector<std::uint8_t>{0x00, 0xF0, 0x0F, 0x0F, 0x03, 0x52, 0x07, 0xA3}));
  const Weight weight(storage, shape, std::vector<const void*>(parts.begin(), parts.end()));
  const auto rounded = [&](float x) { return number(f32_to_f16(x)); };
  EXPECT_EQ(reference::value_at(weight, 4), 15.0f);                        // row 2, column 0
  EXPECT_EQ(reference::value_at(weight, 6), rounded(13.5f * two_thirds));  // row 3, column 0
  EXPECT_EQ(reference::value_at(weight, 11), rounded(5 * fifth));          // row 5, column 1
}

}  // namespace
}  // namespace stowage

// SPDX-License-Identifier: Apache-2.0
// Plain casts and dequantize against the tables: nearest value by exact comparison with midpoints.
#include "format/reference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "expect_error.h"
#include "format/convert.h"

namespace stowage::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

int largest_code(Codes codes) { return codes == Codes::f8_e4m3 ? 0x7e : 0x7b; }

// The code of a finite x, by search: codes 0..largest ascend, so the code is the number of
// midpoints below |x|, and a midpoint itself belongs to the even neighbour.
std::uint32_t search(Codes codes, double x) {
  const auto values = trait(codes).values;
  std::uint32_t code = 0;
  for (int c = 0; c < largest_code(codes); ++c) {
    const auto at = static_cast<std::size_t>(c);
    const double middle = (static_cast<double>(values[at]) + values[at + 1]) / 2;
    if (std::fabs(x) > middle || (std::fabs(x) == middle && c % 2 == 1))
      code = static_cast<std::uint32_t>(c + 1);
  }
  return code | (std::signbit(x) ? 0x80u : 0u);
}

class Minifloat : public testing::TestWithParam<Codes> {};
INSTANTIATE_TEST_SUITE_P(Formats, Minifloat, testing::Values(Codes::f8_e4m3, Codes::f8_e5m2),
                         [](const auto& row) { return std::string(trait(row.param).name); });

TEST_P(Minifloat, EveryCodeIsItsOwnNearest) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const float value = trait(GetParam()).values[code];
    if (std::isnan(value)) {
      EXPECT_EQ(encode(GetParam(), value), (code & 0x80u) | 0x7fu);
    } else {
      EXPECT_EQ(encode(GetParam(), value), code);
    }
  }
}

TEST_P(Minifloat, MidpointsGoToEvenAndTheirNeighboursToTheNearer) {
  for (int code = 0; code < largest_code(GetParam()); ++code) {
    const auto values = trait(GetParam()).values.subspan(static_cast<std::size_t>(code));
    const double middle = (static_cast<double>(values[0]) + values[1]) / 2;
    const auto low = static_cast<std::uint32_t>(code);
    EXPECT_EQ(encode(GetParam(), middle), low % 2 == 0 ? low : low + 1);
    EXPECT_EQ(encode(GetParam(), -middle), (low % 2 == 0 ? low : low + 1) | 0x80u);
    EXPECT_EQ(encode(GetParam(), std::nextafter(middle, 0.0)), low);
    EXPECT_EQ(encode(GetParam(), std::nextafter(middle, kInf)), low + 1);
  }
}

TEST_P(Minifloat, AllHalvesEqualTheSearch) {
  for (int h = 0; h < 65536; ++h)
    for (const float x :
         {bf16_to_f32(static_cast<std::uint16_t>(h)), f16_to_f32(static_cast<std::uint16_t>(h))}) {
      if (std::isfinite(x)) {
        EXPECT_EQ(encode(GetParam(), x), search(GetParam(), x)) << x;
      } else if (std::isnan(x)) {
        EXPECT_EQ(encode(GetParam(), x) & 0x7fu, 0x7fu);
      } else {  // e4m3 has no inf
        EXPECT_EQ(encode(GetParam(), x) & 0x7fu, GetParam() == Codes::f8_e4m3 ? 0x7fu : 0x7cu);
      }
    }
}

TEST(Encode, SaturatesAtTheLargestValue) {
  EXPECT_EQ(encode(Codes::f8_e4m3, 448.0), 0x7eu);
  EXPECT_EQ(encode(Codes::f8_e4m3, 1e300), 0x7eu);
  EXPECT_EQ(encode(Codes::f8_e5m2, 57344.0), 0x7bu);
  EXPECT_EQ(encode(Codes::f8_e5m2, 65000.0), 0x7bu);
  EXPECT_EQ(encode(Codes::f8_e5m2, -1e9), 0xfbu);
  EXPECT_EQ(encode(Codes::f16, 65520.0), 0x7bffu);
  EXPECT_EQ(encode(Codes::f16, -1e9), 0xfbffu);
  EXPECT_EQ(encode(Codes::bf16, 3.4028234663852886e38), 0x7f7fu);  // would round to inf
  EXPECT_EQ(encode(Codes::bf16, -1e300), 0xff7fu);
  EXPECT_EQ(encode(Codes::f32, 1e39), 0x7f7fffffu);
}

TEST(Encode, KeepsTheSignOfZeroAndOfWhatRoundsToIt) {
  for (const Codes codes : {Codes::f32, Codes::bf16, Codes::f16, Codes::f8_e4m3, Codes::f8_e5m2}) {
    const std::uint32_t sign = std::uint32_t{1} << (trait(codes).bits - 1);
    EXPECT_EQ(encode(codes, 0.0), 0u);
    EXPECT_EQ(encode(codes, -0.0), sign);
    EXPECT_EQ(encode(codes, -1e-300), sign);
    EXPECT_EQ(encode(codes, 1e-300), 0u);
  }
}

TEST(Encode, AllHalvesComeBackInTheirOwnFormatAndF32) {
  for (int h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const float b = bf16_to_f32(half), f = f16_to_f32(half);
    if (std::isfinite(b)) {
      EXPECT_EQ(encode(Codes::bf16, b), half);
      EXPECT_EQ(encode(Codes::f32, b), bits_of(b));
    }
    if (std::isfinite(f)) {
      EXPECT_EQ(encode(Codes::f16, f), half);
      EXPECT_EQ(encode(Codes::f32, f), bits_of(f));
    }
  }
}

TEST(Encode, RoundsDoublesOnce) {
  // 1 + 2^-8 is half way between two bf16; a little more rounds up, though fp32 would lose it.
  EXPECT_EQ(encode(Codes::bf16, 1.0 + 0x1p-8), 0x3f80u);
  EXPECT_EQ(encode(Codes::bf16, 1.0 + 0x1p-8 + 0x1p-40), 0x3f81u);
  EXPECT_EQ(encode(Codes::f8_e4m3, 1.0 + 0x1p-4 + 0x1p-40), 0x39u);
  EXPECT_EQ(encode(Codes::f32, 1.0 + 0x1p-24 + 0x1p-50), 0x3f800001u);
}

TEST(Encode, NonfinitePassesAsTheFormatHasIt) {
  EXPECT_EQ(encode(Codes::f32, -kInf), 0xff800000u);
  EXPECT_EQ(encode(Codes::bf16, kInf), 0x7f80u);
  EXPECT_EQ(encode(Codes::f16, -kInf), 0xfc00u);
  EXPECT_EQ(encode(Codes::f16, NAN), 0x7e00u);
  EXPECT_EQ(encode(Codes::bf16, -static_cast<double>(NAN)), 0xffc0u);
}

TEST(Dequantize, EveryCodeTimesItsScaleInEveryType) {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  const float scale = 0.37f;
  const Weight weight(parse_storage("int8:tensor"), {256},
                      std::vector<const void*>{codes.data(), &scale});
  std::vector<float> f32(256);
  std::vector<double> f64(256);
  std::vector<std::uint16_t> bf16(256), f16(256);
  dequantize(weight, f32.data(), Dtype::f32);
  dequantize(weight, f64.data(), Dtype::f64);
  dequantize(weight, bf16.data(), Dtype::bf16);
  dequantize(weight, f16.data(), Dtype::f16);
  for (int i = 0; i < 256; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const float value = static_cast<float>(i < 128 ? i : i - 256) * scale;
    EXPECT_EQ(f32[at], value);
    EXPECT_EQ(f64[at], static_cast<double>(value));  // the fp32 product, not a new one
    EXPECT_EQ(bf16[at], f32_to_bf16(value));
    EXPECT_EQ(f16[at], f32_to_f16(value));
  }
}

TEST(Dequantize, OverflowIsInf) {
  const std::uint8_t code = 127;
  const float scale = 1000.0f;
  const Weight weight(parse_storage("int8:tensor"), {1}, std::vector<const void*>{&code, &scale});
  std::uint16_t out = 0;
  dequantize(weight, &out, Dtype::f16);
  EXPECT_EQ(out, 0x7c00);
}

TEST(Dequantize, EachElementFindsItsScale) {
  const Shape shape{2, 3, 5};
  const std::vector<std::uint8_t> codes(30, 1);
  std::vector<float> scales(30);
  for (std::size_t i = 0; i < 30; ++i) scales[i] = static_cast<float>(i + 1);
  const auto at = [&](const char* storage, std::int64_t i) {
    return value_at(Weight(parse_storage(storage), shape,
                           std::vector<const void*>{codes.data(), scales.data()}),
                    i);
  };
  EXPECT_EQ(at("int8:tensor", 29), 1.0f);
  EXPECT_EQ(at("int8:row", 14), 1.0f);
  EXPECT_EQ(at("int8:row", 15), 2.0f);
  EXPECT_EQ(at("int8:row2", 4), 1.0f);
  EXPECT_EQ(at("int8:row2", 5), 2.0f);
  EXPECT_EQ(at("int8:row2", 29), 6.0f);
  EXPECT_EQ(at("int8:block4", 14), 4.0f);  // a short block ends row 0
  EXPECT_EQ(at("int8:block4", 15), 5.0f);
  EXPECT_EQ(at("int8:block4", 29), 8.0f);
}

TEST(Named, EachColumnHasTheScaleAndTheZeroOfItsGroup) {
  const std::vector<std::uint8_t> codes{0x91, 0x2f, 0x80, 0x7c};  // 1 9 15 2, 0 8 12 7
  const std::vector<float> scales{0.5f, 2.0f, 10.0f, 100.0f};
  const std::vector<std::int8_t> zeros{-8, 1, 0, 7};
  const std::vector<std::int32_t> groups{1, 0, 1, 0};
  const Weight weight(
      parse_storage("int4:block2:zero:actorder"), {2, 4},
      std::vector<const void*>{codes.data(), scales.data(), zeros.data(), groups.data()});
  const std::vector<float> values{-7 - 1, 1 + 8, 7 - 1, -6 + 8, -8 - 7, 0, 4 - 7, -1};
  const std::vector<float> times{2, 0.5f, 2, 0.5f, 100, 10, 100, 10};
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(value_at(weight, static_cast<std::int64_t>(i)), values[i] * times[i]) << i;
}

TEST(Named, ValuesAloneDoNotMakeSuchAWeight) {
  const std::vector<float> values(8);
  const Storage storage = parse_storage("int8:block2:actorder");
  std::vector<std::byte> room(64);
  const std::vector<void*> parts(3, room.data());
  EXPECT_STOWAGE_ERROR(quantize(values.data(), Dtype::f32, {2, 4}, storage, parts),
                       invalid_argument, "such as int8:block2, got int8:block2:actorder");
  EXPECT_STOWAGE_ERROR(layout(storage, {2, 4, 6}), invalid_argument, "must have 2 dimensions");
  EXPECT_EQ(layout(storage, {2, 8192}).parts[1].shape, (Shape{2, 4096}));
  EXPECT_STOWAGE_ERROR(layout(storage, {2, 8193}), invalid_argument,
                       "at most 4096 groups in each row, got shape [2, 8193]");
}

}  // namespace
}  // namespace stowage::reference

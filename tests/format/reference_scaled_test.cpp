// SPDX-License-Identifier: Apache-2.0
// Scaled 8-bit codes and 4-bit codes: the scale rule, ties, zeros, subnormals, NaN and inf.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "expect_error.h"
#include "format/convert.h"
#include "format/dynamic_map.h"
#include "format/reference.h"

namespace stowage::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

struct Packed {
  Storage storage;
  Shape shape;
  std::vector<std::vector<std::byte>> parts;

  std::vector<std::uint8_t> bytes(std::size_t part) const {
    std::vector<std::uint8_t> all;
    for (const std::byte b : parts[part]) all.push_back(std::to_integer<std::uint8_t>(b));
    return all;
  }
  std::vector<float> floats(std::size_t part) const {
    std::vector<float> all(parts[part].size() / sizeof(float));
    std::memcpy(all.data(), parts[part].data(), parts[part].size());
    return all;
  }
  std::vector<float> decoded() const {
    std::vector<const void*> pointers;
    for (const auto& part : parts) pointers.push_back(part.data());
    std::vector<float> out(static_cast<std::size_t>(shape.elements()));
    dequantize(Weight(storage, shape, pointers), out.data(), Dtype::f32);
    return out;
  }
};

Packed pack(const char* text, const Shape& shape, const void* values, Dtype dtype = Dtype::f32,
            bool keep_nonfinite = false) {
  Packed packed{parse_storage(text), shape, {}};
  const Layout made = layout(packed.storage, shape);
  std::vector<void*> pointers;
  for (int i = 0; i < made.count; ++i) {
    packed.parts.emplace_back(made.parts[static_cast<std::size_t>(i)].bytes);
    pointers.push_back(packed.parts.back().data());
  }
  quantize(values, dtype, shape, packed.storage, pointers, keep_nonfinite);
  return packed;
}

Packed pack(const char* text, const Shape& shape, const std::vector<float>& values,
            bool keep_nonfinite = false) {
  return pack(text, shape, values.data(), Dtype::f32, keep_nonfinite);
}

TEST(ScaleOf, IsAmaxOverLargestWithAFloor) {
  EXPECT_EQ(scale_of(3.0f, 127.0f), 3.0f / 127.0f);
  EXPECT_EQ(scale_of(0.0f, 448.0f), 1.0f);
  EXPECT_EQ(scale_of(0x1p-140f, 448.0f), 0x1p-126f);
  EXPECT_EQ(scale_of(0x1p-149f, 57344.0f), 0x1p-126f);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::max(), 127.0f),
            std::numeric_limits<float>::max() / 127.0f);
}

TEST(QuantizeScaled, EachGroupHasItsOwnAmax) {
  std::vector<float> values(30);
  std::iota(values.begin(), values.end(), 1.0f);
  const Shape shape{2, 3, 5};
  EXPECT_EQ(pack("int8:tensor", shape, values).floats(1), std::vector{30.0f / 127});
  EXPECT_EQ(pack("int8:row", shape, values).floats(1), (std::vector{15.0f / 127, 30.0f / 127}));
  EXPECT_EQ(
      pack("f8_e4m3:row2", shape, values).floats(1),
      (std::vector{5.0f / 448, 10.0f / 448, 15.0f / 448, 20.0f / 448, 25.0f / 448, 30.0f / 448}));
  EXPECT_EQ(pack("f8_e5m2:block8", shape, values).floats(1),
            (std::vector{8.0f / 57344, 15.0f / 57344, 23.0f / 57344, 30.0f / 57344}));
}

TEST(QuantizeScaled, ZerosHaveScaleOne) {
  const Packed packed = pack("int8:row", {2, 2}, {0.0f, -0.0f, 1.0f, -1.0f});
  EXPECT_EQ(packed.floats(1), (std::vector{1.0f, 1.0f / 127}));
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0, 0, 127, 129}));
}

TEST(QuantizeScaled, Int8NeverUsesMinus128) {
  const Packed packed = pack("int8:tensor", {3}, {-5.0f, 5.0f, -4.99f});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0x81, 0x7f, 0x81}));
}

TEST(QuantizeScaled, TiesGoToEven) {
  // amax 127 makes the scale 1: the values are the codes.
  const Packed packed = pack("int8:tensor", {6}, {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{127, 0, 2, 2, 0, 0xfe}));
}

// amax 6 makes the scale 1. Of two values as near the one with the even code is taken; the sign
// stays, of zeros too; and the first of two codes lies in the low half of their byte.
TEST(QuantizeScaled, E2m1TiesGoToEven) {
  const std::vector<float> values{0.25f, 0.75f,  1.25f,  1.75f, 2.5f,  3.5f,
                                  5.0f,  -0.25f, -0.75f, 0.0f,  -0.0f, 6.0f};
  const Packed packed = pack("f4_e2m1:tensor", {2, 6}, values);
  EXPECT_EQ(packed.floats(1), std::vector{1.0f});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0x20, 0x42, 0x64, 0x86, 0x0A, 0x78}));
}

// OCP MX 1.0: 2^(floor(log2 amax) - 2). What is beyond 6 of these becomes 6.
TEST(QuantizeScaled, E2m1TakesThePowerOfTwoBelowAmax) {
  const Packed packed = pack("f4_e2m1:block2:e8m0", {6, 2},
                             {7.9f, 1.0f, 4.0f, -7.0f, 3.99f, 0.25f, 0.0f, -0.0f, 0x1p-149f, 0.0f,
                              std::numeric_limits<float>::max(), 0x1p127f});
  EXPECT_EQ(packed.bytes(1), (std::vector<std::uint8_t>{127, 127, 126, 127, 1, 252}));
  EXPECT_EQ(packed.decoded(), (std::vector{6.0f, 1.0f, 4.0f, -6.0f, 3.0f, 0.25f, 0.0f, -0.0f, 0.0f,
                                           0.0f, 6 * 0x1p125f, 0x1p127f}));
}

// amax 7.5 makes the scale 1. Both ends are codes: 7.5 becomes 7, -7.5 the even -8.
TEST(QuantizeScaled, Int4TakesAllSixteenCodes) {
  const Packed packed = pack("int4:row", {2, 8},
                             {7.5f, -7.5f, 0.5f, 1.5f, -0.5f, -1.5f, 0.0f, -0.0f,  //
                              -3.0f, 2.8f, -2.6f, 0.25f, 0.0f, 0.1f, 1.0f, -1.0f});
  EXPECT_EQ(packed.floats(1), (std::vector{1.0f, 3.0f / 7.5f}));
  EXPECT_EQ(packed.bytes(0),
            (std::vector<std::uint8_t>{0x0F, 0xA8, 0x68, 0x88, 0xF0, 0x92, 0x88, 0x6A}));
}

// amax 3.5 makes the scale 1, and 3.5 becomes 3, of two as near the even -4. Codes 7 0 5 6 2 4 4 3:
//   byte 2     byte 1     byte 0        from the lowest bit up
//   01110010   00101101   01000111
TEST(QuantizeScaled, CodesOfThreeBitsAreOneString) {
  const Packed packed = pack("int3:row", {2, 8},
                             {3.5f, -3.5f, 1.4f, 2.0f, -2.5f, 0.25f, -0.0f, -1.1f,  //
                              0, 0, 0, 0, 0, 0, 0, 0});
  EXPECT_EQ(packed.floats(1), (std::vector{1.0f, 1.0f}));
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0x47, 0x2D, 0x72, 0x24, 0x49, 0x92}));
}

// Of seven bits, from -1 to 126 in steps of 1: 0 is code 1, which rests as -63.
TEST(QuantizeScaled, CodesOfSevenBitsWithZeros) {
  const Packed packed =
      pack("int7:row:zero", {1, 8}, {-1.0f, 126.0f, 0.0f, 1.0f, 62.0f, 2.5f, 125.4f, 0.5f});
  EXPECT_EQ(packed.floats(1), (std::vector{1.0f}));
  EXPECT_EQ(packed.bytes(2), (std::vector<std::uint8_t>{0xC1}));
  std::uint64_t codes = 0;
  for (const std::uint64_t code : {2, 126, 4, 63, 2, 1, 127, 0}) codes = codes << 7 | code;
  std::vector<std::uint8_t> bytes;
  for (int i = 0; i < 7; ++i) bytes.push_back(static_cast<std::uint8_t>(codes >> (8 * i)));
  EXPECT_EQ(packed.bytes(0), bytes);
}

// From -1 to 2 by fifteenths: 0 is code 5, which rests as the number -3.
TEST(QuantizeScaled, Int4WithZerosTakesAllCodesFromTheLeastToTheLargest) {
  const Packed packed = pack("int4:row:zero", {3, 4},
                             {-1.0f, 2.0f, 0.0f, 0.5f, 3.0f, 1.5f, 1.0f, 0.0f,  //
                              0.0f, 0.0f, 0.0f, 0.0f});
  EXPECT_EQ(packed.floats(1), (std::vector{3.0f / 15, 3.0f / 15, 1.0f}));
  EXPECT_EQ(packed.bytes(2), (std::vector<std::uint8_t>{0xFD, 0xF8, 0xF8}));
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0xF0, 0x85, 0x8F, 0x05, 0x00, 0x00}));
}

// ModelOpt's rule. amax 6 * 448 makes the number over all scales 1: a scale is amax / 6, rounded to
// e4m3 (17 to the even 16), 1 where there is nothing to scale, and no less than the least.
TEST(QuantizeScaled, E4m3ScalesStandUnderOneOfAll) {
  const Packed packed = pack("f4_e2m1:block2:e4m3", {7, 2},
                             {2688.0f, -5.0f, 18.0f, 9.0f, 102.0f, -50.0f, 0.0f, -0.0f, 0x1p-8f,
                              0x1p-20f, 0x1p-149f, -0x1p-149f, 0.0625f, -0.1f});
  EXPECT_EQ(packed.bytes(1), (std::vector<std::uint8_t>{0x7E, 0x44, 0x58, 0x38, 1, 0x38, 9}));
  EXPECT_EQ(packed.floats(2), std::vector{1.0f});
  EXPECT_EQ(packed.decoded(),
            (std::vector{2688.0f, -0.0f, 18.0f, 9.0f, 96.0f, -48.0f, 0.0f, -0.0f, 0x1p-8f, 0.0f,
                         0.0f, -0.0f, 4 * 0x1.2p-6f, -6 * 0x1.2p-6f}));
  EXPECT_EQ(pack("nvfp4", {1, 2}, {0.0f, 0.0f}).floats(2), std::vector{1.0f});
  EXPECT_EQ(pack("nvfp4", {1, 2}, {3.0f, 0.0f}).floats(2), std::vector{3.0f / 2688});
}

// So that no scale is too small for a reciprocal.
TEST(QuantizeScaled, TheNumberOverE4m3ScalesHasALowerBound) {
  const Packed packed = pack("nvfp4", {1, 2}, {0x1p-126f, -0x1p-149f});
  EXPECT_EQ(packed.floats(2), std::vector{0x1p-117f});
  EXPECT_EQ(packed.bytes(1), std::vector<std::uint8_t>{1});
  EXPECT_EQ(packed.decoded(), (std::vector{0x1p-126f, -0.0f}));
}

TEST(QuantizeScaled, NumbersOverE4m3ScalesDivideOrMultiplyInBf16) {
  // 3 x 7/3 of 448 x 6: the number over all is 384 where it divides, its inverse else.
  const std::vector<float> values{7.0f, -3.5f, 2.0f, 0.75f};
  const Packed quotient = pack("f4_e2m1:block2:e4m3_quotient", {1, 4}, values);
  EXPECT_EQ(quotient.floats(2), std::vector{384.0f});
  EXPECT_EQ(quotient.bytes(1), (std::vector<std::uint8_t>{0x7E, 0x70}));  // 448, 128
  EXPECT_EQ(quotient.decoded(),
            (std::vector{448.0f / 384 * 6, 448.0f / 384 * -3, 128.0f / 384 * 6, 128.0f / 384 * 2}));
  const Packed product = pack("f4_e2m1:block2:e4m3_bf16", {1, 4}, values);
  EXPECT_EQ(product.floats(2), std::vector{7.0f / 2688});
  EXPECT_EQ(product.bytes(1), (std::vector<std::uint8_t>{0x7E, 0x70}));
  // 1/384 is 0x1.56p-9 in bf16, 448 of it 0x1.2bp0 = 0x1.2cp0, 128 of it 0x1.56p-2.
  EXPECT_EQ(product.decoded(),
            (std::vector{0x1.2cp0f * 6, 0x1.2cp0f * -3, 0x1.56p-2f * 6, 0x1.56p-2f * 2}));
  EXPECT_EQ(pack("f4_e2m1:block2:e4m3_quotient", {1, 2}, {0x1p-126f, 0.0f}).floats(2),
            std::vector{0x1p117f});
  EXPECT_EQ(pack("f4_e2m1:block2:e4m3_quotient", {1, 2}, {0.0f, 0.0f}).floats(2),
            std::vector{1.0f});
}

// Each number is that of a weight that has such values alone.
TEST(QuantizeScaled, NumbersOverE4m3ScalesAreOfRowsOrOfPairsOfIndices) {
  const std::vector<std::vector<float>> pairs{
      {7.0f, -3.5f, 2.0f, 0.75f},          {0.0f, -0.0f, 0.0f, 0.0f},
      {0x1p-126f, 0.0f, -0x1p-149f, 0.0f}, {5.0f, 640.0f, -0.25f, 1e-3f},
      {3e38f, 1.0f, 1e30f, -2e30f},        {1e-20f, 3e-21f, -1e-20f, 2e-20f}};
  const auto joined = [&](std::size_t from, std::size_t to) {
    std::vector<float> all;
    for (; from < to; ++from) all.insert(all.end(), pairs[from].begin(), pairs[from].end());
    return all;
  };
  for (const std::string type : {"e4m3", "e4m3_bf16", "e4m3_quotient"}) {
    const std::string name = "f4_e2m1:block2:" + type;
    const auto expect_alone = [&](const Packed& all, std::int64_t rows, std::size_t each) {
      std::vector<float> outers, values;
      std::vector<std::uint8_t> codes, scales;
      for (std::size_t i = 0; i < pairs.size(); i += each) {
        const Packed one = pack(name.c_str(), {rows, 4}, joined(i, i + each));
        for (const std::uint8_t code : one.bytes(0)) codes.push_back(code);
        for (const std::uint8_t scale : one.bytes(1)) scales.push_back(scale);
        outers.push_back(one.floats(2)[0]);
        for (const float value : one.decoded()) values.push_back(value);
      }
      EXPECT_EQ(all.bytes(0), codes);
      EXPECT_EQ(all.bytes(1), scales);
      EXPECT_EQ(all.floats(2), outers);
      EXPECT_EQ(all.decoded(), values);
    };
    const std::vector<float> all = joined(0, 6);
    expect_alone(pack((name + ":row").c_str(), {6, 4}, all), 1, 1);
    expect_alone(pack((name + ":row").c_str(), {3, 2, 4}, all), 2, 2);
    expect_alone(pack((name + ":row2").c_str(), {3, 2, 4}, all), 1, 1);
    expect_alone(pack((name + ":row2").c_str(), {2, 3, 2, 2}, all), 1, 1);
  }
  EXPECT_EQ(pack("nvfp4:row", {2, 0}, std::vector<float>{}).floats(2), (std::vector{1.0f, 1.0f}));
}

// int8_vectorwise_quant and int8_vectorwise_dequant of bitsandbytes 0.50.
TEST(QuantizeScaled, KeepsTheLargestMagnitudesAndRoundsTwoProducts) {
  const std::vector<float> values{0.7f, -0.1f, 0.35f, 0.0f, -0.0f, 0.0f, -3.0f, 1.5f, 2.99f};
  const Packed packed = pack("int8:row:absmax", {3, 3}, values);
  EXPECT_EQ(packed.floats(1), (std::vector{0.7f, 0.0f, 3.0f}));
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{127, 0xEE, 64, 0, 0, 0, 0x81, 64, 127}));
  const std::vector<float> decoded = packed.decoded();
  EXPECT_EQ(decoded[1], -18.0f * 0.7f * (1.0f / 127));
  EXPECT_EQ(decoded[3], 0.0f);
  EXPECT_FALSE(std::signbit(decoded[4]));
  int apart = 0;  // a product with one number would round to others
  for (int q = 1; q < 127; ++q) {
    const float code = static_cast<float>(q), amax = 0.7f;
    apart += static_cast<int>(code * amax * (1.0f / 127) != code * (amax * (1.0f / 127)));
  }
  EXPECT_GT(apart, 20);
}

// The quotient of F and the largest magnitude stays finite.
TEST(QuantizeScaled, TheLargestMagnitudeHasALowerBound) {
  const Packed packed = pack("int8:row:absmax", {1, 2}, {0x1p-130f, -0x1p-149f});
  EXPECT_EQ(packed.floats(1), std::vector{127 * 0x1p-126f});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0, 0}));
}

TEST(QuantizeScaled, MultipliesByTheRoundedReciprocal) {
  // Find a value whose code differs between x * fl(1 / s) and x / s: the rule is the product.
  int found = 0;
  for (int i = 1; i < 40000 && found < 5; ++i) {
    const float amax = 1.0f + static_cast<float>(i) * 1e-4f, scale = amax / 127.0f;
    for (float half = 0.5f; half < 127.0f; half += 1.0f) {
      const float x = half * scale;
      const float product = std::nearbyint(x * (1.0f / scale)),
                  quotient = std::nearbyint(x / scale);
      if (product == quotient) continue;
      ++found;
      EXPECT_EQ(pack("int8:tensor", {2}, {amax, x}).bytes(0)[1],
                static_cast<std::uint8_t>(product));
    }
  }
  EXPECT_GE(found, 5);
}

TEST(QuantizeScaled, SubnormalWeightsKeepAFiniteReciprocal) {
  const Packed packed = pack("f8_e4m3:tensor", {2}, {0x1p-149f, -0x1p-130f});
  EXPECT_EQ(packed.floats(1), std::vector{0x1p-126f});
  EXPECT_EQ(packed.decoded(), (std::vector{0.0f, -0x1p-130f}));
}

TEST(QuantizeScaled, TheLargestFloatTakesTheLargestCode) {
  // Its scale may be rounded up, and then it comes back as inf: dequantize never saturates.
  const float huge = std::numeric_limits<float>::max();
  const Packed packed = pack("int8:row", {1, 3}, {huge, -huge, huge / 2});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{127, 129, 63}));
  EXPECT_EQ(packed.decoded()[0], kInfinity);
  EXPECT_NEAR(packed.decoded()[2] / huge, 0.5f, 0.01f);
}

TEST(QuantizeScaled, RequantizingAnF32DequantizationChangesNoCode) {
  std::vector<float> values(4096);
  std::uint32_t s = 1;
  for (float& x : values) {
    s = s * 1664525u + 1013904223u;
    x = std::ldexp(static_cast<float>(static_cast<std::int32_t>(s)), -31 - static_cast<int>(s % 7));
  }
  for (const char* storage : {"int8:row", "int8:block32", "f8_e4m3:row", "f8_e5m2:tensor",
                              "f8_e4m3:block48", "nf4", "fp4", "nf4:block128", "f4_e2m1",
                              "f4_e2m1:block32:e8m0", "f4_e2m1:row", "nvfp4", "nvfp4:row"}) {
    const Packed first = pack(storage, {64, 64}, values);
    const Packed second = pack(storage, {64, 64}, first.decoded());
    if (first.storage.scaling.type == ScaleType::e4m3)  // the one over them may be next to it
      EXPECT_EQ(second.bytes(1), first.bytes(1)) << storage;
    else
      EXPECT_EQ(second.decoded(), first.decoded()) << storage;
    if (first.storage.codes == Codes::fp4) continue;  // code 8 is +0, and +0 takes code 0
    EXPECT_EQ(second.bytes(0), first.bytes(0)) << storage;
  }
}

TEST(QuantizeScaled, DoublesAreRoundedToF32First) {
  const std::vector<double> values{1.0 + 0x1p-40, 0.5 + 0x1p-60};
  const std::vector<float> rounded{1.0f, 0.5f};
  for (const char* storage : {"int8:row", "nf4"}) {
    const Packed direct = pack(storage, {1, 2}, values.data(), Dtype::f64);
    EXPECT_EQ(direct.parts, pack(storage, {1, 2}, rounded).parts) << storage;
  }
}

TEST(QuantizeScaled, HalvesEqualTheirF32Values) {
  const std::vector<std::uint16_t> bf16{0x3f80, 0xbf03, 0x0001, 0x4049};
  std::vector<float> widened;
  for (const auto h : bf16) widened.push_back(bf16_to_f32(h));
  for (const char* storage : {"int8", "f8_e4m3:row", "nf4", "fp4:nested", "f8_e5m2"})
    EXPECT_EQ(pack(storage, {2, 2}, bf16.data(), Dtype::bf16).parts,
              pack(storage, {2, 2}, widened).parts)
        << storage;
}

TEST(QuantizeScaled, EmptyWeightsHaveScaleOne) {
  EXPECT_EQ(pack("int8:row", {2, 0}, std::vector<float>{}).floats(1), (std::vector{1.0f, 1.0f}));
  EXPECT_EQ(pack("f8_e4m3:tensor", {0}, std::vector<float>{}).floats(1), std::vector{1.0f});
  EXPECT_TRUE(pack("nf4", {0}, std::vector<float>{}).parts[0].empty());
}

TEST(Nonfinite, IsRefusedByIndex) {
  std::vector<float> values(8, 1.0f);
  values[5] = kNan;
  for (const char* storage : {"f32", "bf16", "f8_e4m3", "int8:row", "nf4", "nf4:nested"})
    EXPECT_STOWAGE_ERROR(pack(storage, {2, 4}, values), invalid_argument, "got nan at element 5");
  values[5] = -kInfinity;
  EXPECT_STOWAGE_ERROR(pack("f8_e5m2", {8}, values), invalid_argument,
                       "quantize: values must be finite, got -inf at element 5");
}

TEST(Nonfinite, IsNeverKeptUnderAScale) {
  const std::vector<float> values{1.0f, kInfinity};
  for (const char* storage : {"int8:row", "f8_e4m3:tensor", "f8_e5m2:block32", "nf4:nested"})
    EXPECT_STOWAGE_ERROR(pack(storage, {1, 2}, values, true), invalid_argument,
                         "values must be finite in " + to_string(parse_storage(storage)));
}

TEST(Nonfinite, ADoubleBeyondF32IsRefusedWhereItIsScaled) {
  const std::vector<double> values{1.0, 1e39};
  EXPECT_STOWAGE_ERROR(pack("int8", {2}, values.data(), Dtype::f64), invalid_argument,
                       "at element 1");
  EXPECT_EQ(pack("f8_e4m3", {2}, values.data(), Dtype::f64).bytes(0)[1], 0x7e);  // a cast saturates
}

TEST(Nonfinite, CastsKeepItOnRequest) {
  const std::vector<float> values{kNan, -kNan, kInfinity, -kInfinity};
  EXPECT_EQ(pack("f8_e4m3", {4}, values, true).bytes(0),
            (std::vector<std::uint8_t>{0x7f, 0xff, 0x7f, 0xff}));
  EXPECT_EQ(pack("f8_e5m2", {4}, values, true).bytes(0),
            (std::vector<std::uint8_t>{0x7f, 0xff, 0x7c, 0xfc}));
  EXPECT_EQ(pack("f32", {4}, values, true).floats(0)[2], kInfinity);
}

TEST(Nonfinite, Nf4KeepsItBlockwiseAsBitsandbytesDoes) {
  std::vector<float> values(192, 0.5f);
  values[3] = kNan;
  values[70] = kInfinity;
  const Packed packed = pack("nf4", {192}, values, true);
  const auto absmax = packed.floats(1);
  EXPECT_TRUE(std::isnan(absmax[0]));
  EXPECT_EQ(absmax[1], kInfinity);
  EXPECT_EQ(absmax[2], 0.5f);
  EXPECT_EQ(packed.bytes(0)[0], 0xff);   // NaN takes the last code
  EXPECT_EQ(packed.bytes(0)[32], 0x77);  // finite / inf is zero
  EXPECT_EQ(packed.bytes(0)[35], 0xf7);  // inf * 0 is NaN
  EXPECT_TRUE(std::isnan(packed.decoded()[0]));
  EXPECT_EQ(packed.decoded()[191], 0.5f);
}

TEST(Encode4, Nf4ThresholdsAreThePublishedBits) {
  const std::vector<std::uint32_t> expected{0xbf591cd8, 0xbf1c5270, 0xbeeb8480, 0xbeadea76,
                                            0xbe703cec, 0xbe0d38bc, 0xbd3a7871, 0x3d22faff,
                                            0x3df64862, 0x3e5067e0, 0x3e9582d4, 0x3ec753f9,
                                            0x3f006d04, 0x3f248daf, 0x3f5c89da};
  for (std::size_t k = 0; k < 15; ++k)
    EXPECT_EQ(bits_of(thresholds4(Codes::nf4)[k]), expected[k]) << k;
}

TEST(Encode4, MidpointsTakeTheLowerValue) {
  for (const Codes codes : {Codes::nf4, Codes::fp4}) {
    const auto values = trait(codes).values;
    for (const float t : thresholds4(codes)) {
      const float at = values[encode4(codes, t)],
                  above = values[encode4(codes, std::nextafter(t, kInfinity))];
      EXPECT_LE(at, t);
      EXPECT_GE(above, t);
      EXPECT_TRUE(at < above || t == 0.0f);
    }
    for (const float v : values) EXPECT_EQ(values[encode4(codes, v)], v);
    EXPECT_EQ(values[encode4(codes, kNan)], 1.0f);
  }
}

TEST(Encode4, Fp4SplitsZeroBetweenItsTwoZeros) {
  EXPECT_EQ(encode4(Codes::fp4, 0.0f), 0);
  EXPECT_EQ(encode4(Codes::fp4, -0.0f), 0);
  EXPECT_EQ(encode4(Codes::fp4, -0x1p-149f), 0);
  EXPECT_EQ(encode4(Codes::fp4, 0x1p-149f), 8);
  EXPECT_EQ(encode4(Codes::fp4, 1.0f / 384), 8);
  EXPECT_EQ(encode4(Codes::fp4, 0.003f), 1);
  EXPECT_EQ(encode4(Codes::fp4, -0.003f), 9);
}

TEST(Quantize4, AnAllZeroBlockStaysZero) {
  const Packed packed = pack("nf4", {128}, std::vector<float>(128, 0.0f));
  EXPECT_EQ(packed.bytes(0), std::vector<std::uint8_t>(64, 0x77));
  EXPECT_EQ(packed.floats(1), (std::vector{0.0f, 0.0f}));
  EXPECT_EQ(packed.decoded(), std::vector<float>(128, 0.0f));
  // The short last block divides, and stores what it divided by.
  EXPECT_EQ(pack("nf4", {3}, std::vector<float>(3, 0.0f)).floats(1), std::vector{1e-38f});
}

TEST(Quantize4, FirstElementIsTheHighNibble) {
  const Packed packed = pack("nf4", {3}, {-1.0f, 1.0f, 1.0f});
  EXPECT_EQ(packed.bytes(0), (std::vector<std::uint8_t>{0x0f, 0xf7}));  // padded with the code of 0
  EXPECT_EQ(pack("fp4", {3}, {-1.0f, 1.0f, 1.0f}).bytes(0),
            (std::vector<std::uint8_t>{0xb3, 0x30}));
}

TEST(Quantize4, NestedScalesDecodeThroughTheStoredMap) {
  std::vector<float> values(64 * 3);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i / 64 + 1) * (i % 2 == 0 ? 1.0f : -1.0f);
  Packed packed = pack("nf4:nested", {192}, values);
  EXPECT_EQ(packed.floats(4), std::vector{2.0f});
  EXPECT_EQ(packed.floats(2), std::vector{1.0f});
  // 0 lies between two of the 65,536 steps; the upper one is nearest to entry 131, not to 127.
  EXPECT_EQ(packed.bytes(1), (std::vector<std::uint8_t>{0, 131, 255}));
  EXPECT_EQ(packed.decoded()[191], -3.0f);
  const float other = 0.5f;  // another map in the file wins over ours
  std::memcpy(packed.parts[3].data() + 255 * sizeof other, &other, sizeof other);
  EXPECT_EQ(packed.decoded()[191], -2.5f);
}

TEST(Quantize, RefusesTypesThatHoldNoValues) {
  const std::int32_t value = 1;
  EXPECT_STOWAGE_ERROR(pack("int8", {1}, &value, Dtype::i32), invalid_argument,
                       "quantize: values must be f64, f32, bf16 or f16, got I32");
}

TEST(Quantize, RefusesTheWrongNumberOfParts) {
  const float value = 1;
  std::uint8_t code = 0;
  const std::vector<void*> parts{&code};
  EXPECT_STOWAGE_ERROR(quantize(&value, Dtype::f32, {1}, parse_storage("int8"), parts),
                       invalid_argument, "quantize: int8:row must have 2 parts, got 1");
}

// [2, 3, 3] in blocks of 2 x 2: two rows of two blocks in each matrix, all but the first smaller.
TEST(Blocks, DoNotCrossTheMatricesOfAStack) {
  const std::vector<float> values{1, 2, 3, 4, 5,  6,  7,  8,  9,  //
                                  9, 8, 7, 6, 50, 40, 30, 20, 10};
  const Packed packed = pack("int8:block2x2", {2, 3, 3}, values);
  std::vector<float> wanted;
  for (const float amax : {5.0f, 6.0f, 8.0f, 9.0f, 50.0f, 40.0f, 30.0f, 10.0f})
    wanted.push_back(amax / 127);
  EXPECT_EQ(packed.floats(1), wanted);
  const std::vector<float> decoded = packed.decoded();
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(decoded[i], values[i], values[i] <= 9 && i < 9 ? 0.04 : 0.2) << i;
  EXPECT_EQ(scale_index(packed.storage, packed.shape, 8), 3);
  EXPECT_EQ(scale_index(packed.storage, packed.shape, 9), 4);
}

}  // namespace
}  // namespace stowage::reference

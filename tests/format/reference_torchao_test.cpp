// SPDX-License-Identifier: Apache-2.0
// nf4:torchao: the steps of its rule, where bytes of torchao itself are known, and what it makes of
// zeros and constants.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "expect_error.h"
#include "format/reference.h"
#include "format/torchao.h"

namespace stowage::reference {
namespace {

constexpr std::int64_t kElements = 16384;

struct TorchaoPacked {
  Storage storage;
  Shape shape;
  std::vector<std::vector<std::byte>> parts;

  Weight weight() const {
    std::vector<const void*> pointers;
    for (const auto& part : parts) pointers.push_back(part.data());
    return {storage, shape, pointers};
  }
  double mean() const { return read(parts[3].data(), layout(storage, shape).parts[3].dtype, 0); }
};

TorchaoPacked pack(const char* text, const std::vector<double>& values) {
  const Shape shape{static_cast<std::int64_t>(values.size())};
  TorchaoPacked packed{storage_for_values(parse_storage(text), Dtype::f64), shape, {}};
  const Layout made = layout(packed.storage, shape);
  std::vector<void*> pointers;
  for (int i = 0; i < made.count; ++i) {
    packed.parts.emplace_back(made.parts[static_cast<std::size_t>(i)].bytes);
    pointers.push_back(packed.parts.back().data());
  }
  quantize(values.data(), Dtype::f64, shape, packed.storage, pointers);
  return packed;
}

template <class D>
void expect_rounds_like_conversions() {
  for (std::uint32_t high = 0; high < 65536; ++high)
    for (const std::uint32_t low : {0U, 1U, 0xfffU, 0x1000U, 0x1001U, 0x2fffU, 0x3000U, 0x7fffU,
                                    0x8000U, 0x8001U, 0xefffU, 0xf000U, 0xf001U, 0xffffU}) {
      const float x = float_of(high << 16 | low);
      const std::uint32_t wanted = bits_of(D::widen(D::narrow(x))), got = bits_of(D::round(x));
      if (wanted != got) ADD_FAILURE() << std::hex << (high << 16 | low) << ": " << got;
    }
}

TEST(TorchaoRule, RoundsWithoutBranchesAsConversionsDo) {
  expect_rounds_like_conversions<torchao::Bf16>();
  expect_rounds_like_conversions<torchao::F16>();
}

// The first value of D, from below, that takes the higher code, found by trying all of them.
template <class D>
std::vector<float> first_above() {
  std::vector<float> found;
  int code = 0;
  for (int i = 0; i < 65536; ++i) {  // ascending: the negative half of D backwards, then the rest
    const auto bits = static_cast<std::uint16_t>(i < 32768 ? 65535 - i : i - 32768);
    const float x = D::widen(bits);
    if (!(std::fabs(x) <= 1.0f)) continue;
    const int now = torchao::encode<D>(x);
    EXPECT_GE(now, code) << x;
    if (now != code) found.push_back(x);
    code = now;
  }
  EXPECT_EQ(code, 15);
  return found;
}

template <class D>
std::vector<float> rounded(std::vector<float> all) {
  for (float& x : all) x = torchao::rounded<D>(x);
  return all;
}

TEST(TorchaoEncode, ThresholdsOfBf16AreThoseSeenInTorchao) {
  EXPECT_EQ(first_above<torchao::Bf16>(),
            rounded<torchao::Bf16>({-.84375f, -.60546875f, -.45703125f, -.337890625f, -.234375f,
                                    -.13769531f, -.04541016f, .04003906f, .12060547f, .20410156f,
                                    .29296875f, .390625f, .50390625f, .64453125f, .86328125f}));
}

TEST(TorchaoEncode, ThresholdsOfF16AreThoseSeenInTorchao) {
  EXPECT_EQ(
      first_above<torchao::F16>(),
      rounded<torchao::F16>({-.84765625f, -.6103515625f, -.459716796875f, -.339599609375f,
                             -.2344970703125f, -.137939453125f, -.0455322265625f, .039825439453125f,
                             .12030029296875f, .20361328125f, .292236328125f, .389404296875f,
                             .501953125f, .64306640625f, .86181640625f}));
}

TEST(TorchaoEncode, NanTakesTheFirstCode) {
  EXPECT_EQ(torchao::encode<torchao::F32>(std::nanf("")), 0);
  EXPECT_EQ(torchao::encode<torchao::Bf16>(std::nanf("")), 0);
}

TEST(TorchaoQuantize, AConstantWeightIsItsMeanInEveryBlock) {
  const TorchaoPacked packed = pack("nf4:torchao", std::vector<double>(kElements, -0.75));
  EXPECT_EQ(packed.mean(), 0.75);
  double factor = 0;
  std::memcpy(&factor, packed.parts[2].data(), sizeof factor);
  EXPECT_TRUE(std::isinf(factor));
  for (const std::byte scaler : packed.parts[1]) ASSERT_EQ(scaler, std::byte{0});
  for (std::int64_t i = 0; i < kElements; ++i)
    ASSERT_EQ(torchao_value_at(packed.weight(), i), -0.75);
}

TEST(TorchaoQuantize, ZeroBlocksHaveCodeZeroAndNeedNotDecodeToZero) {
  std::vector<double> values(kElements, 0.0);
  for (std::int64_t i = 64; i < kElements; ++i)
    values[static_cast<std::size_t>(i)] = 0.5 + static_cast<double>(i % 7);
  values.back() = 400;
  const TorchaoPacked packed = pack("nf4:torchao:f32", values);
  EXPECT_EQ(packed.parts[0][0], std::byte{0});
  EXPECT_NE(torchao_value_at(packed.weight(), 0), 0.0);  // as the peer decodes it
}

TEST(TorchaoQuantize, TheLargestDeviationIsClippedTo127) {
  std::vector<double> values(kElements, 1.0);
  values[0] = 3;
  const TorchaoPacked packed = pack("nf4:torchao:f32", values);
  EXPECT_EQ(packed.parts[1][0], std::byte{127});
  EXPECT_NE(packed.parts[1][1], std::byte{127});
}

TEST(TorchaoQuantize, ValuesOfAnotherDtypeAreCastFirst) {
  std::vector<double> values(kElements);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<double>(i));
  std::vector<double> cast = values;
  for (double& x : cast) x = round(Codes::bf16, x);
  EXPECT_EQ(pack("nf4:torchao:bf16", values).parts, pack("nf4:torchao:bf16", cast).parts);
  EXPECT_NE(pack("nf4:torchao:f32", values).parts, pack("nf4:torchao:f32", cast).parts);
}

TEST(TorchaoQuantize, RefusesWhatIsNotFinite) {
  std::vector<double> values(kElements, 1.0);
  values[17] = std::numeric_limits<double>::infinity();
  EXPECT_STOWAGE_ERROR(pack("nf4:torchao", values), invalid_argument,
                       "values must be finite in nf4:torchao:f64, got inf at element 17");
}

TEST(TorchaoDequantize, RoundsOnceMoreToAnotherDtype) {
  std::vector<double> values(kElements);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<double>(i));
  const TorchaoPacked packed = pack("nf4:torchao:f64", values);
  const Weight weight = packed.weight();
  std::vector<float> single(values.size());
  std::vector<double> wide(values.size());
  dequantize(weight, single.data(), Dtype::f32);
  dequantize(weight, wide.data(), Dtype::f64);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(wide[i], torchao_value_at(weight, static_cast<std::int64_t>(i)));
    ASSERT_EQ(single[i], static_cast<float>(wide[i]));
    ASSERT_NEAR(wide[i], values[i], 0.16);
  }
}

}  // namespace
}  // namespace stowage::reference
